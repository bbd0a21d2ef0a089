"""Seeds and the uniform number of a draw (docs/contract/random.md)."""

from __future__ import annotations

import secrets

import numpy as np

from topw_deploy.errors import ParameterError

SEED_BITS = 64
_FRESH_SEED_BITS = 53  # exact in a double, for JSON
_COUNTER_VALUES = 1 << 64


def fresh_seed() -> int:
    """A seed below 2**53 from the operating system."""
    return secrets.randbits(_FRESH_SEED_BITS)


def prompt_seed(seed: int, index: int) -> int:
    """The seed, below 2**53, of prompt `index` (from 0) in a file.

    Its Philox counter has the largest sample index, which no draw uses.
    """
    # numpy converts lists with integers >= 2**63 to floats
    counter = np.array([index, _COUNTER_VALUES - 1, 0, 0], np.uint64)
    return int(np.random.Philox(key=seed, counter=counter).random_raw()) >> (SEED_BITS - _FRESH_SEED_BITS)


def uniform_for(seed: int, position: int, sample: int = 0) -> float:
    """The uniform number in [0, 1) of one draw, a pure function of its arguments.

    seed: the request's seed, 0 <= seed < 2^64.
    position: number of real tokens before the drawn one.
    sample: index among the request's `n` answers.

    Returns the top 24 bits of the first word of Philox 4x64-10, times 2^-24. The key is (seed, 0), the counter
    (position, sample, 0, 0); numpy increments the counter before it computes the first block.

    Raises ParameterError for an argument outside 0..2^64 - 1.
    """
    for name, value in (("seed", seed), ("position", position), ("sample", sample)):
        if not 0 <= value < _COUNTER_VALUES:
            raise ParameterError(f"{name} is {value!r}, but must be in 0..2^64 - 1.")
    counter = np.array([position, sample, 0, 0], dtype=np.uint64)  # a list would become float64
    word = np.random.Philox(key=seed, counter=counter).random_raw()
    return (int(word) >> 40) * 2.0**-24
