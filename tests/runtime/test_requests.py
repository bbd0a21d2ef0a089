"""Parameters of a request: precedence, `generation_config=`, `beta` by temperature, units, and refusals."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.editing import edit_json
from tests.support.prepared import prepare
from tests.support.toy_model import CONTEXT, EOS, PAD, VOCAB, Load, Toy, byte_ids, export
from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import SequenceParams
from topw_deploy.sampling import TopWOptions, TopWParameters, preset_parameters

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
    **{"bos_token_id": 1, "eos_token_id": [EOS, 7], "pad_token_id": PAD},
    **{"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05},
    **{"transformers_version": "5.0.0", "_from_model_config": True},
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
    with pytest.warns(UserWarning, match=r"num_beams=4, which has no effect here\.$"):  # no rule has it
        model.generate("ab", generation_config={"num_beams": 4})


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


@pytest.fixture
def untokenised(load: Load, monkeypatch: pytest.MonkeyPatch) -> TopWModel:
    """A model whose tokenizer must not be called."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = load(Toy.random(0), chat_template=template)

    def refuse(*given: Any) -> list[int]:
        raise AssertionError("tokenised before its length was checked")

    monkeypatch.setattr(model.tokenizer, "encode", refuse)
    return model


def test_a_long_text_is_refused_before_it_is_tokenised(untokenised: TopWModel) -> None:
    long = "word " * 10**5
    message = f"has 500,000 characters, more than 256 per token, the model's context holds {CONTEXT}; shorten it"
    for call in (untokenised.generate, untokenised.stream):
        with pytest.raises(PromptError, match="the prompt " + message):
            call(long)
        with pytest.raises(PromptError, match="prompt 0 " + message):
            call([long, "short"])
    for chat in (untokenised.chat, untokenised.stream_chat):
        with pytest.raises(PromptError, match="the prompt " + message):
            chat([{"role": "user", "content": long}])


def test_a_prompt_that_fills_the_context_is_never_refused(load: Load) -> None:
    model = load(Toy.random(0))
    for text in ("a" * CONTEXT, " " * CONTEXT, "é" * (CONTEXT // 2)):
        assert model.generate(text).prompt_tokens == CONTEXT
    short = TopWModel.from_pretrained(model.path, provider="cpu", max_length=16)
    with pytest.raises(PromptError, match="opened with max_length 16; shorten it, or open the model with more"):
        short.generate(byte_ids("a" * 17))
    with pytest.raises(PromptError, match=r"has 10,000 characters.*opened with max_length 16"):
        short.generate("a" * 10_000)


MEDIAN = 2.5


def rows(request: dict[str, Any], count: int = 1, **about: Any) -> list[TopWParameters]:
    about = {"exported": EXPORTED, "median_distance": MEDIAN, **about}
    return [sequence.params.top_w for sequence in prepare(request, [[5]] * count, **about)]


@pytest.mark.parametrize(
    ("request_", "model", "expected"),
    [
        ({"beta": "1.5+1.5*T"}, {}, 1.5 + 1.5 * 0.9),  # the export's temperature
        ({"beta": " 1.5 + 1.5*T ", "temperature": 2}, {}, 4.5),
        ({"beta": "1.5+1.5*T"}, {"temperature": 2.0}, 4.5),
        ({"temperature": 2.0}, {"beta": "1.5+1.5*T"}, 4.5),
        ({"beta": 3.0, "temperature": 2.0}, {"beta": "1.5+1.5*T"}, 3.0),
        ({"beta": "1.5+1.5*T", "do_sample": False}, {}, 1.5),
        ({"beta": "1.5+1.5*T", "do_sample": True}, {"temperature": 0.0}, 3.0),
        ({"beta": "1.5+1.5*T", "selection_temperature": 1.0, "temperature": 2.0}, {}, 4.5),
        ({"generation_config": {"beta": "2*T"}, "temperature": 0.5}, {}, 1.0),
        ({"preset": "creative", "temperature": 1.5}, {}, 3.75),
        ({"preset": "creative"}, {"temperature": 0.5}, 3.0),  # a preset states its temperature, 1
    ],
)
def test_beta_is_its_number_at_the_temperature_that_the_row_ends_up_with(
    request_: dict[str, Any], model: dict[str, Any], expected: float
) -> None:
    assert rows(request_, file=model)[0].beta == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"beta": "1.5+T"}, r"beta is '1.5\+T', but must be a finite number >= 0, or A\+B\*T"),
        ({"beta": "1.5-2*T"}, r"beta is '1.5-2\*T', -0.3 at temperature 0.9, but must be"),
        ({"beta": "1e39"}, "beta is 1e\\+39, but must be a finite number.* in float32"),
        ({"lam": "1+1*T"}, "lam is '1\\+1\\*T', but must be a finite number"),
        ({"generation_config": {"beta": "T"}}, "generation_config: beta is 'T', but must be"),
        ({"geom_unit": "median"}, "geom_unit is 'median', but geom_scale is not given with it"),
        ({"geom_scale": 1.5, "geom_unit": "mean"}, "geom_unit is 'mean', but must be one of raw, median"),
    ],
)
def test_text_that_is_no_beta_or_unit_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rows(request_)


