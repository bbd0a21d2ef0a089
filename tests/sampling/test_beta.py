"""`beta` as text that depends on the temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import TopWParameters
from topw_deploy.sampling.parameters import beta_at, beta_coefficients, depends_on_temperature


def parameters(beta: Any, temperature: float = 1.0) -> TopWParameters:
    return TopWParameters(beta=beta, temperature=temperature)


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
    assert beta_at(text, 0.5) == a + b * 0.5


@pytest.mark.parametrize(
    "text",
    ["", " ", "T", "1.5+T", "1.5+1.5*t", "1.5+1.5T", "1.5*T+1.5", "-1+2*T", "1.5+-1.5*T", "1.5+1.5*T*T", "1.5 1.5*T",
     "(1.5)", "1,5+1*T", "1.5+1.5**T", "nan", "inf", "1e999+1*T", "1e999", "0x10", "1_0", "٣+1*T", "__import__('os')",
     "1+1*T;", "1 . 5", "1" * 81 + "+1*T"],
)  # fmt: skip
def test_any_other_text_is_refused_with_the_accepted_forms(text: str) -> None:
    for read in (beta_coefficients, lambda text: beta_at(text, 1.0), parameters):
        with pytest.raises(ParameterError, match=r"beta is .*, but must be a finite number >= 0, or A\+B\*T"):
            read(text)


def test_every_linear_function_survives_being_written_and_read() -> None:
    rng = np.random.default_rng(0)
    for a, b, t in rng.exponential(3, size=(200, 3)).tolist():
        assert beta_at(f"{a!r} + {b!r} * T", t) == a + b * t
        assert beta_at(f"{a + b * t!r}-{b!r}*T", t) == a + b * t - b * t


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5, 2.0])
def test_parameters_hold_the_number_at_their_temperature(temperature: float) -> None:
    assert parameters("1.5+1.5*T", temperature) == parameters(1.5 + 1.5 * temperature, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_a_greedy_row_takes_beta_at_temperature_zero(temperature: float) -> None:
    assert parameters("1.5+1.5*T", temperature).beta == 1.5
    assert parameters("0-1*T", temperature).beta == 0.0


def test_a_beta_out_of_range_is_named_with_its_text_number_and_temperature() -> None:
    with pytest.raises(ParameterError, match=r"beta is '1.5-2\*T', -0.5 at temperature 1, but must be a finite number"):
        parameters("1.5-2*T")
    with pytest.raises(ParameterError, match=r"6e\+38 at temperature 5, but must be .* in float32"):
        parameters("1e38+1e38*T", 5.0)
    with pytest.raises(ParameterError, match="temperature is nan"):
        parameters("1.5+1.5*T", float("nan"))
