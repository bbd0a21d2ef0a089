"""`MaskInputs` holds the masks of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.runtime.inputs import MaskInputs
from topw_deploy.sampling.row import unpack_mask

ROWS, TOKENS = 3, 64
EVERY = set(range(TOKENS))


@pytest.mark.parametrize("always", [False, True])
def test_masks_and_limits_stay_with_their_rows_until_they_are_cleared(always: bool) -> None:
    rng, masks = np.random.default_rng(0), MaskInputs(ROWS, TOKENS // 32, always=always)
    allowed: list[set[int] | None] = [None] * ROWS  # None: the row is not masked
    limits: list[set[int]] = [EVERY] * ROWS
    for _ in range(500):
        row, other = rng.integers(0, ROWS, 2).tolist()
        kind = rng.choice(["set", "limit", "clear", "swap"], p=[0.4, 0.1, 0.4, 0.1])
        if kind == "set":
            words = rng.integers(-(2**31), 2**31, TOKENS // 32).astype(np.int32)
            masks.set(row, words)
            allowed[row] = limits[row] & set(np.flatnonzero(unpack_mask(words[None], TOKENS)).tolist())
            words[:] = 7  # the mask is a copy
        elif kind == "limit":
            limits[row] = set(rng.choice(TOKENS, 20, replace=False).tolist())
            masks.limit(row, limits[row])
            allowed[row] = limits[row]
        elif kind == "clear":
            masks.clear(row)
            allowed[row], limits[row] = None, EVERY
        else:
            masks.swap(row, other)
            for column in (allowed, limits):
                column[row], column[other] = column[other], column[row]  # type: ignore[index, assignment]
        assert masks.is_active == any(each is not None for each in allowed)
        assert masks.array.dtype == np.int32
        if not always and not masks.is_active:
            assert masks.array.shape == (ROWS, 0), "no words cost least"
            continue
        found = [set(np.flatnonzero(flags).tolist()) for flags in unpack_mask(masks.array, TOKENS)]
        assert found == [EVERY if each is None else each for each in allowed]
