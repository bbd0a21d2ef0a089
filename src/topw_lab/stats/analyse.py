"""Analyse one step: its crop, the crop that Top-W keeps without distances, and their probabilities."""

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
class StepAnalysis:
    """The crop of one step. Under a rule other than Top-W, no distance is measured.

    kept: number of tokens in the crop.
    mass: probability of the crop under the softmax at the selection temperature.
    entropy: entropy of the whole softmax at the sampling temperature, in nats.
    crop_entropy: entropy of the renormalised crop at the sampling temperature, in nats.
    added: tokens that are in the crop only because of distances.
    dropped: tokens that are not in the crop only because of distances.
    stage: the stage of `fast_crop` that settled the crop; "greedy" or "rule" under a rule other than Top-W.
    distances: number of ordered token pairs whose distance `fast_crop` measured.
    distances_avoided: number of pairs that only the literal algorithm measures; 0 if unknown.
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
    def is_changed(self) -> bool:
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
    ) -> StepAnalysis:
        """Analyse one row of edited logits [V].

        parameters: Top-W's, rounded to float32. The temperatures apply to every rule.
        rule: the sampling rule of the row; None for Top-W.
        """
        if rule is not None and rule.chosen is not TOP_W:
            return _analyse_other_rule(logits, parameters, rule)
        crop = fast_crop(logits, parameters, self.options, self.geometry, self.neighbour_bound)
        # A certified crop is the same for every geom_scale >= 0 (docs/contract/theory.md, T2).
        without = crop.kept if crop.certified else self._kept_without_distances(logits, parameters)
        return StepAnalysis(
            certified=crop.certified,
            **_probability_fields(logits, crop.kept, parameters),
            added=tuple(np.setdiff1d(crop.kept, without).tolist()),
            dropped=tuple(np.setdiff1d(without, crop.kept).tolist()),
            stage=crop.stage,
            distances=crop.distances,
            distances_avoided=crop.distances_avoided,
        )

    def _kept_without_distances(self, logits: NDArray[np.float32], parameters: TopWParameters) -> NDArray[np.int64]:
        return fast_crop(logits, replace(parameters, geom_scale=0.0), self.options, self.geometry).kept


def _analyse_other_rule(logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters) -> StepAnalysis:
    temperatures = {name: getattr(parameters, name) for name in ("temperature", "selection_temperature")}
    crop = kept_set(logits, rule.chosen, rule.values, **temperatures)
    return StepAnalysis(
        certified=crop.certified,
        **_probability_fields(logits, crop.kept, parameters),
        added=(),
        dropped=(),
        stage="greedy" if parameters.greedy else "rule",
        distances=0,
        distances_avoided=0,
    )


def _probability_fields(
    logits: NDArray[np.float32], kept: NDArray[np.int64], parameters: TopWParameters
) -> dict[str, Any]:
    """The fields of a StepAnalysis that follow from the logits and the kept ids."""
    selection = parameters.selection_temperature or parameters.temperature
    return {
        "kept": len(kept),
        "mass": float(softmax(logits, selection)[kept].sum()),
        "entropy": entropy(softmax(logits, parameters.temperature)),
        "crop_entropy": entropy(softmax(logits[kept], parameters.temperature)),
    }


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    """Probabilities [V]. Below `GREEDY_BELOW`, the first largest logit has probability 1."""
    row = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    w: Floats = np.exp((row - row.max()) / temperature)
    return w / w.sum()


def entropy(p: Floats) -> float:
    """Entropy of the probabilities `p` in nats. Probabilities of 0 are allowed."""
    positive = p[p > 0]
    return float(max(0.0, -(positive * np.log(positive)).sum()))
