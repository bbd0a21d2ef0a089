"""The graph's penalties, biases and bans equal direct computations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.prepared import edits_of
from tests.support.toy_model import VOCAB, Toy, byte_ids
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.sampling import TopWParameters

PROMPT = byte_ids("hello")
HOT = {"temperature": 2.5, "lam": 0.2}
Given = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray, np.ndarray]]


def dense(edit: Callable[[list[int]], tuple[np.ndarray, np.ndarray]]) -> Given:
    """Dense edits, as reference."""

    def given(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        penalty, bias = edit(list(tokens))
        return np.arange(VOCAB), penalty.astype(np.float32), bias.astype(np.float32)

    return given


def none() -> tuple[np.ndarray, np.ndarray]:
    return np.ones(VOCAB), np.zeros(VOCAB)


def check(
    model: TopWModel, toy: Toy, edit: Callable[[list[int]], tuple[np.ndarray, np.ndarray]], **request: Any
) -> None:
    steps = 40
    result = model.generate(PROMPT, max_new_tokens=steps, seed=21, **HOT, **request)
    rows = toy.expect(PROMPT, steps, TopWParameters(**HOT), seed=21, edits=dense(edit))
    assert result.token_ids == [row.next_token for row in rows]
    assert result.kept == [row.kept for row in rows]
    plain = model.generate(PROMPT, max_new_tokens=steps, seed=21, **HOT)
    assert plain.token_ids != result.token_ids, "the edits of this test must make a difference"


def test_all_edits_together_fit_and_agree(model: TopWModel, toy: Toy) -> None:
    """All kinds, and more tokens than the first slots hold."""

    def edit(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        penalty, bias = none()
        penalty[list(set(tokens))] = 1.2
        for token, count in Counter(tokens[len(PROMPT) :]).items():
            bias[token] -= 0.75 + 0.25 * count
        bias[50:90] += 0.5
        bias[np.arange(120, 160)] = -np.inf
        for start in range(len(tokens) - 1):
            if tokens[start] == tokens[-1]:
                bias[tokens[start + 1]] = -np.inf
        return penalty, bias

    check(
        model,
        toy,
        edit,
        repetition_penalty=1.2,
        presence_penalty=0.75,
        frequency_penalty=0.25,
        logit_bias={**dict.fromkeys(range(50, 89), 0.5), "89": 0.5},
        suppress_tokens=list(range(120, 160)),
        no_repeat_ngram_size=2,
    )


def test_rows_are_set_cleared_and_exchanged_alone(model: TopWModel) -> None:
    """A row's edits depend on its request alone, wherever and beside whatever it runs."""
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2}
    (first,) = model.prepare("banana", **settings)
    (second,) = model.prepare("x", logit_bias=dict.fromkeys(range(3, 40), 1.0))
    (plain,) = model.prepare("y")

    def inputs(edits: EditInputs, row: int) -> set[tuple[int, float, float]]:
        edits.write_bans(row)
        rows = zip(edits.ids[row].tolist(), edits.penalty[row].tolist(), edits.bias[row].tolist(), strict=True)
        return {edit for edit in rows if edit[0] >= 0}

    alone, together = edits_of([first]), EditInputs(3)
    assert (together.is_active, together.slots) == (False, 0)
    together.set(1, first)
    place = 1
    for step, token in enumerate(byte_ids("ananas banana")):
        if step == 3:
            together.set(2, second)
        if step == 5:
            together.swap(1, 2)
            place = 2
        if step == 7:
            together.clear(1)
            together.set(0, plain)
            assert not inputs(together, 1)
        assert inputs(together, place) == inputs(alone, 0)
        alone.add_token(0, token)
        together.add_token(place, token)
    together.clear(place)
    assert (together.is_active, together.slots) == (False, 0)


def test_a_row_whose_edits_do_not_fit_is_without_edits(model: TopWModel) -> None:
    (large,) = model.prepare("abc", logit_bias=dict.fromkeys(range(3, 8), 1.0))
    edits = EditInputs(2, fixed=4)
    with pytest.raises(ParameterError, match="edits more than 4 tokens"):
        edits.set(1, large)
    assert not edits.is_active
    assert edits.ids.tolist() == [[-1] * 4] * 2


def test_penalties_that_add_up_beyond_float32_stay_finite(model: TopWModel) -> None:
    result = model.generate(PROMPT, frequency_penalty=-3e38, max_new_tokens=6, temperature=0.0, ignore_eos=True)
    assert len(set(result.token_ids)) == 1
    assert all(map(math.isfinite, result.logprobs))
