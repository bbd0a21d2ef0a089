"""How a request names its sampling rule."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE, RuleParameters


def test_the_code_of_each_rule_stays() -> None:
    names = "top_w, top_k, top_p, min_p, top_h, typical, epsilon, eta, top_n_sigma, p_less, min_k, none"
    assert ", ".join(RULES_BY_CODE[code].name for code in range(12)) == names == ", ".join(RULES)


@pytest.mark.parametrize(
    ("given", "rule", "values"),
    [
        ({}, "top_w", (0.0, 0.0)),
        ({"rule": "min_p", "min_p": 0.05}, "min_p", (0.05, 0.0)),
        ({"min_p": 0.05}, "min_p", (0.05, 0.0)),
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
def test_a_parameter_implies_its_rule(given: dict, rule: str, values: tuple[float, float]) -> None:
    parameters = RuleParameters(**given)
    assert parameters.chosen.name == rule
    assert RULES_BY_CODE[parameters.code].name == rule
    assert parameters.values == tuple(float(np.float32(value)) for value in values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rule": "min_p", "top_p": 0.9},
            "top_p is a parameter of the rule top_p, but the rule is min_p; leave it",
        ),
        ({"rule": "top_w", "top_p": 0.9}, "but the rule is top_w"),
        ({"min_p": 0.1, "top_p": 0.9}, "top_p and min_p are parameters of two sampling rules, but a row has one"),
        ({"rule": "min_p"}, r"the rule min_p needs min_p, in \[0, 1\]; give it"),
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
        ({"top_n_sigma": float("inf")}, "top_n_sigma is inf, but must be a finite number >= 0"),
        ({"top_n_sigma": 1e39}, "in float32 too"),
        ({"min_k_tau": float("nan")}, "min_k_tau is nan"),
    ],
)
def test_wrong_requests_name_the_value_and_the_bound(given: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        RuleParameters(**given)
