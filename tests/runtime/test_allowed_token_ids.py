"""vLLM's `allowed_token_ids`: the only tokens of a sequence that can be drawn."""

from __future__ import annotations

import pytest

from tests.support.toy_model import VOCAB, byte_ids
from topw_deploy.errors import LogitsError, ParameterError
from topw_deploy.runtime import TopWModel

HOT = {"temperature": 3.0, "lam": 0.1, "seed": 4, "max_new_tokens": 12, "ignore_eos": True}


def test_no_other_token_is_drawn(model: TopWModel) -> None:
    digits = byte_ids("0123456789")
    plain = model.generate(["ab", "cd"], **HOT)
    only = model.generate(["ab", "cd"], **HOT, allowed_token_ids=[digits, None])
    assert set(only[0].token_ids) <= set(digits)
    assert len(set(only[0].token_ids)) > 1
    assert only[0].text.isdigit()
    assert only[1] == plain[1], "the other row is not masked"
    assert model.generate("ab", **HOT, allowed_token_ids=digits[0]).token_ids == digits[:1] * 12


def test_a_row_without_a_token_to_draw_is_an_error(model: TopWModel) -> None:
    with pytest.raises(LogitsError, match="row 0 is invalid at step 0"):
        model.generate("x", allowed_token_ids=[40], suppress_tokens=[40])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "allowed_token_ids is empty"),
        ([VOCAB], f"allowed_token_ids names the token id {VOCAB}, but ids go from 0 to {VOCAB - 1}"),
        ([-1], "is -1, but must be an integer >= 0"),
        ("abc", "is 'abc', but must be an integer"),
    ],
)
def test_wrong_ids_are_refused(model: TopWModel, value: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        model.generate("x", allowed_token_ids=value)
