"""Seeds and uniform numbers (docs/contract/graph.md section 5).

Each number depends only on (seed, position, sample). Consecutive positions use consecutive Philox counters.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

SEED_BITS = 64
_FRESH_BITS = 53  # exact in a double, for JSON
_BLOCK = 256  # steps computed at once
_WORDS = 4  # 64-bit words per Philox counter


def fresh_seed() -> int:
    """A seed below 2**53 from the operating system."""
    return secrets.randbits(_FRESH_BITS)


def uniforms(seed: int, position: int, sample: int, count: int) -> np.ndarray:
    """`uniform_for(seed, position + i, sample)` for i < count: float32 [count], exact, with 24 bits each."""
    return _Uniforms().block(seed, position, sample, count)


class _Uniforms:
    """A generator whose key and counter are set for each block, because making one takes longer. Not thread-safe."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state  # a copy, with no words left over
        self._counter, self._key = self._state["state"]["counter"], self._state["state"]["key"]

    def block(self, seed: int, position: int, sample: int, count: int) -> np.ndarray:
        """See `uniforms`."""
        self._key[0] = seed
        self._counter[0], self._counter[1] = position, sample  # numpy increments the counter before use
        self._generator.state = self._state
        first_words = self._generator.random_raw(_WORDS * count)[::_WORDS]
        return (first_words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class Draws:
    """The `uniform` input of consecutive steps: at step s, row r draws for position `lengths[r] + s`.

    `begin` and `clear` change what a single row draws from the next step on; a cleared row's numbers are arbitrary.
    """

    def __init__(self, seeds: Sequence[int], samples: Sequence[int], lengths: Sequence[int]) -> None:
        self._rows: list[tuple[int, int, int] | None] = list(zip(seeds, samples, lengths, strict=True))
        self._block = np.zeros((_BLOCK, len(self._rows)), np.float32)  # [steps, B]
        self._numbers = self._block.reshape(-1).data
        self._uniforms = _Uniforms()

    def write(self, step: int, out: memoryview | np.ndarray) -> None:
        """Write the numbers of `step` to `out`, float32 [B]. Steps must be consecutive from 0."""
        offset = step % _BLOCK
        if offset == 0:
            for row, drawn in enumerate(self._rows):
                if drawn is not None:
                    seed, sample, length = drawn
                    self._block[:, row] = self._uniforms.block(seed, length + step, sample, _BLOCK)
        start = offset * len(self._rows)
        out[:] = self._numbers[start : start + len(self._rows)]

    def begin(self, row: int, seed: int, sample: int, position: int, step: int) -> float:
        """Make `row` draw for `position + 1` at `step`, the next one to be written.

        Returns the number of `position`.
        """
        self._rows[row] = seed, sample, position + 1 - step
        offset = step % _BLOCK
        numbers = self._uniforms.block(seed, position, sample, 1 + (_BLOCK - offset if offset else 0))
        if offset:
            self._block[offset:, row] = numbers[1:]
        return float(numbers[0])

    def clear(self, row: int) -> None:
        self._rows[row] = None

    def swap(self, one: int, other: int) -> None:
        rows, pair = self._rows, [one, other]
        rows[one], rows[other] = rows[other], rows[one]
        self._block[:, pair] = self._block[:, pair[::-1]]


def prompt_seed(seed: int, index: int) -> int:
    """The seed, below 2**53, of prompt `index` (from 0) in a file (docs/contract/random.md).

    It uses the largest sample index, which no draw uses.
    """
    # numpy converts lists with integers >= 2**63 to floats
    counter = np.array([index, 2**SEED_BITS - 1, 0, 0], np.uint64)
    return int(np.random.Philox(key=seed, counter=counter).random_raw()) >> (SEED_BITS - _FRESH_BITS)
