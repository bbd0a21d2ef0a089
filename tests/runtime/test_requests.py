"""Parameter precedence and refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.prepared import prepare
from tests.support.toy_model import EOS, PAD, VOCAB, Load, Toy
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import SequenceParams
from topw_deploy.sampling import TopWParameters, preset_parameters

EXPORTED = TopWParameters(lam=1.5, temperature=0.9)


def row(request: dict[str, Any], model: dict[str, Any] | None = None) -> SequenceParams:
    (only,) = prepare(request, file=model, exported=EXPORTED)
    return only.params


@pytest.mark.parametrize(
    ("request_", "model", "name", "expected"),
    [
        # request, then generation_config.json, then the export
        ({}, {}, "temperature", 0.9),
        ({}, {"temperature": 0.6}, "temperature", 0.6),
        ({"temperature": 0.3}, {"temperature": 0.6}, "temperature", 0.3),
        ({"temperature": None}, {"temperature": 0.6}, "temperature", 0.6),
        ({}, {}, "lam", 1.5),
        ({}, {}, "beta", 2.8),
        ({"lambda_geom": 0.7}, {"lam": 0.2}, "lam", 0.7),
        ({"warm_p": 0.5}, {}, "init_top_p", 0.5),
        # do_sample
        ({}, {"do_sample": False, "temperature": 0.6}, "temperature", 0.0),
        ({}, {"do_sample": True, "temperature": 0.6}, "temperature", 0.6),
        ({"temperature": 0.7}, {"do_sample": False}, "temperature", 0.7),
        ({"do_sample": True}, {"do_sample": False, "temperature": 0.6}, "temperature", 0.6),
        ({"do_sample": True}, {"temperature": 0.0}, "temperature", 1.0),
        ({"do_sample": False, "temperature": 0.7}, {}, "temperature", 0.0),
        # generation_config, between the request and generation_config.json
        ({"generation_config": {"temperature": 0.5}}, {"temperature": 0.6}, "temperature", 0.5),
        ({"temperature": 0.4, "generation_config": {"temperature": 0.5}}, {}, "temperature", 0.4),
        ({"generation_config": {"do_sample": False, "temperature": 0.5}}, {}, "temperature", 0.0),
        ({"do_sample": True, "generation_config": {"do_sample": False, "temperature": 0.5}}, {}, "temperature", 0.5),
        ({"do_sample": True, "generation_config": {"temperature": 0.0}}, {}, "temperature", 1.0),
        ({"generation_config": {"do_sample": True}}, {"do_sample": False, "temperature": 0.6}, "temperature", 0.6),
        ({"generation_config": {"temperature": 0.5}}, {"do_sample": False}, "temperature", 0.5),
        ({"generation_config": {"lam": 1.0}}, {"do_sample": False}, "temperature", 0.0),
        ({"generation_config": {"do_sample": True}}, {"temperature": 0.0}, "temperature", 1.0),
        # other kinds of numbers
        ({"temperature": np.float32(0.5)}, {}, "temperature", 0.5),
        ({"lam": np.int64(2)}, {}, "lam", 2.0),
    ],
)
def test_a_top_w_parameter_comes_from_the_first_place_that_states_it(
    request_: dict[str, Any], model: dict[str, Any], name: str, expected: float
) -> None:
    assert getattr(row(request_, model).top_w, name) == expected


def test_a_preset_stands_before_the_models_defaults_and_behind_the_request() -> None:
    model = {"temperature": 0.6, "lam": 0.2, "repetition_penalty": 1.1}
    found = row({"preset": "lively", "beta": 3.0}, model)
    assert found.top_w == TopWParameters(**{**preset_parameters("lively", "uniform", None), "beta": 3.0})
    assert found.repetition_penalty == 1.1
    assert row({"preset": "paper"}, model).top_w == TopWParameters()
    assert row({"preset": "lively", "do_sample": False}, model).top_w.greedy


def test_each_row_may_have_its_own_preset() -> None:
    request = {"preset": ["paper", None, "lively"], "lam": [None, 1.7, None]}
    found = prepare(request, [[5], [6], [7]], exported=EXPORTED, geometry=("mahalanobis", 32))
    lively = TopWParameters(**preset_parameters("lively", "mahalanobis", 32))
    assert [r.params.top_w for r in found] == [TopWParameters(), TopWParameters(lam=1.7, temperature=0.9), lively]


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="preset is 'released', but must be one of paper, creative, lively"):
        row({"preset": "released"})


@pytest.mark.parametrize(
    ("request_", "model", "budget"),
    [
        ({}, {}, 256),
        ({"max_new_tokens": 7}, {}, 7),
        ({}, {"max_new_tokens": 30}, 30),
        ({}, {"max_length": 30}, 20),
        ({"max_length": 30}, {"max_new_tokens": 5}, 20),
        ({"max_new_tokens": 7}, {"max_length": 12}, 7),
        ({}, {"max_length": 8}, 256),  # ignored: below the prompt's length
        ({"generation_config": {"max_new_tokens": 7}}, {"max_new_tokens": 30}, 7),
        ({"generation_config": {"max_length": 30}}, {"max_new_tokens": 5}, 20),
        ({"max_new_tokens": 3, "generation_config": {"max_length": 8}}, {}, 3),
        ({"max_length": 12, "generation_config": {"max_new_tokens": 7}}, {}, 2),
        ({"max_new_tokens": 100_000}, {}, 990),  # the context
        ({"max_length": 100_000}, {}, 990),
    ],
)
def test_the_token_limit(request_: dict[str, Any], model: dict[str, Any], budget: int) -> None:
    assert row(request_, model).budget == budget


def test_an_explicit_length_below_the_prompt_is_an_error() -> None:
    with pytest.raises(PromptError, match="prompt has 10 tokens, but max_length is 10"):
        row({"max_length": 10})
    with pytest.raises(ParameterError, match="both given"):
        row({"max_length": 20, "max_new_tokens": 5})


def test_end_of_sequence_and_padding() -> None:
    model = {"eos_token_id": (4, 7), "pad_token_id": 9}
    assert row({}, model).eos_token_ids == {4, 7}
    assert row({}, model).pad_token_id == 9
    assert row({"eos_token_id": 3}, model).eos_token_ids == {3}
    assert row({"ignore_eos": True}, model).eos_token_ids == frozenset()
    assert row({}, {"eos_token_id": (4, 7)}).pad_token_id == 4
    assert row({}, {}).pad_token_id == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1, but must be a finite number >= 0"),
        ("temperature", 1e39, r"temperature is 1e\+39, but must be a finite number >= 0 in float32 too, which holds"),
        ("temperature", "0.5", "temperature is '0.5'"),
        ("init_top_p", 0, r"init_top_p is 0, but must be in \(0, 1\]"),
        ("init_top_p", 1e-60, r"init_top_p is 1e-60, but must be in \(0, 1\] in float32 too"),
        ("lam", 10**400, r"lam is 10{56}\.\.\., but must be a finite number"),
        pytest.param("seed", 10**5000, "seed is an integer of 16610 bits, but must be", id="unprintable"),
        ("max_new_tokens", 0, "must be an integer >= 1"),
        ("seed", -1, r"seed is -1, but must be an integer in \[0, 18446744073709551616\)"),
        ("seed", 2**64, "seed is"),
        ("do_sample", 1, "must be True or False"),
        ("repetition_penalty", 1e-50, "must be a finite number > 0 in float32 too"),
        ("presence_penalty", float("inf"), "must be a finite number"),
        ("logit_bias", {1: float("inf")}, "below infinity"),
        ("logit_bias", {"x": 1}, "must be an integer >= 0"),
        ("logit_bias", {VOCAB: 1}, f"names the token id {VOCAB}"),
        ("logit_bias", 3, "must map token ids to numbers"),
        ("stop_strings", ["a", ""], "non-empty string"),
        ("bad_words_ids", [[]], "list of non-empty lists"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("eos_token_id", VOCAB, f"names the token id {VOCAB}"),
        ("num_return_sequences", 0, "must be an integer in \\[1, 65537\\)"),
    ],
)
def test_a_value_out_of_range_names_the_parameter_the_value_and_the_bound(name: str, value: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        row({name: value})


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(model: TopWModel) -> None:
    with pytest.raises(
        ParameterError,
        match=r"unknown parameter 'max_new_token': did you mean max_new_tokens\? known are .*lam.*stop_strings",
    ):
        model.generate("a", max_new_token=5)
    with pytest.raises(ParameterError, match="'lamda': did you mean lam"):
        model.generate("a", lamda=2)


def test_a_request_cannot_change_a_parameter_that_the_export_fixed(model: TopWModel) -> None:
    for name in ("top_m", "m", "alt_iters", "metric"):
        with pytest.raises(ParameterError, match="built into the graph, so no request can change it"):
            model.generate("a", **{name: 50})


@pytest.mark.parametrize(
    ("name", "value", "rows"),
    [
        ("eos_token_id", [1, 2], [{1, 2}, {1, 2}]),
        ("eos_token_id", [[1, 2], [3]], [{1, 2}, {3}]),
        ("stop_strings", ["a", "b"], [("a", "b")] * 2),
        ("stop_strings", [["a"], ["b", "c"]], [("a",), ("b", "c")]),
        ("bad_words_ids", [[1, 2], [3]], [((1, 2), (3,))] * 2),
        ("bad_words_ids", [[[1, 2]], [[3]]], [((1, 2),), ((3,),)]),
        ("logit_bias", {4: 1}, [{4: 1.0}] * 2),
        ("logit_bias", [{4: 1}, {5: 2}], [{4: 1.0}, {5: 2.0}]),
        ("repetition_penalty", [1.0, 2.0], [1.0, 2.0]),
        ("seed", [7, None], [7, ...]),
    ],
)
def test_one_more_level_of_lists_means_one_value_per_row(name: str, value: Any, rows: list[Any]) -> None:
    attribute = {"eos_token_id": "eos_token_ids"}.get(name, name)
    found = [getattr(r.params, attribute) for r in prepare({name: value}, [[5], [6]])]
    assert all(want is ... or want == have for want, have in zip(rows, found, strict=True))


REAL = {  # from instruction models
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [EOS, 7],
    "pad_token_id": PAD,
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "repetition_penalty": 1.05,
    "transformers_version": "5.0.0",
    "_from_model_config": True,
}


def test_a_real_generation_config_is_honoured_and_its_other_samplers_are_named_once(load: Load) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(Toy.random(0), generation_config=REAL)
        model.generate("a", max_new_tokens=2)
        model.generate("b", max_new_tokens=2)
    (notice,) = [str(w.message) for w in caught]
    assert notice.startswith("generation_config.json sets top_k=50, top_p=0.9, which has no effect here")
    assert Path(caught[0].filename).name == "conftest.py", "the notice points at the caller of from_pretrained"
    request = model.prepare("a")[0].params
    assert request.top_w.temperature == 0.6
    assert request.repetition_penalty == 1.05
    assert request.eos_token_ids == {EOS, 7}


def test_token_ids_beyond_the_logits_in_a_config_do_no_harm(load: Load) -> None:
    model = load(Toy.random(0), generation_config={"eos_token_id": [EOS, 9999], "suppress_tokens": [9999]})
    assert model.generate("a", max_new_tokens=3, min_new_tokens=3, seed=1).token_ids
