"""Other libraries' names, and values that Python accepts as token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.prepared import params
from tests.support.toy_model import Load, Toy, byte_ids
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


@pytest.mark.parametrize("keys", [(1, "1"), ("1", "01"), (np.int64(7), "7")], ids=repr)
def test_a_bias_given_twice_for_a_token_is_refused_by_name(keys: tuple[Any, Any]) -> None:
    with pytest.raises(ParameterError, match=f"logit_bias names the token id {int(keys[0])} twice; give it one bias"):
        params({"logit_bias": {keys[0]: 1.0, keys[1]: 2.0}})


@pytest.mark.parametrize("true", [True, np.True_], ids=["Python", "numpy"])
@pytest.mark.parametrize("name", ["eos_token_id", "stop_token_ids", "pad_token_id", "logit_bias", "bad_words_ids"])
def test_a_boolean_is_not_a_token_id(name: str, true: Any) -> None:
    value = {"logit_bias": {true: 1.0}, "bad_words_ids": [[3, true]], "stop_token_ids": [4, true]}.get(name, true)
    with pytest.raises(ParameterError, match=r"is (np\.)?True_?, but must be an integer"):
        params({name: value})


@pytest.mark.parametrize(
    "prompt", [[True, 3], [3, np.True_], np.array([True, False]), [[3], [False]], [1.0, 3], np.array([3.0])], ids=repr
)
def test_booleans_and_floats_in_a_prompt_are_refused_with_their_position(model: TopWModel, prompt: Any) -> None:
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
