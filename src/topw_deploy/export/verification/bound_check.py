"""The stored neighbour bound against distances in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graft.sampler_node import sampler_node
from topw_deploy.export.graft.table import stored_array
from topw_deploy.export.tail import GEOMETRY_INPUTS, TAIL_INPUTS
from topw_deploy.export.write.weights import MODEL_FILE
from topw_deploy.manifest import Check
from topw_deploy.sampling import Geometry

_SAMPLED = 48  # tokens, each compared with all others
_BLOCK = 2048


def bound_check(folder: Path, geometry: Geometry, tokens: int) -> Check:
    """The bound that the sampler node of `folder` holds, for a random sample of tokens: never above the truth.

    geometry: the reference's, statistics in float64. The difference is the largest of bound - distance.
    """
    bound = stored_bound(folder)
    name = "neighbour bound"
    if bound.shape != (tokens,):
        return Check(name, False, float("inf"), 0.0, f"it has the shape {bound.shape}, not ({tokens},)")
    chosen = np.random.default_rng(0).permutation(tokens)[:_SAMPLED]
    nearest = nearest_distances(geometry, chosen, tokens)
    difference = float(np.max(bound[chosen] - nearest))
    share = np.mean(bound[chosen] / np.maximum(nearest, np.finfo(np.float32).tiny))
    detail = f"{len(chosen)} of {tokens} tokens, the bound is {share:.2%} of the distance"
    return Check(name, difference <= 0.0, difference, 0.0, detail)


def stored_bound(folder: Path) -> np.ndarray:
    """Node input 13 of the sampler in `folder`, float32 [tokens] or [0]."""
    model = ir.load(folder / MODEL_FILE)
    value = sampler_node(model.graph).inputs[len(TAIL_INPUTS) + GEOMETRY_INPUTS.index("neighbour_bound")]
    assert value is not None
    assert value.const_value is not None
    return np.array(stored_array(value.const_value))


def nearest_distances(geometry: Geometry, chosen: np.ndarray, tokens: int) -> np.ndarray:
    """float64 [n]: the distance of each of the tokens `chosen` [n] to the nearest other of the first `tokens`.

    A token without another is at infinity.
    """
    points = geometry.features(chosen)
    nearest = np.full(len(chosen), np.inf)
    for start in range(0, tokens, _BLOCK):
        others = np.arange(start, min(start + _BLOCK, tokens))
        distances = geometry.between(points, geometry.features(others))
        distances[chosen[:, None] == others] = np.inf
        np.minimum(nearest, distances.min(axis=1), out=nearest)
    return nearest
