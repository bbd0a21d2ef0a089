"""One step: its crop, the crop that equal parameters give without distances, and how much of the softmax it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters
from topw_deploy.sampling.fast.crop import fast_crop
from topw_deploy.sampling.parameters import GREEDY_BELOW

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """What Top-W did at one step.

    kept: the crop's size. mass: its probability under the softmax over the vocabulary at the selection temperature.
    entropy, crop_entropy: in nats, of the softmax over the vocabulary and of the crop, renormalised, both at the
    temperature of the draw. added, dropped: tokens that are in the crop, or not in it, only because of distances.
    stage, distances, distances_avoided: how `fast_crop` found the crop, in ordered pairs of tokens.
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
class Lens:
    """What a model's steps are looked at with: its baked options, its geometry, its neighbour bound if it has one."""

    options: TopWOptions
    geometry: Geometry
    neighbour_bound: NDArray[np.float32] | None = None

    def look(self, logits: NDArray[np.float32], parameters: TopWParameters) -> Step:
        """One row of edited logits [V], with parameters as the graph has them (float32)."""
        found = fast_crop(logits, parameters, self.options, self.geometry, self.neighbour_bound)
        # A certified crop is the same at every scale (docs/contract/theory.md, T2), so only the others can have
        # changed.
        plain = found.kept if found.certified else self._without_distances(logits, parameters)
        selection = parameters.selection_temperature or parameters.temperature
        return Step(
            kept=len(found.kept),
            certified=found.certified,
            mass=float(softmax(logits, selection)[found.kept].sum()),
            entropy=entropy(softmax(logits, parameters.temperature)),
            crop_entropy=entropy(softmax(logits[found.kept], parameters.temperature)),
            added=tuple(np.setdiff1d(found.kept, plain).tolist()),
            dropped=tuple(np.setdiff1d(plain, found.kept).tolist()),
            stage=found.stage,
            distances=found.distances,
            distances_avoided=found.distances_avoided,
        )

    def _without_distances(self, logits: NDArray[np.float32], parameters: TopWParameters) -> NDArray[np.int64]:
        return fast_crop(logits, replace(parameters, geom_scale=0.0), self.options, self.geometry).kept


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    """Probabilities [V]; at a greedy temperature all of it on the largest logit, the first among equals."""
    row = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    w: Floats = np.exp((row - row.max()) / temperature)
    return w / w.sum()


def entropy(p: Floats) -> float:
    """In nats; a probability of 0 adds nothing."""
    positive = p[p > 0]
    return float(max(0.0, -(positive * np.log(positive)).sum()))
