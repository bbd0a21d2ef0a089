"""vLLM's `allowed_token_ids`: the only tokens of a sequence that can be drawn."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.toy_model import EOS, VOCAB, Load, Toy, byte_ids
from topw_deploy.errors import LogitsError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.inputs import MaskInputs
from topw_deploy.sampling.row import pack_mask

HOT = {"temperature": 3.0, "lam": 0.1, "seed": 4, "max_new_tokens": 12, "ignore_eos": True}


def words(*tokens: int) -> np.ndarray:
    flags = np.zeros(64, np.bool_)
    flags[list(tokens)] = True
    return pack_mask(flags)


def test_a_limit_holds_for_every_mask_of_its_row_until_it_is_cleared() -> None:
    masks = MaskInputs(3, 2)
    masks.limit(1, [3, 33, 63])
    assert (masks.array[1] == words(3, 33, 63)).all()
    masks.set(1, words(3, 4, 63))
    masks.set(0, words(4))
    assert (masks.array[1] == words(3, 63)).all()
    assert (masks.array[0] == words(4)).all()
    masks.swap(1, 2)
    masks.set(2, words(4, 33))
    masks.set(1, words(4, 33))
    assert (masks.array[2] == words(33)).all()
    assert (masks.array[1] == words(4, 33)).all()
    masks.clear(2)
    assert (masks.array[2] == -1).all()
    masks.set(2, words(4))
    assert (masks.array[2] == words(4)).all()


def test_no_other_token_is_drawn(model: TopWModel) -> None:
    digits = byte_ids("0123456789")
    plain = model.generate(["ab", "cd"], **HOT)
    only = model.generate(["ab", "cd"], **HOT, allowed_token_ids=[digits, None])
    assert set(only[0].token_ids) <= set(digits)
    assert len(set(only[0].token_ids)) > 1
    assert only[0].text.isdigit()
    assert only[1] == plain[1], "the other row is not masked"
    assert model.generate("ab", **HOT, allowed_token_ids=digits[0]).token_ids == digits[:1] * 12


def test_the_end_of_sequence_is_drawn_only_if_allowed(load: Load) -> None:
    toy = Toy.random(5)
    toy.place[:, EOS] = 2000
    model = load(toy)
    a = byte_ids("a")
    assert model.generate("x", max_new_tokens=5, allowed_token_ids=a).token_ids == a * 5
    assert model.generate("x", max_new_tokens=5, allowed_token_ids=[*a, EOS]).token_ids == [EOS]


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
