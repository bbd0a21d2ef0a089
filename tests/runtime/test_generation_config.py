"""`generation_config=`: after the request's parameters, before the model's file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import Load, Toy
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel

SETTINGS = {"temperature": 2.0, "lam": 0.3, "max_new_tokens": 5, "seed": 3}


def test_everything_that_a_request_may_state_may_be_stated_there(model: TopWModel) -> None:
    expected = model.generate("ab", **SETTINGS, num_return_sequences=2)
    assert model.generate("ab", generation_config={**SETTINGS, "num_return_sequences": 2}) == expected
    assert model.generate("ab", generation_config={**SETTINGS, "n": 3}, n=2) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": [0.5, 0.6]}, r"generation_config: temperature is \[0.5, 0.6\]"),
        ({"max_new_tokens": 4, "max_tokens": 5}, "generation_config: max_new_tokens is given twice, as max_new_tokens"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample is True, but temperature is 0.0"),
        ("out", "generation_config is 'out', but must be a mapping of parameters by name"),
        ({5: 1}, r"generation_config is \{5: 1\}, but must be a mapping of parameters by name"),
    ],
)
def test_wrong_values_name_generation_config(model: TopWModel, config: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        model.generate("ab", generation_config=config)


def test_settings_without_effect_are_named_in_one_warning_at_the_callers_line(model: TopWModel) -> None:
    config = {"top_k": 50, "num_beams": 4, "watermarking_config": {}, "use_cache": True, "top_p": 0.9, **SETTINGS}
    for call in (model.generate, model.stream):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call("ab", generation_config=config)
        (notice,) = caught
        expected = (
            "generation_config sets num_beams=4, top_k=50, top_p=0.9, watermarking_config={}, which has no effect here"
        )
        assert str(notice.message).startswith(expected)
        assert Path(notice.filename) == Path(__file__)


def test_transformers_own_object_counts_only_where_it_differs_from_its_defaults(load: Load) -> None:
    transformers = pytest.importorskip("transformers")
    model = load(Toy.random(0), generation_config={"temperature": 2.0, "max_new_tokens": 5, "lam": 0.3})
    plain = model.generate("ab", seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate("ab", seed=3, generation_config=transformers.GenerationConfig()) == plain
        config = transformers.GenerationConfig(
            do_sample=True, max_new_tokens=7, repetition_penalty=1.5, num_return_sequences=2
        )
        results = model.generate("ab", seed=3, generation_config=config)
        assert results == model.generate("ab", seed=3, max_new_tokens=7, repetition_penalty=1.5, n=2)
        assert [len(r.token_ids) for r in results] == [7, 7]
        longer = model.generate("ab", seed=3, generation_config=config, max_new_tokens=8, n=1)
        assert len(longer.token_ids) == 8
    two = transformers.GenerationConfig(top_k=7, min_p=0.1, do_sample=True)
    with pytest.warns(UserWarning, match="generation_config sets min_p=0.1, top_k=7, which has no effect here"):
        model.generate("ab", generation_config=two)
    greedy = model.generate("ab", temperature=0.0)
    found = model.generate("ab", seed=greedy.seed, generation_config=transformers.GenerationConfig(do_sample=False))
    assert found == greedy
