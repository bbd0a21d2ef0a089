"""Every side of `topw bench sampler`: what it is called, what it does, and what must be installed for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError

TOP_P, TOP_K, MIN_P = 0.95, 50, 0.05  # what the other samplers are asked for

EXPORT = "export"


@dataclass(frozen=True)
class Entry:
    """name: what --peers calls it. kind: "ours", "peer" or "yardstick". does: what a call of it gives, in words.
    exact: it claims to keep the reference's set. needs: modules to import; extra: the one that installs them."""

    name: str
    label: str
    kind: str
    does: str
    exact: bool = False
    needs: tuple[str, ...] = ()
    extra: str = ""


CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry("native", "Top-W native, C function", "ours", "token", True),
        Entry("native-op", "Top-W native, onnxruntime op", "ours", "token", True, ("onnx_ir", "onnxscript"), EXPORT),
        Entry("graph", "Top-W graph, portable", "ours", "token", True, ("onnx_ir", "onnxscript"), EXPORT),
        Entry("graph-ort", "Top-W graph, onnxruntime form", "ours", "token", True, ("onnx_ir", "onnxscript"), EXPORT),
        Entry("numpy", "Top-W numpy", "ours", "token", True),
        Entry("torch", "Top-W torch", "ours", "crop", True, ("torch",), EXPORT),
        Entry("authors", "Top-W, authors' processor", "peer", "crop", False, ("torch", "transformers"), EXPORT),
        Entry("hf-top-p", f"transformers top-p {TOP_P}", "peer", "crop", False, ("torch", "transformers"), EXPORT),
        Entry("hf-top-k", f"transformers top-k {TOP_K}", "peer", "crop", False, ("torch", "transformers"), EXPORT),
        Entry("hf-min-p", f"transformers min-p {MIN_P}", "peer", "crop", False, ("torch", "transformers"), EXPORT),
        Entry("genai-top-p", f"onnxruntime-genai top-p {TOP_P}", "peer", "token"),
        Entry("genai-top-k", f"onnxruntime-genai top-k {TOP_K}", "peer", "token"),
        Entry("genai-top-k-top-p", f"onnxruntime-genai top-k {TOP_K}, top-p {TOP_P}", "peer", "token"),
        Entry("genai-greedy", "onnxruntime-genai greedy", "peer", "token"),
        Entry("max", "numpy.max", "yardstick", "number"),
        Entry("argmax", "onnxruntime ArgMax", "yardstick", "token", False, ("onnx",), EXPORT),
        Entry("topk", "onnxruntime TopK 1200", "yardstick", "ids", False, ("onnx",), EXPORT),
    )
}
"""Name -> side, in the order of the table."""

GENAI = tuple(name for name in CATALOGUE if name.startswith("genai-"))


@dataclass(frozen=True)
class Choice:
    """present: the sides to run. absent: (label, why and what to do) of those that were left out."""

    present: tuple[str, ...]
    absent: tuple[tuple[str, str], ...]


def select(names: Iterable[str]) -> tuple[str, ...]:
    """The sides that `names` means, in the order of the table; "hf" and "genai" stand for all that begin so.

    Raises ParameterError for a name that means none.
    """
    chosen: set[str] = set()
    for name in names:
        meant = {known for known in CATALOGUE if known == name or (name in ("hf", "genai") and known.startswith(name))}
        if not meant:
            raise ParameterError(
                f"{name!r} is no side of this benchmark; choose among {', '.join(CATALOGUE)}.", "peers"
            )
        chosen |= meant
    return tuple(name for name in CATALOGUE if name in chosen)


def choose(named: Iterable[str], *, authors: Path | None, genai_python: Path | None) -> Choice:
    """Those of all sides that can run here; or those `named`, which all must.

    Raises ParameterError for an unknown name, BenchmarkError for a named side that is not there.
    """
    wanted = select(named)
    present, absent = [], []
    for name in wanted or CATALOGUE:
        why = _absence(CATALOGUE[name], authors, genai_python)
        if why is None:
            present.append(name)
        elif wanted:
            raise BenchmarkError(f"{name} was asked for, but is {why}.")
        elif name != "authors":  # not asked for, and not to be installed
            absent.append((CATALOGUE[name].label, why))
    return Choice(tuple(present), tuple(absent))


def _absence(entry: Entry, authors: Path | None, genai_python: Path | None) -> str | None:
    """Why a side cannot run here and what to do, or None."""
    if entry.name == "authors" and authors is None:
        return "without its file: give --authors PATH/TO/logit_processor_w1.py"
    if entry.name in GENAI:
        if genai_python is None and not installed("onnxruntime_genai"):
            return "not installed: pip install onnxruntime-genai, or name an environment's --genai-python"
        if not installed("onnx"):
            return f"not to be driven without onnx: {install.how_to(EXPORT)}"
    if entry.name in ("native", "native-op"):
        from topw_deploy.plugins.shared_library import library_path, why_absent

        if library_path() is None:
            return f"not here: {why_absent().rstrip('.')}"
    if not all(map(installed, entry.needs)):
        return f"not installed: {install.how_to(entry.extra)}"
    return None


def installed(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
