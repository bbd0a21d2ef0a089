"""A generation with masks that depend on the tokens so far, as a grammar's do, draws the reference's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.toy_model import EOS, VOCAB, Load, Toy, byte_ids
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.inputs import MaskInputs
from topw_deploy.runtime.loop import Batch, accept_tokens, steps
from topw_deploy.sampling import TopWParameters, pack_mask

HOT = {"temperature": 2.5, "lam": 0.2}
PROMPTS = [byte_ids("hello"), byte_ids("ab"), byte_ids("xyz?")]
MASKED = (True, False, True)
STEPS = (14, 20, 9)


def words_after(tokens: Sequence[int]) -> np.ndarray | None:
    """The mask of the next token: none at every third position; otherwise a few of the ordinary tokens."""
    if len(tokens) % 3 == 0:
        return None
    rng = np.random.default_rng(list(tokens))
    flags = np.zeros(VOCAB, np.bool_)
    flags[rng.choice(np.arange(3, VOCAB), 1 + len(tokens) % 5 * 10, replace=False)] = True
    assert not flags[EOS]
    return pack_mask(flags)


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
    masks = batch.inputs.masks
    for row in (sequence.index for sequence in batch.active if masked[sequence.index]):
        words = words_after([*PROMPTS[row], *drawn[row]])
        if words is None:
            masks.clear(row)
        else:
            masks.set(row, words)


def wanted(toy: Toy, masked: tuple[bool, ...]) -> list[list[int]]:
    """The reference's tokens."""
    found = []
    for seed, (prompt, count, each) in enumerate(zip(PROMPTS, STEPS, masked, strict=True)):
        rows = toy.expect(prompt, count, TopWParameters(**HOT), seed, allowed=words_after if each else None)
        found.append([row.next_token for row in rows])
    return found


def test_masked_rows_of_a_batch_draw_the_references_tokens(model: TopWModel, toy: Toy) -> None:
    found = generated(model, MASKED)
    assert found == wanted(toy, MASKED)
    assert found != wanted(toy, (False, False, False))


@pytest.mark.parametrize("masked", [MASKED, (False, False, False)])
@pytest.mark.parametrize(("form", "always"), [("concat", True), ("scatter", False), ("grouped", False)])
def test_graphs_that_always_take_masks_and_caches_in_place_give_the_same_tokens(
    load: Load, toy: Toy, form: str, always: bool, masked: tuple[bool, ...]
) -> None:
    model = load(toy, form=form)
    model._session.always_masked = always  # as in an engine
    assert generated(model, masked) == wanted(toy, masked)


def test_a_cleared_row_has_neither_mask_nor_limit() -> None:
    masks = MaskInputs(2, 1)
    masks.limit(0, [1, 2])
    masks.clear(0)
    masks.set(0, np.array([12], np.int32))
    assert masks.array.tolist() == [[12], [-1]]
    masks.clear(0)
    assert masks.array.shape == (2, 0), "no words cost least"
