"""Write docs/models.md from the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from textwrap import fill

from benchmarks.common import table
from benchmarks.coverage.architectures import all_types, decoder_only_types
from benchmarks.coverage.peers import Peer
from benchmarks.coverage.runner import EXPORTED, FORMS, Result, ResultFile
from benchmarks.coverage.tiny_configs import CONTEXT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
NEAR = 1e-5
"""Larger differences to torch's logits are named."""
COMMAND = "python -m benchmarks.coverage --write"
_TITLES = {"default": "`topw-export MODEL OUT`", "tensorrt": "`--target tensorrt`", "int4": "`--dtype int4`"}
_PACKAGES = ("transformers", "torch", "onnx", "onnxscript", "onnxruntime")


def page(file: ResultFile, peers: Sequence[Peer]) -> str:
    """The page's text."""
    types = decoder_only_types()
    parts = [
        _introduction(file, types),
        _summary(file, types, peers),
        _architectures(file, types),
        _refusals(file),
        _making(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(file: ResultFile, types: Sequence[str]) -> str:
    version = metadata.version("transformers")
    missing = sum(1 for name in types for form in FORMS if file.find(name, form) is None)
    note = f"This page is incomplete: {missing} exports have no result for this version yet."
    text = (
        f"transformers {version} maps {len(all_types())} types to a causal language model, of which {len(types)} are "
        "decoder-only language models, or multimodal models with such a text decoder. Each is tried as a tiny random "
        "model with every kind of layer, and its graph is compared with torch ([what is "
        "verified](guide/export.md#what-is-verified)). The others (encoder-decoders, encoders, draft models) are "
        "listed in `benchmarks/coverage/architectures.py`; [GGUF files](guide/export.md#gguf-files) have their own "
        "list."
    )
    return "\n\n".join(["# Models", _filled(text), *([note] if missing else [])])


def _summary(file: ResultFile, types: Sequence[str], peers: Sequence[Peer]) -> str:
    rows = []
    for form in FORMS:
        found = [file.find(name, form) for name in types]
        count = sum(1 for result in found if result is not None and result.outcome == EXPORTED)
        tried = sum(1 for result in found if result is not None)
        untried = "" if tried == len(types) else f"; {len(types) - tried} no result"
        rows.append([_TITLES[form] + untried, str(count), _share(count, len(types))])
    for peer in peers:
        count = len(set(peer.types) & set(types))
        rows.append([f"{peer.name} {peer.version}, listed", str(count), _share(count, len(types))])
    return (
        "## Summary\n\n"
        + table(["exporter", "architectures", f"of {len(types)}"], rows, left=3)
        + "\n\n"
        + _filled(
            f"The first {len(FORMS)} rows count exports that agree with torch. The others count the types that an "
            "exporter lists; these exporters were not run. mobius also tries to export unlisted types as Llama."
            + _unlisted(file, types, peers)
        )
    )


def _unlisted(file: ResultFile, types: Sequence[str], peers: Sequence[Peer]) -> str:
    """A sentence with the number of exported types that no other exporter lists."""
    listed = {name for peer in peers for name in peer.types}
    count = sum(1 for name in types if name not in listed and _exports(file, name))
    return f" {count} types export here that are in none of the other lists." if count else ""


def _architectures(file: ResultFile, types: Sequence[str]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    far, short = [], []
    for name in types:
        exports = _exports(file, name)
        if not exports:
            continue
        groups[", ".join(sorted(exports[0].states))].append(f"`{name}`")
        difference = float(f"{max(each.difference or 0.0 for each in exports):.0e}")
        context = min(each.context for each in exports)
        if difference > NEAR:
            far.append(f"`{name}` {difference:.0e}")
        if 0 < context < CONTEXT:
            short.append(f"`{name}` {context}")
    texts = [
        "These types export, in every form unless the table [below](#what-does-not-export) names one. Groups are by "
        "the kinds of [state](contract/graph.md#8-the-graph) of the default export; `--target tensorrt` has `full` "
        "instead of `window`.",
        f"In every check the largest difference to torch's logits is at most {NEAR:.0e}"
        + (f", except for {', '.join(far)}." if far else "."),
    ]
    if short:
        texts.append(f"Contexts shorter than the tiny model's {CONTEXT} tokens: {', '.join(short)}.")
    lists = [
        _filled(f"- {states} ({len(names)}): {', '.join(names)}", "  ")
        for states, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    ]
    return "\n\n".join(["## Architectures", *map(_filled, texts), "\n".join(lists)])


def _refusals(file: ResultFile) -> str:
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in file:
        if result.outcome != EXPORTED and result.model_type in decoder_only_types():
            reasons[result.model_type, _plain(result.reason)].append(result.form)
    if not reasons:
        return ""
    rows = [
        [f"`{name}`", "all" if len(forms) == len(FORMS) else ", ".join(forms), reason]
        for (name, reason), forms in sorted(reasons.items())
    ]
    return "## What does not export\n\n" + table(["type", "forms", "why"], rows, left=3)


def _making() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    text = (
        f"`{COMMAND}` exports every decoder-only type, each in a process of its own, and writes this page; it "
        f"continues an interrupted run. This page was made with {versions}."
    )
    return f"## How this page is made\n\n{_filled(text)}"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %"


def _exports(file: ResultFile, name: str) -> list[Result]:
    """The exports of a type, in the order of FORMS."""
    found = (file.find(name, form) for form in FORMS)
    return [result for result in found if result is not None and result.outcome == EXPORTED]


def _filled(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _plain(reason: str) -> str:
    """`reason` without characters that break a table cell."""
    return reason.replace("|", "/").replace("`", "'")
