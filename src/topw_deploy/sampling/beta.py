"""`beta` as a function of the temperature, such as "1.5+1.5*T", the paper's creative setting."""

from __future__ import annotations

import math
import re

from topw_deploy.errors import ParameterError

_MOST_CHARACTERS = 80  # characters
_LARGEST_FLOAT32 = 3.4028234663852886e38  # float32
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_CONSTANT = re.compile(rf"({_NUMBER})")
_LINEAR = re.compile(rf"(?:({_NUMBER})\s*([+-])\s*)?({_NUMBER})\s*\*\s*T", re.ASCII)


def beta_coefficients(text: str) -> tuple[float, float]:
    """Parse the beta `text`. Returns (a, b): beta is a + b T at temperature T.

    text: "A", "B*T", "A+B*T" or "A-B*T" with numbers A, B >= 0; spaces are allowed around operators.

    Raises ParameterError for any other text.
    """
    stripped = text.strip() if len(text) <= _MOST_CHARACTERS else ""
    if constant := _CONSTANT.fullmatch(stripped):
        a, b = float(constant[1]), 0.0
    elif linear := _LINEAR.fullmatch(stripped):
        a = float(linear[1] or 0.0)
        b = float(linear[3]) * (-1.0 if linear[2] == "-" else 1.0)
    else:
        a = b = math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ParameterError(
            f"beta is {text!r:.60}, but must be a finite number >= 0, or A+B*T, A-B*T or B*T with such numbers A and B "
            "and the temperature T, for example 1.5+1.5*T.",
            "beta",
        )
    return a, b


def depends_on_temperature(beta: object) -> bool:
    """Whether `beta` is text that contains T with a factor other than 0. Raises the errors of `beta_coefficients`."""
    return isinstance(beta, str) and beta_coefficients(beta)[1] != 0


def beta_at(text: str, temperature: float) -> float:
    """Evaluate the beta `text` at `temperature`, to a finite number >= 0.

    Raises the errors of `beta_coefficients`, and ParameterError for a result that is negative or beyond float32.
    """
    a, b = beta_coefficients(text)
    value = a + b * temperature
    if not 0 <= value <= _LARGEST_FLOAT32:
        raise ParameterError(
            f"beta is {text!r}, {value:g} at temperature {temperature:g}, but must be a finite number >= 0, in float32 "
            "too; change it or the temperature.",
            "beta",
        )
    return value
