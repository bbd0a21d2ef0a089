"""The request of `topw bench decode` and the sides it selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy import install
from topw_deploy.bench import sides
from topw_deploy.bench.decode import worker
from topw_deploy.bench.process import require_few_threads
from topw_deploy.bench.sides import TOP_K, TOP_P, Side
from topw_deploy.errors import BenchmarkError, ParameterError

_FEWEST_NEW = 2  # the prefill gives the first token
_GROUPS = ("topw", "genai", "optimum", "transformers")

# Both libraries default to top_k 50.
_SEARCH: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "top-k": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": 1.0},
    "all": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
}
_LABELS = {"greedy": "greedy", "top-p": f"top-p {TOP_P}", "top-k": f"top-k {TOP_K}, top-p {TOP_P}"}
_BUILDER = "--genai FOLDER, written by python -m onnxruntime_genai.models.builder"
_OPTIMUM = "--optimum FOLDER, written by optimum-cli export onnx"


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """Options of `topw bench decode`.

    folder: an exported model.
    threads: thread counts; each gets a run.
    transformers, optimum, genai: folders with the same weights in each library's format.
    optimum_python, genai_python: Python interpreters of the environments with these libraries.
    authors: the file with the authors' logits processor.
    peers: names of sides; empty for all.

    Raises ParameterError for a value out of range.
    """

    folder: Path
    prompt_tokens: int = 128
    new_tokens: int = 64
    threads: Sequence[int] = (1,)
    transformers: Path | None = None
    optimum: Path | None = None
    optimum_python: Path | None = None
    genai: Path | None = None
    genai_python: Path | None = None
    authors: Path | None = None
    peers: Sequence[str] = ()
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", _FEWEST_NEW), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} is {getattr(self, name)}, but must be an integer >= {least}.", name)
        require_few_threads(self.threads)
        if self.authors is not None and self.transformers is None:
            raise ParameterError(
                "the authors' processor runs in transformers; give the model's folder with --transformers.",
                "authors",
            )


@dataclass(frozen=True)
class LoopSide(Side):
    """A decoding loop and its worker.

    worker: the file of the worker, as for `Worker`.
    settings: settings of the worker other than `threads`.
    python: the worker's interpreter; None for this one.
    """

    worker: str
    settings: dict[str, Any]
    python: Path | None = None


def choose(request: DecodeRequest) -> tuple[list[LoopSide], list[LoopSide]]:
    """Returns (sides to run, sides left out), in the order of the table.

    Raises ParameterError for an unknown name in `peers`, BenchmarkError if a side that is named or has its model folder
    cannot run.
    """
    every = [*_ours(request), *_genai(request), *_optimum(request), *_transformers(request)]
    return sides.choose(every, request.peers, _GROUPS)


def _ours(request: DecodeRequest) -> Iterator[LoopSide]:
    from topw_deploy.plugins.shared_library import library_path, why_absent

    absent = None if library_path() is not None else f"not here: {why_absent()}"
    missing = None if install.importable("onnx_ir") else f"not installed: {install.how_to('export')}"
    for variant, name, label, kind, why_not in (
        ("native", "topw-native", "TopWModel, native", "ours", absent),
        ("graph", "topw-graph", "TopWModel, graph", "ours", None),
        ("argmax", "argmax", "same graph, ArgMax", "yardstick", missing),
    ):
        settings = {"folder": str(request.folder), "variant": variant}
        yield LoopSide(name, label, kind, worker.__file__, settings, why_not=why_not)


def _genai(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("onnxruntime_genai", "onnxruntime-genai", request.genai, request.genai_python, _BUILDER)
    for search in ("greedy", "top-p", "top-k"):
        settings = {"task": "decode", "folder": str(request.genai), "search": _SEARCH[search]}
        label = f"onnxruntime-genai, {_LABELS[search]}"
        yield LoopSide(
            f"genai-{search}", label, "peer", "genai.py", settings, python=request.genai_python, why_not=why_not
        )


def _optimum(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("optimum.onnxruntime", "optimum-onnx", request.optimum, request.optimum_python, _OPTIMUM)
    for search in ("greedy", "top-p"):
        settings = {"library": "optimum", "folder": str(request.optimum), "search": _SEARCH[search], "processor": None}
        label = f"optimum, {_LABELS[search]}"
        yield LoopSide(
            f"optimum-{search}", label, "peer", "generate.py", settings, python=request.optimum_python, why_not=why_not
        )


def _transformers(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("transformers", "transformers", request.transformers, None, "--transformers MODEL_DIR")
    rows: list[tuple[str, str, str, str | None]] = [
        ("greedy", _LABELS["greedy"], "greedy", None),
        ("top-p", _LABELS["top-p"], "top-p", None),
        ("topw", "our processor", "all", "topw"),
    ]
    if request.authors is not None:
        rows.append(("authors", "authors' processor", "all", str(request.authors)))
    for name, label, search, processor in rows:
        settings = {"library": "transformers", "folder": str(request.transformers), "search": _SEARCH[search],
                    "processor": processor}  # fmt: skip
        kind = "ours" if name == "topw" else "peer"
        yield LoopSide(f"transformers-{name}", f"transformers, {label}", kind, "generate.py", settings, why_not=why_not)


def _why_not(module: str, distribution: str, folder: Path | None, python: Path | None, option: str) -> str | None:
    """Raises BenchmarkError for a given folder without its library."""
    here = python is not None or install.importable(module)
    missing = f"not installed: pip install {distribution}, or give the interpreter of its environment"
    if folder is not None and not here:
        raise BenchmarkError(f"{folder} is given, but {distribution} is {missing}.")
    if not here:
        return f"{missing}; then give {option}"
    return None if folder is not None else f"without a model: give {option}"
