"""A generation whose rows get a mask before every step draws the reference's tokens."""

from __future__ import annotations

import pytest

from tests.support.mask_steps import HOT, expected, set_mask
from tests.support.toy_model import Load, Toy, byte_ids
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.loop import Generation, accept_tokens, decode_one_token, prefill
from topw_deploy.runtime.rows import Row

PROMPTS = [byte_ids("hello"), byte_ids("ab"), byte_ids("xyz?")]
MASKED = (True, False, True)
STEPS = (14, 20, 9)


def generated(model: TopWModel, masked: tuple[bool, ...]) -> list[list[int]]:
    """Tokens of a batch whose `masked` rows are masked before every step."""
    requests = [
        request
        for seed, (prompt, steps) in enumerate(zip(PROMPTS, STEPS, strict=True))
        for request in model._resolve_requests(
            prompt, {"max_new_tokens": steps, "seed": seed, "ignore_eos": True, **HOT}
        )[0]
    ]
    rows = [Row(index, request, None) for index, request in enumerate(requests)]
    generation = Generation(*model._require_open(), rows)
    tokens: list[list[int]] = [[] for _ in rows]

    def step(run: object) -> None:
        active = list(generation.active)
        for row in active:
            if masked[row.index]:
                set_mask(generation.inputs.masks, row.index, [*row.request.prompt, *tokens[row.index]])
        drawn = run(generation)  # type: ignore[operator]
        accept_tokens(generation, drawn)
        for row in active:
            tokens[row.index].append(drawn[row.index])

    try:
        step(prefill)
        while generation.active:
            step(decode_one_token)
    finally:
        generation.close()
    return tokens


def wanted(toy: Toy, masked: tuple[bool, ...]) -> list[list[int]]:
    return [
        expected(toy, prompt, steps, seed, masked=each)
        for seed, (prompt, steps, each) in enumerate(zip(PROMPTS, STEPS, masked, strict=True))
    ]


def test_masked_rows_of_a_batch_draw_the_references_tokens(model: TopWModel, toy: Toy) -> None:
    found = generated(model, MASKED)
    assert found == wanted(toy, MASKED)
    assert found != wanted(toy, (False, False, False))


def test_a_batch_without_masks_draws_as_before(model: TopWModel, toy: Toy) -> None:
    assert generated(model, (False, False, False)) == wanted(toy, (False, False, False))


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
