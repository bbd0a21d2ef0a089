"""The draw: one token of the crop from one uniform number, and that number from a seed (docs/contract/graph.md, section
5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import ParameterError

_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Draw:
    """token: its id; logprob: log of its probability in the renormalised crop; margin: see `draw`."""

    token: int
    logprob: float
    margin: float


def draw(logits: ArrayLike, kept: ArrayLike, temperature: float, uniform: float) -> Draw:
    """Draw one of the `kept` ids, ordered by (logit descending, id ascending) as `Crop.kept` is.

    logits: the row [V] the crop came from. temperature: T > 0 of the weights w_i = exp((l_i - l_max) / T), l_max the
    largest kept logit. uniform: u in [0, 1). With G the inclusive cumulative sums over `kept`, the token is the first
    with G_i > u G_K. `margin` is the smallest |G_i - u G_K| / G_K over i < K: how far u is from another token.
    Raises ParameterError for an empty crop and for a temperature or uniform outside its interval.
    """
    ids = np.asarray(kept, dtype=np.int64)
    if len(ids) == 0:
        raise ParameterError("the crop is empty, but must hold at least one token to draw from.")
    if not temperature > 0:
        raise ParameterError(f"temperature is {temperature!r}, but must be > 0 to draw; a greedy row takes its argmax.")
    if not 0 <= uniform < 1:
        raise ParameterError(f"uniform is {uniform!r}, but must be in [0, 1).")
    chosen = np.asarray(logits)[ids].astype(np.float64)
    a = (chosen - chosen[0]) / temperature  # [K]
    G = np.cumsum(np.exp(a))
    distances = G - uniform * G[-1]
    i = min(int(np.argmax(distances > 0)), len(ids) - 1)
    margin = float(np.abs(distances[:-1]).min() / G[-1]) if len(ids) > 1 else math.inf
    return Draw(int(ids[i]), float(a[i] - np.log(G[-1])), margin)


def uniform_for(seed: int, position: int, sample: int = 0) -> float:
    """The uniform number in [0, 1) of one draw, a function of these three numbers alone (docs/contract/random.md).

    seed: 0 <= seed < 2^64, the request's. position: number of real tokens before the one drawn. sample: which of the
    request's `n` answers. Philox 4x64-10 with key (seed, 0) and counter (position, sample, 0, 0) as numpy counts,
    that is one more than given for the first block; the top 24 bits of its first word, times 2^-24: exact in float32.
    """
    for name, value in (("seed", seed), ("position", position), ("sample", sample)):
        if not 0 <= value < _WORD:
            raise ParameterError(f"{name} is {value!r}, but must be in 0..2^64 - 1.")
    counter = np.array([position, sample, 0, 0], dtype=np.uint64)  # a list would pass through float64
    word = np.random.Philox(key=seed, counter=counter).random_raw()
    return (int(word) >> 40) * 2.0**-24
