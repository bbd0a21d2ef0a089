"""Masks of allowed tokens, and what they do to logits, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.kernel import KernelSamples

KINDS = ("one", "few", "run", "half", "most", "all", "last")
FIELDS = ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports")


def some_allowed(rng: np.random.Generator, vocab: int, kind: str) -> NDArray[np.bool_]:
    """bool [vocab] of the kind: one token; some random ones; neighbours; a random half; nearly all; all; the last."""
    chosen = np.zeros(vocab, np.bool_)
    if kind == "one":
        chosen[rng.integers(vocab)] = True
    elif kind == "few":
        chosen[rng.integers(vocab, size=max(1, vocab // 50))] = True
    elif kind == "run":
        first = int(rng.integers(vocab))
        chosen[first : first + max(1, vocab // 5)] = True
    elif kind == "half":
        chosen = rng.random(vocab) < 0.5
        chosen[rng.integers(vocab)] = True
    elif kind == "most":
        chosen = rng.random(vocab) < 0.99
        chosen[rng.integers(vocab)] = True
    elif kind == "last":
        chosen[-1] = True
    else:
        chosen[:] = True
    return chosen


def masks(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.bool_]:
    """bool [rows, vocab]: every kind in turn."""
    return np.stack([some_allowed(rng, vocab, KINDS[row % len(KINDS)]) for row in range(rows)])


def packed(allowed: NDArray[np.bool_], beyond: bool = False) -> NDArray[np.int32]:
    """The mask as int32 [rows, ceil(vocab / 32)]; beyond: the bits after the vocabulary. Independent of `pack_mask`."""
    rows, vocab = allowed.shape
    bits = np.full((rows, (vocab + 31) // 32 * 32), beyond)
    bits[:, :vocab] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


def masked(logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The logits, -inf where not allowed."""
    return np.where(allowed, logits, np.float32(-np.inf))


def unequal_fields(first: KernelSamples, second: KernelSamples, rows: Any = slice(None)) -> list[str]:
    """Names of the outputs whose bits differ in these rows."""
    pairs = [(name, getattr(first, name), getattr(second, name)) for name in FIELDS]
    return [name for name, a, b in pairs if not np.array_equal(a[rows].view(np.uint8), b[rows].view(np.uint8))]
