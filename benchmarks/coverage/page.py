"""Write docs/models.md from the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.common import table
from benchmarks.coverage.architectures import NOT_DECODER_ONLY, all_types, decoder_only
from benchmarks.coverage.peers import Peer
from benchmarks.coverage.results import BROKEN, EXPORTED, FORMS, Result, ResultFile
from benchmarks.coverage.tiny_configs import CONTEXT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COMMAND = "python -m benchmarks.coverage --write"
_TITLES = {"default": "`topw-export MODEL OUT`", "tensorrt": "`--target tensorrt`", "int4": "`--dtype int4`"}
_PACKAGES = ("transformers", "torch", "onnx", "onnxscript", "onnxruntime")
_SHORT = {"onnxruntime-genai": "genai", "mobius-onnx": "mobius", "optimum-onnx": "optimum"}


def page(file: ResultFile, peers: Sequence[Peer]) -> str:
    """The page's text."""
    types = decoder_only()
    parts = [
        _introduction(file, types),
        _summary(file, types, peers),
        _architectures(file, types, peers),
        _refusals(file),
        _others(),
        _making(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(file: ResultFile, types: Sequence[str]) -> str:
    version = metadata.version("transformers")
    tried = sum(1 for name in types if any(file.find(name, form) is not None for form in FORMS))
    missing = len(types) - tried
    note = f"This page is incomplete: {missing} types have no result for this version yet."
    text = f"""# Models

transformers {version} maps {len(all_types())} model types to a causal language model. {len(types)} of them are
decoder-only language models, or multimodal models with such a text decoder. This page states which of those export.
Each is tried as a tiny random model with every kind of layer that the architecture has, and its graph is compared with
torch: a prompt, single steps, a prompt in chunks, and padded batches
([what is verified](guide/export.md#what-is-verified)). Real checkpoints differ in sizes, not in operators."""
    return f"{text}\n\n{note}" if missing else text


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
        + table(["exporter", "architectures", f"of {len(types)}"], rows)
        + "\n\nThe first rows count exports that agree with torch. The rows of other exporters count the types that "
        "they list;\nthose exporters were not run. mobius also tries to export unlisted types as Llama."
    )


def _architectures(file: ResultFile, types: Sequence[str], peers: Sequence[Peer]) -> str:
    header = ["type", "states", *FORMS, "listed by"]
    rows = []
    for name in types:
        found = [file.find(name, form) for form in FORMS]
        states = next((_states(result) for result in found if result is not None and result.states), "")
        listed = ", ".join(_SHORT.get(peer.name, peer.name) for peer in peers if name in peer.types)
        rows.append([f"`{name}`", states, *(_cell(result) for result in found), listed])
    return (
        "## Architectures\n\n"
        "Numbers are the largest difference to torch's logits in any check. `states` counts the layers of the tiny\n"
        "model by what they keep from one call to the next: `full` and `window` are keys and values. A number of\n"
        "tokens is the context of an export that is shorter than the model's.\n\n" + table(header, rows)
    )


def _refusals(file: ResultFile) -> str:
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in file:
        if result.outcome != EXPORTED and result.model_type in decoder_only():
            reasons[result.model_type, _plain(result.reason)].append(result.form)
    if not reasons:
        return ""
    rows = [[f"`{name}`", ", ".join(forms), reason] for (name, reason), forms in sorted(reasons.items())]
    return "## What does not export\n\n" + table(["type", "forms", "why"], rows)


def _others() -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in NOT_DECODER_ONLY.items():
        reasons[reason].append(f"`{name}`")
    rows = [[reason, ", ".join(names)] for reason, names in reasons.items()]
    return "## Not decoder-only\n\nThese types of the map were not tried.\n\n" + table(["reason", "types"], rows)


def _making() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    return (
        "## How this page is made\n\n"
        f"`{COMMAND}` exports all of them, each in a process of its own, and writes this page. It\n"
        "continues an interrupted run. The configurations follow one general rule with exceptions in\n"
        "`benchmarks/coverage/overrides.py`. Made with\n" + versions + "."
    )


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %"


def _cell(result: Result | None) -> str:
    if result is None:
        return "no result"
    if result.outcome == EXPORTED and result.difference is not None:
        cut = f", {result.context} tokens" if 0 < result.context < CONTEXT else ""
        return f"{result.difference:.0e}{cut}"
    return result.outcome if result.outcome != BROKEN else "fails in torch"


def _states(result: Result) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(result.states.items()))


def _plain(reason: str) -> str:
    """`reason` without characters that break a table cell."""
    return reason.replace("|", "/").replace("`", "'")
