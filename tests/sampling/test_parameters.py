"""Parameter ranges and suggested names."""

import math

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import TopWOptions, TopWParameters
from topw_deploy.sampling.parameters import OPTION_NAMES, PARAMETER_NAMES, canonical_names


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("lam", -0.1, "finite number >= 0"),
        ("beta", math.inf, "finite number >= 0"),
        ("temperature", math.nan, "finite number >= 0"),
        ("selection_temperature", -1, "finite number >= 0"),
        ("init_top_p", 0, r"in \(0, 1\]"),
        ("init_top_p", 1.01, r"in \(0, 1\]"),
        ("geom_scale", -math.inf, "finite"),
        ("lam", 10**400, "finite number >= 0"),
        ("geom_scale", -(10**400), "finite"),
        ("lam", "much", "finite number >= 0"),
        ("lam", True, "finite number >= 0"),
        ("lam", np.array([1.0, 2.0]), "finite number >= 0"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_value_and_interval(name, value, bound):
    with pytest.raises(ParameterError, match=f"{name} is .*{bound}"):
        TopWParameters(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_m", 0), ("alt_iters", 1.5), ("knn_k", True), ("metric", "euclid"), ("potential", "farthest")],
)
def test_an_option_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(ParameterError, match=f"{name} is {value!r}"):
        TopWOptions(**{name: value})


def test_the_ends_of_every_interval_are_allowed():
    TopWParameters(lam=0, beta=0, temperature=0, selection_temperature=0, init_top_p=1, geom_scale=-5)
    TopWParameters(lam=np.float32(0.5))
    TopWOptions(top_m=1, alt_iters=1, knn_k=1)


def test_the_authors_names_are_accepted():
    assert canonical_names({"lambda_geom": 1.0, "warm_p": 0.9}) == {"lam": 1.0, "init_top_p": 0.9}
    assert canonical_names({"m": 50}, OPTION_NAMES) == {"top_m": 50}


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(ParameterError, match="unknown parameter 'bet': did you mean beta"):
        canonical_names({"bet": 1.0}, PARAMETER_NAMES)


def test_a_parameter_under_two_names_is_refused():
    with pytest.raises(ParameterError, match="lam is given twice"):
        canonical_names({"lam": 1.0, "lambda_geom": 2.0})
