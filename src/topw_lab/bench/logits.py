"""Random logits of three kinds, in numpy alone: a GPU host times them, too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

_BELL_DEVIATION, _LIKELY_TOKENS, _LEAST_LIKELY_LOGIT = 2.2, 20, 7.7
_FLAT_TOKENS, _FLAT_LOGIT, _FLAT_DEVIATION = 120, 10.0, 0.2


def likely_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab], like those of a language model: normal, standard deviation 2.2, and 20 likely tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        row = rng.standard_normal(vocab) * _BELL_DEVIATION
        likely = min(_LIKELY_TOKENS, vocab)
        row[rng.permutation(vocab)[:likely]] = _LEAST_LIKELY_LOGIT + rng.exponential(2.0, likely)
        rows.append(row)
    return np.stack(rows).astype(np.float32)


def flat_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: standard normal, and 120 tokens that are about equally likely.

    Top-W keeps all 120 tokens, more than the first 64 candidates that the graph tries.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((batch, vocab))
    for row in rows:
        likely = rng.permutation(vocab)[:_FLAT_TOKENS]
        row[likely] = _FLAT_LOGIT + _FLAT_DEVIATION * rng.standard_normal(len(likely))
    return rows.astype(np.float32)


def bell_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: `likely_logits` without the likely tokens."""
    return (np.random.default_rng(seed).standard_normal((batch, vocab)) * _BELL_DEVIATION).astype(np.float32)


def make_logits(regime: str, vocab: int, batch: int, seed: int) -> Logits:
    """Random logits of a regime, float32 [batch, vocab]."""
    return {"certified": likely_logits, "flat": flat_logits, "uncertified": bell_logits}[regime](vocab, batch, seed)
