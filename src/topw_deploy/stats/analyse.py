"""One step: its crop, Top-W's crop without distances, and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters
from topw_deploy.sampling.fast.crop import fast_crop
from topw_deploy.sampling.parameters import GREEDY_BELOW
from topw_deploy.sampling.rules import TOP_W, RuleParameters, kept_set

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Under a rule other than Top-W, no distance is measured, and `stage` is "greedy" or "rule".

    kept: crop size.
    mass: the crop's softmax probability, at the selection temperature.
    entropy: entropy of the whole softmax in nats, at the draw's temperature.
    crop_entropy: entropy of the renormalised crop.
    added, dropped: tokens that distances put into or took out of the crop.
    stage: the stage of `fast_crop` that settled the crop.
    distances, distances_avoided: numbers of ordered token pairs that `fast_crop` measured and avoided.
    """

    kept: int
    certified: bool
    mass: float
    entropy: float
    crop_entropy: float
    added: tuple[int, ...]
    dropped: tuple[int, ...]
    stage: str
    distances: int
    distances_avoided: int

    @property
    def changed(self) -> bool:
        """Whether distances changed the crop."""
        return bool(self.added or self.dropped)


@dataclass(frozen=True)
class Analyser:
    """Recomputes a model's crops from its options, geometry and optional neighbour bound [V]."""

    options: TopWOptions
    geometry: Geometry
    neighbour_bound: NDArray[np.float32] | None = None

    def analyse(
        self, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters | None = None
    ) -> Step:
        """Analyse one row of edited logits [V].

        parameters: rounded to float32; the temperatures apply to every rule.
        rule: of the row; None for Top-W.
        """
        if rule is not None and rule.chosen is not TOP_W:
            return _other_rule(logits, parameters, rule)
        found = fast_crop(logits, parameters, self.options, self.geometry, self.neighbour_bound)
        # Scale does not change a certified crop (docs/contract/theory.md, T2).
        plain = found.kept if found.certified else self._without_distances(logits, parameters)
        return Step(
            certified=found.certified,
            **_probabilities(logits, found.kept, parameters),
            added=tuple(np.setdiff1d(found.kept, plain).tolist()),
            dropped=tuple(np.setdiff1d(plain, found.kept).tolist()),
            stage=found.stage,
            distances=found.distances,
            distances_avoided=found.distances_avoided,
        )

    def _without_distances(self, logits: NDArray[np.float32], parameters: TopWParameters) -> NDArray[np.int64]:
        return fast_crop(logits, replace(parameters, geom_scale=0.0), self.options, self.geometry).kept


def _other_rule(logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters) -> Step:
    temperatures = {name: getattr(parameters, name) for name in ("temperature", "selection_temperature")}
    found = kept_set(logits, rule.chosen, rule.values, **temperatures)
    return Step(
        certified=found.certified,
        **_probabilities(logits, found.kept, parameters),
        added=(),
        dropped=(),
        stage="greedy" if parameters.greedy else "rule",
        distances=0,
        distances_avoided=0,
    )


def _probabilities(logits: NDArray[np.float32], kept: NDArray[np.int64], parameters: TopWParameters) -> dict[str, Any]:
    """The fields of a Step that depend on the crop `kept` alone."""
    selection = parameters.selection_temperature or parameters.temperature
    return {
        "kept": len(kept),
        "mass": float(softmax(logits, selection)[kept].sum()),
        "entropy": entropy(softmax(logits, parameters.temperature)),
        "crop_entropy": entropy(softmax(logits[kept], parameters.temperature)),
    }


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    """Probabilities [V]; if greedy, 1 for the first largest logit."""
    row = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    w: Floats = np.exp((row - row.max()) / temperature)
    return w / w.sum()


def entropy(p: Floats) -> float:
    """Entropy in nats; probabilities may be 0."""
    positive = p[p > 0]
    return float(max(0.0, -(positive * np.log(positive)).sum()))
