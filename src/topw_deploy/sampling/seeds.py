"""Seeds and the uniform number of a draw (docs/contract/random.md)."""

from __future__ import annotations

import secrets

import numpy as np

from topw_deploy.errors import ParameterError

SEED_BITS = 64
_FRESH_SEED_BITS = 53  # exact in a double, for JSON
_COUNTER_VALUES = 1 << 64
_OF_PROMPTS, _OF_SEQUENCES = _COUNTER_VALUES - 1, _COUNTER_VALUES - 2  # second words of counters; draws have 0


def fresh_seed() -> int:
    """A seed below 2**53 from the operating system."""
    return secrets.randbits(_FRESH_SEED_BITS)


def prompt_seed(seed: int, index: int) -> int:
    """The seed, below 2**53, of prompt `index` (from 0) in a file."""
    return _word(seed, index, _OF_PROMPTS) >> (SEED_BITS - _FRESH_SEED_BITS)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` (from 0) of a prompt: `seed` for the first one, else one below 2**53."""
    return _word(seed, index, _OF_SEQUENCES) >> (SEED_BITS - _FRESH_SEED_BITS) if index else seed


def uniform_for(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one draw, a pure function of its arguments.

    seed: the sequence's seed, 0 <= seed < 2^64.
    position: number of real tokens before the drawn one.

    Returns the top 24 bits of the first word of Philox 4x64-10, times 2^-24. The key is (seed, 0), the counter
    (position, 0, 0, 0); numpy increments the counter before it computes the first block.

    Raises ParameterError for an argument outside 0..2^64 - 1.
    """
    for name, value in (("seed", seed), ("position", position)):
        if not 0 <= value < _COUNTER_VALUES:
            raise ParameterError(f"{name} is {value!r}, but must be in 0..2^64 - 1.")
    return (_word(seed, position, 0) >> 40) * 2.0**-24


def _word(seed: int, low: int, high: int) -> int:
    """The first word of Philox 4x64-10 for the counter (low, high, 0, 0)."""
    counter = np.array([low, high, 0, 0], np.uint64)  # a list would become float64
    return int(np.random.Philox(key=seed, counter=counter).random_raw())
