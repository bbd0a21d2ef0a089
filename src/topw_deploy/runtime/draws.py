"""Where the random numbers come from: docs/contract/graph.md section 5, a block of steps at a time.

A row's number for a step depends on (seed, position, sample) and nothing else: not on the batch, not on history,
not on how often the model ran before. Philox walks its counter, so one generator started at a position yields the
numbers of the positions after it, which makes a draw cost next to nothing per step.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

SEED_BITS = 64
_FRESH_BITS = 53  # a reported seed survives JSON readers that hold numbers as doubles
_BLOCK = 256  # steps prepared at a time
_WORDS = 4  # of 64 bits, per Philox counter


def fresh_seed() -> int:
    """A seed from the operating system's entropy, below 2**53."""
    return secrets.randbits(_FRESH_BITS)


def uniforms(seed: int, position: int, sample: int, count: int) -> np.ndarray:
    """`uniform_for(seed, position + i, sample)` for i < count, as float32 [count]; exact, since each has 24 bits."""
    # numpy steps the counter before it uses it, exactly as a generator started at the later position would
    generator = np.random.Philox(key=seed, counter=_words(position, sample))
    first_words = generator.random_raw(_WORDS * count)[::_WORDS]
    return (first_words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class Draws:
    """The `uniform` input of one generation: row r draws at step s for position `lengths[r] + s`."""

    def __init__(self, seeds: Sequence[int], samples: Sequence[int], lengths: Sequence[int]) -> None:
        self._rows = list(zip(seeds, samples, lengths, strict=True))
        self._block = np.empty((_BLOCK, len(self._rows)), np.float32)  # [steps, B]
        self._numbers = self._block.reshape(-1).data

    def write(self, step: int, out: memoryview | np.ndarray) -> None:
        """Put the numbers of `step` (steps must come in order, from 0) into `out`, float32 [B]."""
        offset = step % _BLOCK
        if offset == 0:
            for row, (seed, sample, length) in enumerate(self._rows):
                self._block[:, row] = uniforms(seed, length + step, sample, _BLOCK)
        start = offset * len(self._rows)
        out[:] = self._numbers[start : start + len(self._rows)]


def prompt_seed(seed: int, index: int) -> int:
    """The seed of prompt `index` (from 0) of a file that is run under `seed`, below 2**53 (docs/contract/random.md).

    Made from the number that no draw uses: its sample index is the largest there is.
    """
    word = int(np.random.Philox(key=seed, counter=_words(index, 2**SEED_BITS - 1)).random_raw())
    return word >> (SEED_BITS - _FRESH_BITS)


def _words(position: int, sample: int) -> np.ndarray:
    # an array of this type: numpy makes floats of a list that holds a number of 2**63 or more
    return np.array([position, sample, 0, 0], np.uint64)
