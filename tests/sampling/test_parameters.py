"""Names, ranges, presets and texts of parameters, for Top-W and for the other rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, crop, preset_parameters
from topw_deploy.sampling.parameters import (
    OPTION_NAMES,
    PARAMETER_NAMES,
    beta_at,
    beta_coefficients,
    canonical_names,
    depends_on_temperature,
    typical_distance,
)
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE, RuleParameters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lam": -0.1}, "lam is -0.1.*finite number >= 0"),
        ({"beta": math.inf}, "beta is inf.*finite number >= 0"),
        ({"temperature": math.nan}, "temperature is nan.*finite number >= 0"),
        ({"selection_temperature": -1}, "selection_temperature is -1.*finite number >= 0"),
        ({"init_top_p": 0}, r"init_top_p is 0.*in \(0, 1\]"),
        ({"init_top_p": 1.01}, r"init_top_p is 1.01.*in \(0, 1\]"),
        ({"geom_scale": -math.inf}, "geom_scale is -inf.*finite"),
        ({"lam": 10**400}, "lam is .*finite number >= 0"),
        ({"geom_scale": -(10**400)}, "geom_scale is .*finite"),
        ({"lam": "much"}, "lam is 'much'.*finite number >= 0"),
        ({"lam": True}, "lam is True.*finite number >= 0"),
        ({"lam": np.array([1.0, 2.0])}, "lam is .*finite number >= 0"),
        ({"lam": 1e300}, r"^lam is 1e\+300, but .* in float32 too, which holds magnitudes from 1.4e-45"),
        ({"geom_scale": -1e39}, r"^geom_scale is -1e\+39, but must be .* in float32 too"),
        ({"init_top_p": 1e-60}, "^init_top_p is 1e-60, but must be .* in float32 too"),
        ({"beta": "1.5-2*T"}, r"beta is '1.5-2\*T', -0.5 at temperature 1, but must be a finite number"),
        ({"beta": "1e38+1e38*T", "temperature": 5.0}, r"6e\+38 at temperature 5, but must be .* in float32"),
        ({"beta": "1.5+1.5*T", "temperature": math.nan}, "temperature is nan"),
        ({"top_m": 0}, "top_m is 0"),
        ({"alt_iters": 1.5}, "alt_iters is 1.5"),
        ({"knn_k": True}, "knn_k is True"),
        ({"metric": "euclid"}, "metric is 'euclid'"),
        ({"potential": "farthest"}, "potential is 'farthest'"),
        ({"rule": "min_p", "top_p": 0.9}, "top_p is for rule='top_p', but another rule was chosen, 'min_p'; give"),
        ({"rule": "top_w", "top_p": 0.9}, "but another rule was chosen, 'top_w'"),
        ({"min_p": 0.1, "top_p": 0.9}, "top_p and min_p are parameters of two sampling rules, but a row has one"),
        ({"rule": "min_p"}, r"the rule 'min_p' has no default; give min_p, in \[0, 1\]"),
        ({"rule": "minp"}, "rule is 'minp': did you mean min_p"),
        ({"rule": 3}, "rule is 3: known are top_w, top_k"),
        ({"top_k": 0}, r"top_k is 0, but must be an integer in 1..16777216"),
        ({"top_k": 2.5}, "top_k is 2.5, but must be an integer"),
        ({"top_k": True}, "top_k is True, but must be an integer"),
        ({"top_p": 0.0}, r"top_p is 0.0, but must be in \(0, 1\]"),
        ({"top_p": "0.9"}, r"top_p is '0.9', but must be in \(0, 1\]"),
        ({"typical_p": 1.0}, r"typical_p is 1.0, but must be in \(0, 1\)"),
        ({"typical_p": 1 - 1e-9}, r"typical_p is 0.999999999, but must be in \(0, 1\) in float32 too"),
        ({"epsilon_cutoff": 1e-50}, "in float32 too"),
        ({"top_n_sigma": math.inf}, "top_n_sigma is inf, but must be a finite number >= 0"),
        ({"top_n_sigma": 1e39}, "in float32 too"),
        ({"min_k_tau": math.nan}, "min_k_tau is nan"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_value_and_its_bound(given: dict[str, Any], message: str) -> None:
    kind: Any = RuleParameters
    if given.keys() <= {*PARAMETER_NAMES, *OPTION_NAMES}:
        kind = TopWParameters if given.keys() <= {*PARAMETER_NAMES} else TopWOptions
    with pytest.raises(ParameterError, match=message):
        kind(**given)


def test_the_ends_of_every_interval_are_allowed() -> None:
    TopWParameters(lam=0, beta=0, temperature=0, selection_temperature=0, init_top_p=1, geom_scale=-5)
    TopWParameters(lam=np.float32(0.5))
    TopWOptions(top_m=1, alt_iters=1, knn_k=1)


def test_names_may_be_the_authors_and_none_is_unknown_or_given_twice() -> None:
    assert canonical_names({"lambda_geom": 1.0, "warm_p": 0.9}) == {"lam": 1.0, "init_top_p": 0.9}
    assert canonical_names({"m": 50}, OPTION_NAMES) == {"top_m": 50}
    with pytest.raises(ParameterError, match="unknown parameter 'bet': did you mean beta"):
        canonical_names({"bet": 1.0}, PARAMETER_NAMES)
    with pytest.raises(ParameterError, match="lam is given twice"):
        canonical_names({"lam": 1.0, "lambda_geom": 2.0})


# beta as text that depends on the temperature


@pytest.mark.parametrize(
    ("text", "a", "b"),
    [
        ("1.5+1.5*T", 1.5, 1.5),
        (" 1.5 + 1.5 * T ", 1.5, 1.5),
        ("4-0.5*T", 4.0, -0.5),
        ("2*T", 0.0, 2.0),
        ("2.8", 2.8, 0.0),
        (".5+2.*T", 0.5, 2.0),
        ("1e-1+2E+1*T", 0.1, 20.0),
        ("3\t+\n1*T", 3.0, 1.0),
        ("0+0*T", 0.0, 0.0),
    ],
)
def test_the_accepted_forms_and_their_numbers(text: str, a: float, b: float) -> None:
    assert beta_coefficients(text) == (a, b)
    assert depends_on_temperature(text) == (b != 0)
    for temperature in (0.5, 1.0, 1.5, 2.0):
        assert beta_at(text, temperature) == a + b * temperature
        assert TopWParameters(beta=text, temperature=temperature).beta == a + b * temperature  # type: ignore[arg-type]
    for cold in (0.0, 1e-6):  # greedy rows take it at temperature 0
        assert TopWParameters(beta=text, temperature=cold).beta == a  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", " ", "T", "1.5+T", "1.5+1.5*t", "1.5+1.5T", "1.5*T+1.5", "-1+2*T", "1.5+-1.5*T", "1.5+1.5*T*T", "1.5 1.5*T",
     "(1.5)", "1,5+1*T", "1.5+1.5**T", "nan", "inf", "1e999+1*T", "1e999", "0x10", "1_0", "٣+1*T", "__import__('os')",
     "1+1*T;", "1 . 5", "1" * 81 + "+1*T"],
)  # fmt: skip
def test_any_other_text_is_refused_with_the_accepted_forms(text: str) -> None:
    for read in (beta_coefficients, lambda text: beta_at(text, 1.0), lambda text: TopWParameters(beta=text)):
        with pytest.raises(ParameterError, match=r"beta is .*, but must be a finite number >= 0, or A\+B\*T"):
            read(text)


def test_every_linear_function_survives_being_written_and_read() -> None:
    rng = np.random.default_rng(0)
    for a, b, t in rng.exponential(3, size=(200, 3)).tolist():
        assert beta_at(f"{a!r} + {b!r} * T", t) == a + b * t
        assert beta_at(f"{a + b * t!r}-{b!r}*T", t) == a + b * t - b * t


# The rule of a request


def test_the_code_of_each_rule_stays() -> None:
    names = "top_w, top_k, top_p, min_p, top_h, typical, epsilon, eta, top_n_sigma, p_less, min_k, none"
    assert ", ".join(RULES_BY_CODE[code].name for code in range(12)) == names == ", ".join(RULES)


@pytest.mark.parametrize(
    ("given", "rule", "values"),
    [
        ({}, "top_w", (0.0, 0.0)),
        ({"rule": "min_p", "min_p": 0.05}, "min_p", (0.05, 0.0)),
        ({"min_p": 0.05, "top_p": None}, "min_p", (0.05, 0.0)),
        ({"top_k": 50}, "top_k", (50.0, 0.0)),
        ({"top_k": np.int64(1 << 24)}, "top_k", (float(1 << 24), 0.0)),
        ({"rule": "top_h"}, "top_h", (0.4, 100.0)),
        ({"top_h_pool": 50}, "top_h", (0.4, 50.0)),
        ({"rule": "top_n_sigma"}, "top_n_sigma", (1.0, 0.0)),
        ({"rule": "min_k"}, "min_k", (3.0, 0.0)),
        ({"rule": "p_less"}, "p_less", (0.0, 0.0)),
        ({"rule": "none"}, "none", (0.0, 0.0)),
    ],
)
def test_a_parameter_implies_its_rule(given: dict[str, Any], rule: str, values: tuple[float, float]) -> None:
    parameters = RuleParameters(**given)
    assert parameters.chosen.name == rule
    assert RULES_BY_CODE[parameters.code].name == rule
    assert parameters.values == tuple(float(np.float32(value)) for value in values)


# Presets


def test_the_preset_paper_is_the_defaults_and_an_unknown_one_is_refused() -> None:
    assert TopWParameters(**preset_parameters("paper", "mahalanobis", 64)) == TopWParameters()
    with pytest.raises(ParameterError, match="preset is 'livley', but must be one of paper, released"):
        preset_parameters("livley", "uniform", None)


def test_a_request_can_have_the_released_parameters_only_with_the_released_metric() -> None:
    assert TopWParameters(**preset_parameters("released", "cosine", 64)) == TopWParameters(geom_scale=0.6)
    with pytest.raises(
        ParameterError, match="needs the metric cosine, but this model has unit; export it with --preset"
    ):
        preset_parameters("released", "unit", 64)


@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_tokens_with_independent_features_are_at_the_typical_distance(metric: str, width: int) -> None:
    table = np.random.default_rng(0).normal(size=(400, width)).astype(np.float32)
    distances = Geometry.from_embeddings(table, metric).distances(np.arange(200), np.arange(200, 400))
    root_mean_square = math.sqrt(np.square(distances).mean())
    assert root_mean_square == pytest.approx(typical_distance(metric, width), rel=0.05)


def test_a_distance_that_grows_with_the_width_needs_it() -> None:
    assert typical_distance("uniform", None) == 1.0
    with pytest.raises(ParameterError, match="width is None, but the distance mahalanobis grows"):
        typical_distance("mahalanobis", None)


def test_the_crop_of_lively_does_not_depend_on_the_draws_temperature() -> None:
    logits = np.random.default_rng(1).normal(size=300).astype(np.float32) * 3
    geometry = Geometry.from_embeddings(np.random.default_rng(2).normal(size=(300, 8)), "mahalanobis")
    lively = preset_parameters("lively", "mahalanobis", 8)
    crops = [
        crop(logits, TopWParameters(**lively | {"temperature": t}), TopWOptions(), geometry).kept.tolist()
        for t in (0.5, 1.0, 2.0)
    ]
    assert crops[0] == crops[1] == crops[2]
    assert 1 < len(crops[0]) < 300


def test_under_lively_geometry_passes_over_a_far_token_for_a_less_likely_near_one() -> None:
    """Tokens: likeliest, distant, a less likely near-duplicate of the first, unlikely."""
    table = np.array([[5.0, 0.0], [-5.0, 1.0], [5.0, 0.1], [0.0, -5.0]], np.float32)
    logits = np.log(np.array([0.6, 0.05, 0.04, 0.0001], np.float32))
    geometry = Geometry.from_embeddings(table, "cosine")
    lively = TopWParameters(**preset_parameters("lively", "cosine", 2))
    found = crop(logits, lively, TopWOptions(metric="cosine"), geometry)
    assert (found.kept.tolist(), found.certified) == ([0, 2], False)
    assert crop(logits, TopWParameters(), TopWOptions(metric="cosine"), geometry).kept.tolist() == [0]
