"""Checks of times given in seconds."""

from __future__ import annotations

import math
import threading

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import is_boolean
from topw_deploy.text import short_repr


def read_max_time(value: object) -> float | None:
    """Returns `max_time` in seconds, or None. Raises ParameterError unless it is None or a finite number > 0."""
    seconds = _as_float(value)
    if value is not None and not 0 < seconds < math.inf:
        raise ParameterError(
            f"max_time is {short_repr(value)}, but must be a finite number of seconds > 0.", "max_time"
        )
    return None if value is None else seconds


def read_timeout(value: object) -> float | None:
    """Returns a timeout in seconds that Python's locks accept, or None. Infinity is allowed.

    Raises ParameterError unless it is None or a number.
    """
    seconds = _as_float(value)
    if value is not None and math.isnan(seconds):
        raise ParameterError(f"timeout is {short_repr(value)}, but must be a number of seconds or None.", "timeout")
    return None if value is None else waitable(seconds)


def waitable(seconds: float) -> float:
    """Clips `seconds` to what Python's locks accept: 0 to about 292 years."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _as_float(value: object) -> float:
    """The value as a float; NaN if it is not a number."""
    if is_boolean(value) or not isinstance(value, (int, float, np.integer, np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer above the largest float
        return math.inf
