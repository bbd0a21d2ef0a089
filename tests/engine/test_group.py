"""A group of decoding sequences passes the tokens that each of its rows would pass alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from topw_deploy.engine.request import Group
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import Sequence, SequenceParams


def request_of(model: TopWModel, budget: int, ends: frozenset[int] = frozenset()) -> SequenceParams:
    return replace(model.prepare([5, 6], seed=1)[0].params, budget=budget, eos_token_ids=ends)


def sequence_of(model: TopWModel, index: int, params: SequenceParams) -> Sequence:
    return Sequence(index, (5, 6), params, model.tokenizer)


def group_of(rows: list[Sequence], width: int | None = None) -> Group:
    sequences: list[Any] = [SimpleNamespace(slot=place, state=row) for place, row in enumerate(rows)]
    return Group(sequences[::-1], len(rows) if width is None else width)


def test_a_group_passes_the_tokens_that_each_row_passes_alone(model: TopWModel) -> None:
    rng = np.random.default_rng(0)
    passed = ended = 0
    for _ in range(200):
        requests = [
            request_of(model, int(rng.integers(1, 12)), frozenset(rng.integers(0, 40, rng.integers(3)).tolist()))
            for _ in range(rng.integers(1, 5))
        ]
        rows, alone = ([sequence_of(model, *each) for each in enumerate(requests)] for _ in range(2))
        group = group_of(rows)
        while True:
            tokens = rng.integers(-1 if rng.random() < 0.05 else 0, 40, len(rows)).tolist()
            before = [row.steps for row in alone]
            pass_alone = [row.try_lengthen(token) for row, token in zip(alone, tokens, strict=True)]
            found = group.passes(tokens)
            ending = {token for request in requests for token in request.eos_token_ids}
            assert found == (all(pass_alone) and ending.isdisjoint(tokens))
            if not found:
                group.settle()
                break
            passed += 1
        ended += 1
        assert [row.steps for row in rows] == before, "a token that ends a sequence is not added"
    assert passed > ended


def test_rows_with_text_or_with_free_rows_between_them_cannot_pass_together(model: TopWModel) -> None:
    request = request_of(model, 9)
    plain, watched = sequence_of(model, 0, request), sequence_of(model, 1, request)
    watched.decode_as_drawn()
    assert not group_of([plain, watched]).can_pass
    assert not group_of([plain], width=2).can_pass
    assert group_of([plain]).can_pass
