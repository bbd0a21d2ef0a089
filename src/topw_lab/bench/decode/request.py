"""The request of `topw bench decode`, and the sides that it selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_lab.bench import sides
from topw_lab.bench.decode import worker
from topw_lab.bench.process import require_few_threads
from topw_lab.bench.sides import TOP_K, TOP_P, Side

_FEWEST_NEW_TOKENS = 2  # the prefill gives the first token, and a step the second
_GROUPS = ("topw", "genai", "optimum", "transformers")

# top_k is always given, because onnxruntime-genai and transformers default to 50.
_SEARCH_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "top-k": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": 1.0},
    "all": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
}
_LABELS = {"greedy": "greedy", "top-p": f"top-p {TOP_P}", "top-k": f"top-k {TOP_K}, top-p {TOP_P}"}
_GENAI_OPTION = "--genai FOLDER, written by python -m onnxruntime_genai.models.builder"
_OPTIMUM_OPTION = "--optimum FOLDER, written by optimum-cli export onnx"


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """Options of `topw bench decode`.

    folder: an exported model.
    prompt_tokens: length of the random prompt.
    new_tokens: number of tokens to generate.
    threads: thread counts; all sides run with each of them.
    transformers, optimum, genai: folders with the same weights in each library's format.
    optimum_python, genai_python: Python interpreters of the environments with these libraries.
    authors: the file with the authors' logits processor.
    peers: names of sides; empty for all.
    rounds: number of times that each side is timed.
    seed: of the prompt and of the order of the sides.

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
        for name, least in (("prompt_tokens", 1), ("new_tokens", _FEWEST_NEW_TOKENS), ("rounds", 1)):
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
    """A decoding loop, and the process that runs it.

    worker: the worker's file, as for `WorkerProcess`.
    settings: settings for the worker's `start`, without `threads`.
    python: the worker's interpreter; None for this one.
    """

    worker: str
    settings: Mapping[str, Any]
    python: Path | None = None


def choose(request: DecodeRequest) -> tuple[list[LoopSide], list[LoopSide]]:
    """Select the sides. Returns (sides to run, sides that cannot run here), in the order of the table.

    Raises ParameterError for an unknown name in `peers`, BenchmarkError if a side that is named or has its model folder
    cannot run.
    """
    every = [*_own_sides(request), *_genai_sides(request), *_optimum_sides(request), *_transformers_sides(request)]
    return sides.choose(every, request.peers, _GROUPS)


def _own_sides(request: DecodeRequest) -> Iterator[LoopSide]:
    why_no_library = sides.why_no_native_library()
    why_no_argmax = None if install.is_importable("onnx_ir") else f"not installed: {install.install_command('export')}"
    for variant, name, label, kind, why_not in (
        ("native", "topw-native", "TopWModel, native", "ours", why_no_library),
        ("graph", "topw-graph", "TopWModel, graph", "ours", None),
        ("argmax", "argmax", "same graph, ArgMax", "yardstick", why_no_argmax),
    ):
        settings = {"folder": str(request.folder), "variant": variant}
        yield LoopSide(name, label, kind, worker.__file__, settings, why_not=why_not)


def _genai_sides(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("onnxruntime_genai", "onnxruntime-genai", request.genai, request.genai_python, _GENAI_OPTION)
    for search in ("greedy", "top-p", "top-k"):
        settings = {"task": "decode", "folder": str(request.genai), "search": _SEARCH_OPTIONS[search]}
        label = f"onnxruntime-genai, {_LABELS[search]}"
        yield LoopSide(
            f"genai-{search}", label, "peer", "genai.py", settings, python=request.genai_python, why_not=why_not
        )


def _optimum_sides(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("optimum.onnxruntime", "optimum-onnx", request.optimum, request.optimum_python, _OPTIMUM_OPTION)
    for search in ("greedy", "top-p"):
        settings = {
            "library": "optimum",
            "folder": str(request.optimum),
            "search": _SEARCH_OPTIONS[search],
            "processor": None,
        }
        label = f"optimum, {_LABELS[search]}"
        yield LoopSide(
            f"optimum-{search}", label, "peer", "generate.py", settings, python=request.optimum_python, why_not=why_not
        )


def _transformers_sides(request: DecodeRequest) -> Iterator[LoopSide]:
    why_not = _why_not("transformers", "transformers", request.transformers, None, "--transformers MODEL_DIR")
    rows: list[tuple[str, str, str, str | None]] = [
        ("greedy", _LABELS["greedy"], "greedy", None),
        ("top-p", _LABELS["top-p"], "top-p", None),
        ("topw", "our processor", "all", "topw"),
    ]
    if request.authors is not None:
        rows.append(("authors", "authors' processor", "all", str(request.authors)))
    for name, label, search, processor in rows:
        settings = {"library": "transformers", "folder": str(request.transformers), "search": _SEARCH_OPTIONS[search],
                    "processor": processor}  # fmt: skip
        kind = "ours" if name == "topw" else "peer"
        yield LoopSide(f"transformers-{name}", f"transformers, {label}", kind, "generate.py", settings, why_not=why_not)


def _why_not(module: str, distribution: str, folder: Path | None, python: Path | None, option: str) -> str | None:
    """`Side.why_not` of the sides of another library.

    module, distribution: names of the library.
    folder: the model in the library's format.
    python: interpreter of the library's environment; None if the library must be in this one.
    option: the option that gives `folder`.

    Raises BenchmarkError if `folder` is given, but the library is missing.
    """
    is_installed = python is not None or install.is_importable(module)
    missing = f"not installed: pip install {distribution}, or give the interpreter of its environment"
    if folder is not None and not is_installed:
        raise BenchmarkError(f"{folder} is given, but {distribution} is {missing}.")
    if not is_installed:
        return f"{missing}; then give {option}"
    return None if folder is not None else f"without a model: give {option}"
