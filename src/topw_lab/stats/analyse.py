"""Analyse one step: its crop, the crop that Top-W keeps without distances, and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, crop
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
    """

    kept: int
    certified: bool
    mass: float
    entropy: float
    crop_entropy: float
    added: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def is_changed(self) -> bool:
        """Whether distances changed the crop."""
        return bool(self.added or self.dropped)


@dataclass(frozen=True)
class Analyser:
    """Recomputes a model's crops from its options and geometry, with the reference."""

    options: TopWOptions
    geometry: Geometry

    def analyse(
        self, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters | None = None
    ) -> StepAnalysis:
        """Analyse one row of edited logits [V].

        parameters: Top-W's, rounded to float32. The temperatures apply to every rule.
        rule: the sampling rule of the row; None for Top-W.
        """
        if rule is not None and rule.chosen is not TOP_W:
            return _analyse_other_rule(logits, parameters, rule)
        found = crop(logits, parameters, self.options, self.geometry)
        # A certified crop is the same for every geom_scale >= 0 (docs/contract/theory.md, T2).
        without = found.kept if found.certified else self._kept_without_distances(logits, parameters)
        return StepAnalysis(
            certified=found.certified,
            **_probability_fields(logits, found.kept, parameters),
            added=tuple(np.setdiff1d(found.kept, without).tolist()),
            dropped=tuple(np.setdiff1d(without, found.kept).tolist()),
        )

    def _kept_without_distances(self, logits: NDArray[np.float32], parameters: TopWParameters) -> NDArray[np.int64]:
        options = replace(self.options, metric="uniform", potential="nearest")
        return crop(logits, replace(parameters, geom_scale=0.0), options).kept


def _analyse_other_rule(logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters) -> StepAnalysis:
    temperatures = {name: getattr(parameters, name) for name in ("temperature", "selection_temperature")}
    found = kept_set(logits, rule.chosen, rule.values, **temperatures)
    return StepAnalysis(
        certified=found.certified,
        **_probability_fields(logits, found.kept, parameters),
        added=(),
        dropped=(),
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
