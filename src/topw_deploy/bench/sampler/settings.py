"""What `topw bench sampler` can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topw_deploy.bench.process import require_few_threads
from topw_deploy.bench.sampler.problem import REGIMES
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import TopWOptions, TopWParameters


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """All that `topw bench sampler` can be told.

    regimes: names of REGIMES; temperatures: [] for each regime's own. logits: rows to use in place of made ones, whose
    shape then decides vocab and batch. neighbour_bound: measure the bound for the pools. peers: names of sides, [] for
    all. authors: the authors' file. genai_python: interpreter of an environment that has onnxruntime-genai.
    Raises ParameterError for what is out of its interval.
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
            TopWParameters(temperature=temperature)  # its range check
        if not self.regimes:
            raise ParameterError("no regime is given; name at least one.", "regime")
