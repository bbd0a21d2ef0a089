"""Masks that depend on the tokens so far, as a grammar's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.toy_model import EOS, VOCAB, Toy
from topw_deploy.sampling import TopWParameters, pack_mask

HOT = {"temperature": 2.5, "lam": 0.2}


def words_after(tokens: Sequence[int]) -> np.ndarray | None:
    """The mask of the next token: none at every third position; otherwise a few of the ordinary tokens."""
    if len(tokens) % 3 == 0:
        return None
    rng = np.random.default_rng(list(tokens))
    flags = np.zeros(VOCAB, np.bool_)
    flags[rng.choice(np.arange(3, VOCAB), 1 + len(tokens) % 5 * 10, replace=False)] = True
    assert not flags[EOS]
    return pack_mask(flags)


def set_mask(masks: Any, index: int, tokens: Sequence[int]) -> None:
    """Give row `index` of a `MaskInputs` the mask after `tokens`."""
    words = words_after(tokens)
    if words is None:
        masks.clear(index)
    else:
        masks.set(index, words)


def expected(toy: Toy, prompt: Sequence[int], steps: int, seed: int, *, masked: bool) -> list[int]:
    """The reference's tokens."""
    rows = toy.expect(prompt, steps, TopWParameters(**HOT), seed, allowed=words_after if masked else None)
    return [row.next_token for row in rows]