@pytest.mark.parametrize(
    ("request_", "model", "expected"),
    [
        ({"geom_scale": 1.5, "geom_unit": "median"}, {}, 1.5 / MEDIAN),
        ({"geom_scale": 1.5, "geom_unit": "raw"}, {}, 1.5),
        ({}, {"geom_scale": 1.5, "geom_unit": "median"}, 1.5 / MEDIAN),
        ({"geom_scale": 1.5}, {"geom_scale": 2.0, "geom_unit": "median"}, 1.5),
        ({"generation_config": {"geom_scale": 1.5, "geom_unit": "median"}}, {"geom_scale": 2.0}, 1.5 / MEDIAN),
        ({"preset": "lively", "geom_scale": 1.5, "geom_unit": "median"}, {}, 1.5 / MEDIAN),
    ],
)
def test_a_unit_applies_to_the_scale_that_is_given_with_it(
    request_: dict[str, Any], model: dict[str, Any], expected: float
) -> None:
    assert rows(request_, file=model)[0].geom_scale == expected


def test_each_row_may_have_its_own_preset_beta_and_unit() -> None:
    request = {
        "preset": ["paper", None, None],
        "beta": [None, "2*T", None],
        "temperature": [None, 2.0, None],
        "geom_scale": [None, None, 1.5],
        "geom_unit": [None, None, "median"],
    }
    own = {"beta": 4.0, "temperature": 2.0}, {"geom_scale": 1.5 / MEDIAN}
    assert rows(request, 3) == [TopWParameters(), *(replace(EXPORTED, **changes) for changes in own)]


@pytest.mark.parametrize(
    ("scale", "median", "message"),
    [
        (1.5, None, "this export has no median distance of likely pairs"),
        (1e38, 0.01, r"geom_scale is 1e\+38, 1e\+40 when divided by"),
    ],
)
def test_a_unit_that_cannot_be_used_is_refused(scale: float, median: float | None, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rows({"geom_scale": scale, "geom_unit": "median"}, median_distance=median)


def opened(folder: Path, metric: str, **manifest: Any) -> TopWModel:
    """A model over a toy's export with beta 3 by default and fields of its manifest replaced."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric=metric))
    out = export(folder, toy, form="scatter", defaults=TopWParameters(beta=3.0))
    median = manifest.pop("median_distance", None)
    edit_json(out / MANIFEST_NAME, lambda data: data["verification"].update(median_distance=median), **manifest)
    return TopWModel.from_pretrained(out, provider="cpu", intra_op_num_threads=1)


WIDE: dict[str, Any] = {"lam": 0.5, "init_top_p": 0.3, "max_new_tokens": 12, "seed": 3, "eos_token_id": EOS}


def test_a_model_divides_the_scale_by_its_own_median_distance(tmp_path: Path) -> None:
    model = opened(tmp_path / "out", "mahalanobis", median_distance=MEDIAN)
    found = model.generate("abc", geom_scale=0.5, geom_unit="median", **WIDE)
    assert found.kept == model.generate("abc", geom_scale=0.5 / MEDIAN, **WIDE).kept
    assert found.kept != model.generate("abc", geom_scale=0.5, **WIDE).kept


def test_a_default_beta_of_the_manifest_follows_the_temperature(tmp_path: Path) -> None:
    model = opened(tmp_path / "out", "mahalanobis", default_beta="1.5+1.5*T")
    for temperature in (1.0, 2.0):
        given = {**WIDE, "lam": 1.5, "temperature": temperature}
        number = model.generate("abc", beta=1.5 + 1.5 * temperature, **given)
        assert model.generate("abc", **given).kept == number.kept
        assert model.generate("abc", beta="1.5+1.5*T", **given).token_ids == number.token_ids
    assert number.kept != model.generate("abc", beta=3.0, **given).kept
    with Engine(model) as engine:
        assert engine.submit("abc", **given).result(60).kept == number.kept
