"""The engine's batch binds the masks of rows that join, are exchanged and leave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mask_steps import HOT, expected, set_mask
from tests.support.toy_model import CONTEXT, Toy, byte_ids
from topw_deploy.engine.batch import Batch
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.session import HostBinding
from topw_deploy.runtime.sequence import Sequence


class Rows:
    """Requests that decode in a batch, in adjacent rows from 0."""

    def __init__(self, model: TopWModel, rows: int) -> None:
        self.model = model
        session, _ = model._require_open()
        self.batch = Batch(session, model._decoder, rows, CONTEXT)
        self.tokens: list[list[int]] = []
        self.masked: list[bool] = []
        self.requests: list[Sequence] = []

    def join(self, text: str, seed: int, *, masked: bool) -> None:
        (request,) = self.model.prepare(byte_ids(text), max_new_tokens=60, seed=seed, **HOT)
        row = len(self.tokens)
        self.requests.append(request)
        self.tokens.append([])
        self.masked.append(masked)
        self.batch.assign(row, request)
        self._mask(row)
        assert self.batch.read(row, request, 0, 1) is None
        token = self.batch.read(row, request, 1, len(request.prompt))
        assert token is not None
        self.tokens[row].append(token)
        self.batch.begin(row, token)

    def step(self, times: int) -> None:
        for _ in range(times):
            width = len(self.tokens)
            for row in range(width):
                self._mask(row)
            for row, token in enumerate(self.batch.step(width)[:width]):
                self.tokens[row].append(token)
                self.batch.accept(row, token)

    def exchange(self, one: int, other: int) -> None:
        self.batch.exchange(one, other)
        for rows in (self.tokens, self.masked, self.requests):
            rows[one], rows[other] = rows[other], rows[one]  # type: ignore[index]

    def leave(self) -> list[int]:
        """End the last row. Returns its tokens."""
        self.batch.clear(len(self.tokens) - 1)
        self.masked.pop()
        self.requests.pop()
        return self.tokens.pop()

    def _mask(self, row: int) -> None:
        if self.masked[row]:
            set_mask(self.batch.inputs.masks, row, [*self.requests[row].prompt, *self.tokens[row]])


@pytest.mark.parametrize("always", [False, True])
def test_masked_and_other_rows_draw_the_references_tokens(any_model: TopWModel, toy: Toy, always: bool) -> None:
    session: Any = any_model._session
    before, session.always_masked = session.always_masked, always
    rows = Rows(any_model, 3)
    try:
        rows.join("hello", 1, masked=False)
        rows.step(3)
        rows.join("ab", 2, masked=True)
        rows.step(4)
        rows.join("cd", 3, masked=True)
        rows.step(2)
        rows.exchange(0, 2)
        rows.step(3)
        plain = rows.leave()
        rows.step(2)
        second = rows.leave()
        assert rows.batch.inputs.masks.array.shape[1] == (9 if always or rows.batch.inputs.masks.is_active else 0)
        rows.step(2)
        first = rows.leave()
        assert not rows.batch.inputs.masks.is_active
        rows.join("hello", 1, masked=False)
        rows.step(5)
    finally:
        rows.batch.close()
        session.always_masked = before
    assert plain == expected(toy, byte_ids("hello"), len(plain), 1, masked=False)
    assert second == expected(toy, byte_ids("ab"), len(second), 2, masked=True)
    assert first == expected(toy, byte_ids("cd"), len(first), 3, masked=True)
    assert rows.tokens[0] == plain[:6]
    assert (len(plain), len(second), len(first)) == (13, 12, 10)


def test_a_changed_mask_is_copied_to_the_device_and_others_are_not(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed: list[str] = []
    monkeypatch.setattr(HostBinding, "refresh", lambda _self, name: refreshed.append(name))
    rows = Rows(model, 1)
    try:
        rows.join("hello", 1, masked=True)  # `set_mask` sets none before the sequence has 6 tokens
        rows.step(2)
        assert refreshed.count("allowed") == 0  # bound again with words
        rows.step(1)
        assert refreshed.count("allowed") == 1
        rows.masked[0] = False  # the mask stays
        rows.step(3)
        assert refreshed.count("allowed") == 1
    finally:
        rows.batch.close()
