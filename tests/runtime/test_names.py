"""Other libraries' names, and values that Python accepts as token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.prepared import params
from tests.support.toy_model import EOS, VOCAB, Load, Toy, byte_ids
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.parameters import ALIASES, check_names

HOT = {"temperature": 3.0, "lam": 0.1, "seed": 4}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_a_name_and_its_alias_together_are_refused_and_both_are_named(alias: str, name: str) -> None:
    if name == "top_m":  # fixed by the export, under either name
        return
    for first, second in ((name, alias), (alias, name)):
        with pytest.raises(ParameterError, match=f"{name} is given twice, as {first} and as {second}; give it once"):
            check_names({first: 1, second: 1})
    assert check_names({name: None, alias: 1}) == check_names({name: 1})


def test_stop_token_ids_end_a_sequence_beside_the_models_own_and_despite_ignore_eos(load: Load) -> None:
    tokens = [*byte_ids("ab"), EOS]
    model = load(Toy.script(tokens, prompt_tokens=1))
    assert model.generate("x", stop_token_ids=[200]).token_ids == tokens, "the model's own still counts"
    result = model.generate("x", stop_token_ids=tokens[1:2])
    assert (result.token_ids, result.text, result.finish_reason, result.stop) == (tokens[:2], "a", "stop", tokens[1])
    assert model.generate("x", stop_token_ids=tokens[1], ignore_eos=True).token_ids == tokens[:2]
    with pytest.raises(ParameterError, match=f"stop_token_ids names the token id {VOCAB}"):
        model.generate("x", stop_token_ids=[VOCAB])


@pytest.mark.parametrize("keys", [(1, "1"), ("1", "01"), (np.int64(7), "7")], ids=repr)
def test_a_bias_given_twice_for_a_token_is_refused_by_name(keys: tuple[Any, Any]) -> None:
    with pytest.raises(ParameterError, match=f"logit_bias names the token id {int(keys[0])} twice; give it one bias"):
        params({"logit_bias": {keys[0]: 1.0, keys[1]: 2.0}})


def test_biases_may_have_the_keys_of_json() -> None:
    assert params({"logit_bias": {"5": 1, "6": -100}}).logit_bias == {5: 1.0, 6: -100.0}


@pytest.mark.parametrize("true", [True, np.True_], ids=["Python", "numpy"])
@pytest.mark.parametrize(
    "request_",
    [
        lambda true: {"logit_bias": {true: 1.0}},
        lambda true: {"eos_token_id": true},
        lambda true: {"eos_token_id": [4, true]},
        lambda true: {"stop_token_ids": [true]},
        lambda true: {"pad_token_id": true},
        lambda true: {"suppress_tokens": [true]},
        lambda true: {"bad_words_ids": [[3, true]]},
    ],
    ids=["logit_bias", "eos", "one eos of two", "stop_token_ids", "pad", "suppress_tokens", "bad_words_ids"],
)
def test_a_boolean_is_not_a_token_id(request_: Any, true: Any) -> None:
    with pytest.raises(ParameterError, match=r"is (np\.)?True_?, but must be an integer"):
        params(request_(true))


@pytest.mark.parametrize("prompt", [[True, 3], [3, np.True_], np.array([True, False]), [[3], [False]]], ids=repr)
def test_a_boolean_in_a_prompt_is_refused_with_its_position(model: TopWModel, prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"holds (np\.)?(True|False)_? at position \d, but token ids are integers"):
        model.generate(prompt)


@pytest.mark.parametrize("prompt", [[1.0, 3], np.array([3.0, 4.0]), [3, np.float32(1)]], ids=repr)
def test_a_float_in_a_prompt_is_refused_even_if_its_value_is_an_integer(model: TopWModel, prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"holds .* at position \d, but token ids are integers"):
        model.generate(prompt)


def test_bad_words_are_texts_with_and_without_a_leading_space(load: Load) -> None:
    toy = Toy.script(byte_ids("x ab ab"), prompt_tokens=1)
    model = load(toy)
    spelled = {"bad_words_ids": [byte_ids("ab"), byte_ids(" ab")]}
    hot = {"temperature": 0, "max_new_tokens": 7}
    assert model.generate("x", **hot).text == "x ab ab"
    expected = model.generate("x", **hot, **spelled)
    assert expected.text[:3] == "x a"
    assert expected.text[3] != "b"
    for words in (["ab"], "ab", [" ab", "ab"]):
        assert model.generate("x", **hot, bad_words=words).token_ids == expected.token_ids
    assert model.generate("x", **hot, generation_config={"bad_words": ["ab"]}).token_ids == expected.token_ids
    rows = model.generate(["x", "x"], **hot, bad_words=[["ab"], None])
    assert [row.token_ids == expected.token_ids for row in rows] == [True, False]
    assert model.generate("x", **hot, bad_words=["zz"], **spelled).token_ids == expected.token_ids
    for wrong in ([3], [["ab", 4]], ""):
        with pytest.raises(ParameterError, match=r"bad_words is .*, but must be a non-empty string or a list of them"):
            model.generate("x", bad_words=wrong)
