"""The request of `topw bench sampler`, and the sides that it selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from topw_deploy import install
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import TopWOptions, TopWParameters
from topw_lab.bench import sides
from topw_lab.bench.process import require_few_threads
from topw_lab.bench.sampler.inputs import REGIMES
from topw_lab.bench.sides import MIN_P, TOP_K, TOP_P, Side

GROUPS = ("hf", "genai")
"""Names for --peers that select several sides."""


@dataclass(frozen=True, kw_only=True)
class SamplerBenchRequest:
    """Options of `topw bench sampler`.

    vocab: width of the logits.
    hidden: width of the embeddings.
    batch: number of rows per step.
    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.
    options, geom_scale: of Top-W.
    logits: a .npy file, whose shape replaces `vocab` and `batch`; None for random logits.
    neighbour_bound: whether the neighbour bound is computed, for the tokens of the pools.
    peers: names of sides or groups; empty for all.
    authors: the file with the authors' logits processor.
    genai_python: interpreter of an environment with onnxruntime-genai.
    rounds: number of times that each side is timed.
    threads: number of threads of each side.
    seed: of logits, embeddings and the order of the sides.

    Raises ParameterError for a value out of range.
    """

    vocab: int = 151_936
    hidden: int = 2048
    batch: int = 1
    regimes: Sequence[str] = ("certified",)
    temperatures: Sequence[float] = ()
    options: TopWOptions = field(default_factory=TopWOptions)
    geom_scale: float = 1.0
    logits: Path | None = None
    neighbour_bound: bool = False
    peers: Sequence[str] = ()
    authors: Path | None = None
    genai_python: Path | None = None
    rounds: int = 40
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} is {getattr(self, name)}, but must be an integer >= 1.", name)
        require_few_threads([self.threads])
        for regime in self.regimes:
            if regime not in REGIMES:
                raise ParameterError(f"regime is {regime!r}, but must be one of {', '.join(REGIMES)}.", "regime")
        for temperature in self.temperatures:
            TopWParameters(temperature=temperature)  # checks the range
        if not self.regimes:
            raise ParameterError("no regime is given; name at least one.", "regime")


@dataclass(frozen=True)
class SamplerSide(Side):
    """A sampler.

    does: what one call returns, for the table.
    exact: whether the sampler must keep the same tokens as the reference.
    needs: modules that the sampler imports, all from the extra [export].
    """

    does: str
    exact: bool = False
    needs: tuple[str, ...] = ()


_GRAPH, _HF = ("onnx_ir", "onnxscript"), ("torch", "transformers")
SIDES = {
    side.name: side
    for side in (
        SamplerSide("native", "Top-W native, onnxruntime op", "ours", "token", True, _GRAPH),
        SamplerSide("graph", "Top-W graph, portable", "ours", "token", True, _GRAPH),
        SamplerSide("graph-ort", "Top-W graph, onnxruntime form", "ours", "token", True, _GRAPH),
        SamplerSide("torch", "Top-W torch", "ours", "crop", True, ("torch",)),
        SamplerSide("authors", "Top-W, authors' processor", "peer", "crop", False, _HF),
        SamplerSide("hf-top-p", f"transformers top-p {TOP_P}", "peer", "crop", False, _HF),
        SamplerSide("hf-top-k", f"transformers top-k {TOP_K}", "peer", "crop", False, _HF),
        SamplerSide("hf-min-p", f"transformers min-p {MIN_P}", "peer", "crop", False, _HF),
        SamplerSide("genai-top-p", f"onnxruntime-genai top-p {TOP_P}", "peer", "token"),
        SamplerSide("genai-top-k", f"onnxruntime-genai top-k {TOP_K}", "peer", "token"),
        SamplerSide("genai-top-k-top-p", f"onnxruntime-genai top-k {TOP_K}, top-p {TOP_P}", "peer", "token"),
        SamplerSide("genai-greedy", "onnxruntime-genai greedy", "peer", "token"),
        SamplerSide("max", "numpy.max", "yardstick", "number"),
        SamplerSide("argmax", "onnxruntime ArgMax", "yardstick", "token", False, ("onnx",)),
        SamplerSide("topk", "onnxruntime TopK 1200", "yardstick", "ids", False, ("onnx",)),
    )
}
"""Every side by name, in the order of the table."""

GENAI_SEARCHES: dict[str, dict[str, Any]] = {
    "genai-top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P},
    "genai-top-k": {"do_sample": True, "top_k": TOP_K, "top_p": 1.0},
    "genai-top-k-top-p": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P},
    "genai-greedy": {"do_sample": False},
}
"""Side -> search options. top_k is always given, and 0 if unused, because the default is 50."""


def choose(request: SamplerBenchRequest) -> tuple[list[SamplerSide], list[SamplerSide]]:
    """Select the sides. Returns (sides to run, sides that cannot run here).

    Raises ParameterError for an unknown name in `peers`, BenchmarkError for a named side that cannot run.
    """
    every = [replace(side, why_not=_why_not(side, request)) for side in SIDES.values()]
    present, absent = sides.choose(every, request.peers, GROUPS)
    # The authors' file cannot be installed, so the side is not listed as left out.
    return present, [side for side in absent if side.name != "authors"]


def _why_not(side: SamplerSide, request: SamplerBenchRequest) -> str | None:
    if side.name == "authors" and request.authors is None:
        return "without its file: give --authors PATH/TO/logit_processor_w1.py"
    if side.name in GENAI_SEARCHES:
        if request.genai_python is None and not install.is_importable("onnxruntime_genai"):
            return "not installed: pip install onnxruntime-genai, or give an environment's Python with --genai-python"
        if not install.is_importable("onnx"):
            return f"not usable without onnx: {install.install_command('export')}"
    if side.name == "native" and (why_no_library := sides.why_no_native_library()) is not None:
        return why_no_library
    if not all(map(install.is_importable, side.needs)):
        return f"not installed: {install.install_command('export')}"
    return None
