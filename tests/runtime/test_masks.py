"""Masks of a batch stay with their rows, and a generation with masks draws the reference's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.mask_steps import HOT, expected, set_mask
from tests.support.toy_model import Load, Toy, byte_ids
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.inputs import MaskInputs
from topw_deploy.runtime.loop import Batch, accept_tokens, steps
from topw_deploy.sampling.row import unpack_mask

PROMPTS = [byte_ids("hello"), byte_ids("ab"), byte_ids("xyz?")]
MASKED = (True, False, True)
STEPS = (14, 20, 9)


def generated(model: TopWModel, masked: tuple[bool, ...]) -> list[list[int]]:
    """Tokens of a batch whose `masked` rows are masked before every step."""
    sequences = model.prepare(PROMPTS, max_new_tokens=list(STEPS), seed=list(range(len(STEPS))), ignore_eos=True, **HOT)
    batch = Batch(*model._require_open(), sequences)
    drawn: list[list[int]] = [[] for _ in sequences]
    try:
        mask(batch, masked, drawn)
        for tokens in steps(batch):
            for sequence in batch.active:
                drawn[sequence.index].append(tokens[sequence.index])
            accept_tokens(batch, tokens)
            mask(batch, masked, drawn)
    finally:
        batch.close()
    return drawn


def mask(batch: Batch, masked: tuple[bool, ...], drawn: list[list[int]]) -> None:
    for sequence in batch.active:
        if masked[sequence.index]:
            set_mask(batch.inputs.masks, sequence.index, [*sequence.prompt, *drawn[sequence.index]])


def wanted(toy: Toy, masked: tuple[bool, ...]) -> list[list[int]]:
    return [
        expected(toy, prompt, steps, seed, masked=each)
        for seed, (prompt, steps, each) in enumerate(zip(PROMPTS, STEPS, masked, strict=True))
    ]


def test_masked_rows_of_a_batch_draw_the_references_tokens(model: TopWModel, toy: Toy) -> None:
    found = generated(model, MASKED)
    assert found == wanted(toy, MASKED)
    assert found != wanted(toy, (False, False, False))


@pytest.mark.parametrize("masked", [MASKED, (False, False, False)])
def test_a_graph_that_always_takes_masks_gives_the_same_tokens(load: Load, toy: Toy, masked: tuple[bool, ...]) -> None:
    model = load(toy)
    model._session.always_masked = True  # as in an engine
    assert generated(model, masked) == wanted(toy, masked)


@pytest.mark.parametrize("form", ["scatter", "grouped"])
def test_masks_reach_a_cache_that_is_updated_in_place(load: Load, toy: Toy, form: str) -> None:
    model = load(toy, form=form)
    one = PROMPTS[0]
    assert [len(tokens) for tokens in generated(model, MASKED)] == list(STEPS)
    assert generated(model, MASKED)[0] == expected(toy, one, STEPS[0], 0, masked=True)


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
