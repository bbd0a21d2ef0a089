"""Every side of `topw bench decode`, and the worker and settings that it takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy import install
from topw_deploy.bench.decode.settings import DecodeSettings
from topw_deploy.errors import BenchmarkError, ParameterError

TOP_P, TOP_K = 0.95, 50

# top_k must be said each time: both libraries have a default of 50
_GENAI: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "top-k": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": 1.0},
}
_GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "all": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
}
_BUILDER = "--genai FOLDER, written by python -m onnxruntime_genai.models.builder"
_OPTIMUM = "--optimum FOLDER, written by optimum-cli export onnx"


@dataclass(frozen=True)
class Side:
    """name: what --peers calls it. kind: as in `bench.picture.COLOURS`. worker: a file of bench/workers. settings: for
    it, beside `threads`. python: its interpreter. why_not: why it cannot run here and what to do, None if it can."""

    name: str
    label: str
    kind: str
    worker: str
    settings: dict[str, Any]
    python: Path | None = None
    why_not: str | None = None


def sides(given: DecodeSettings) -> Iterator[Side]:
    """All sides, in the order of the table."""
    yield from _ours(given)
    yield from _genai(given)
    yield from _optimum(given)
    yield from _transformers(given)


def choose(given: DecodeSettings) -> tuple[list[Side], list[Side]]:
    """The sides to run, and those that are left out with their reasons.

    Raises ParameterError for an unknown name in `peers`, BenchmarkError for one that is named there, or whose folder
    is given, and cannot run.
    """
    every = list(sides(given))
    groups = {"topw", "genai", "optimum", "transformers"}
    for name in given.peers:
        if name not in groups and all(side.name != name for side in every):
            raise ParameterError(
                f"{name!r} is no side of this benchmark; choose among {', '.join(side.name for side in every)}.",
                "peers",
            )
    wanted = [side for side in every if not given.peers or _named(side, given.peers)]
    for side in wanted:
        if side.why_not is not None and given.peers:
            raise BenchmarkError(f"{side.name} was asked for, but is {side.why_not}.")
    return [s for s in wanted if s.why_not is None], [s for s in wanted if s.why_not is not None]


def _named(side: Side, names: Sequence[str]) -> bool:
    return any(side.name == name or side.name.startswith(f"{name}-") for name in names)


def _ours(given: DecodeSettings) -> Iterator[Side]:
    from topw_deploy.plugins.shared_library import library_path, why_absent

    folder = str(given.folder)
    absent = None if library_path() is not None else f"not here: {why_absent()}"
    for variant, why_not in (("native", absent), ("graph", None)):
        settings = {"folder": folder, "variant": variant}
        yield Side(f"topw-{variant}", f"TopWModel, {variant}", "ours", "decode_topw.py", settings, why_not=why_not)
    missing = None if _installed("onnx_ir") else f"not installed: {install.how_to('export')}"
    settings = {"folder": folder, "variant": "argmax"}
    yield Side("argmax", "same graph, ArgMax", "yardstick", "decode_topw.py", settings, why_not=missing)


def _genai(given: DecodeSettings) -> Iterator[Side]:
    why_not = _why_not("onnxruntime_genai", "onnxruntime-genai", given.genai, given.genai_python, _BUILDER)
    labels = {"greedy": "greedy", "top-p": f"top-p {TOP_P}", "top-k": f"top-k {TOP_K}, top-p {TOP_P}"}
    for search, label in labels.items():
        settings = {"folder": str(given.genai), "search": _GENAI[search]}
        yield Side(
            f"genai-{search}",
            f"onnxruntime-genai, {label}",
            "peer",
            "decode_genai.py",
            settings,
            given.genai_python,
            why_not,
        )


def _optimum(given: DecodeSettings) -> Iterator[Side]:
    why_not = _why_not("optimum.onnxruntime", "optimum-onnx", given.optimum, given.optimum_python, _OPTIMUM)
    for search, label in (("greedy", "greedy"), ("top-p", f"top-p {TOP_P}")):
        yield _generate(f"optimum-{search}", f"optimum, {label}", "optimum", given.optimum, search, given, why_not)


def _transformers(given: DecodeSettings) -> Iterator[Side]:
    why_not = _why_not("transformers", "transformers", given.transformers, None, "--transformers MODEL_DIR")
    for search, label in (("greedy", "greedy"), ("top-p", f"top-p {TOP_P}")):
        name, shown = f"transformers-{search}", f"transformers, {label}"
        yield _generate(name, shown, "transformers", given.transformers, search, given, why_not)
    shown = "transformers, our processor"
    yield _generate("transformers-topw", shown, "transformers", given.transformers, "all", given, why_not, "topw")
    if given.authors is not None:
        name, shown, file = "transformers-authors", "transformers, authors' processor", str(given.authors)
        yield _generate(name, shown, "transformers", given.transformers, "all", given, why_not, file)


def _generate(
    name: str,
    label: str,
    library: str,
    folder: Path | None,
    search: str,
    given: DecodeSettings,
    why_not: str | None,
    processor: str | None = None,
) -> Side:
    settings = {"library": library, "folder": str(folder), "search": _GENERATE[search], "processor": processor}
    python = given.optimum_python if library == "optimum" else None
    return Side(name, label, "ours" if processor == "topw" else "peer", "decode_generate.py", settings, python, why_not)


def _why_not(module: str, distribution: str, folder: Path | None, python: Path | None, option: str) -> str | None:
    """Why a peer cannot run. BenchmarkError if its folder is given and the peer is not installed here."""
    here = python is not None or _installed(module)
    install = f"not installed: pip install {distribution}, or name the interpreter of its environment"
    if folder is not None and not here:
        raise BenchmarkError(f"{folder} is given, but {distribution} is {install}.")
    if not here:
        return f"{install}; then give {option}"
    return None if folder is not None else f"without a model: give {option}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
