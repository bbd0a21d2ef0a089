"""Parameters of a request, options fixed by an export, and accepted names."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.beta import beta_at

METRICS = ("mahalanobis", "unit", "cosine", "uniform")
POTENTIALS = ("nearest", "knn")
GREEDY_BELOW = 9.999999747378752e-06  # 1e-5 in float32; below it, a temperature means argmax

ALIASES = {"lambda_geom": "lam", "warm_p": "init_top_p", "m": "top_m"}
"""Name in the authors' released code -> name here."""

IN_FLOAT32 = "in float32 too, which holds magnitudes from 1.4e-45 to 3.4e+38"
"""The end of a message about a value that leaves its interval when rounded to float32."""


def as_number(name: str, value: object) -> float:
    """Convert the value of the parameter `name` to a float; an integer beyond float64 becomes inf or -inf.

    Raises ParameterError for anything but a number.
    """
    if not isinstance(value, bool) and hasattr(value, "__float__"):  # numpy's scalars have it, strings do not
        with contextlib.suppress(TypeError, ValueError):  # arrays and tensors have it too, but raise
            try:
                return float(value)
            except OverflowError:  # an integer beyond float64
                return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    raise ParameterError(f"{name} is {value!r}, but must be a number.", name)


def check_range(name: str, value: float, rounded: float | None = None) -> None:
    """Raises ParameterError unless `value` is in the range of the parameter `name`.

    rounded: `value` rounded to float32, checked in its place; the message quotes `value`.
    """
    holds, bound = _RANGES[name]
    number = as_number(name, value)
    if rounded is not None and holds(number):
        bound = f"{bound} {IN_FLOAT32}"
    _require(name, value, holds(number if rounded is None else rounded), bound)


def _require(name: str, value: object, holds: bool, bound: str) -> None:
    if not holds:
        raise ParameterError(f"{name} is {value!r}, but must be {bound}.", name)


def _is_finite_and_not_negative(value: float) -> bool:
    return 0 <= value < math.inf


_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "lam": (_is_finite_and_not_negative, "a finite number >= 0"),
    "beta": (_is_finite_and_not_negative, "a finite number >= 0"),
    "temperature": (_is_finite_and_not_negative, "a finite number >= 0"),
    "selection_temperature": (_is_finite_and_not_negative, "a finite number >= 0"),
    "init_top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "geom_scale": (math.isfinite, "finite"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopWParameters:
    """Parameters of a row; the graph takes each as float32 [batch].

    lam: weight of the entropy term, >= 0.
    beta: weight of the log-mass reward, >= 0; text such as "1.5+1.5*T" is evaluated at `temperature` (`sampling.beta`).
    temperature: sampling temperature T >= 0; below 1e-5 the row is greedy.
    selection_temperature: temperature for choosing the crop, >= 0; 0 means `temperature`.
    init_top_p: mass of the nucleus warm start relative to the pool's mass, in (0, 1].
    geom_scale: factor on distances, finite; a negative one is the paper's repulsive variant.

    Raises ParameterError with the parameter's name, value and interval.
    """

    lam: float = 2.2
    beta: float = 2.8
    temperature: float = 1.0
    selection_temperature: float = 0.0
    init_top_p: float = 0.999
    geom_scale: float = 1.0

    def __post_init__(self) -> None:
        beta: object = self.beta
        if isinstance(beta, str):
            check_range("temperature", self.temperature)
            object.__setattr__(self, "beta", beta_at(beta, 0.0 if self.greedy else self.temperature))
        for name in _RANGES:
            check_range(name, getattr(self, name))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class TopWOptions:
    """Options that an export fixes.

    top_m: candidate pool size, >= 1; cut to the vocabulary.
    alt_iters: maximum number of alternations, >= 1.
    metric: token distance, one of METRICS.
    potential: distance to a set: `nearest` (the smallest) or `knn` (mean of the knn_k smallest).
    knn_k: number of neighbours for `knn`, >= 1.

    Raises ParameterError with the option's name, its value and the allowed values.
    """

    top_m: int = 1200
    alt_iters: int = 3
    metric: str = "mahalanobis"
    potential: str = "nearest"
    knn_k: int = 4

    def __post_init__(self) -> None:
        for name in ("top_m", "alt_iters", "knn_k"):
            value = getattr(self, name)
            _require(
                name, value, isinstance(value, int) and not isinstance(value, bool) and value >= 1, "an integer >= 1"
            )
        _require("metric", self.metric, self.metric in METRICS, f"one of {', '.join(METRICS)}")
        _require("potential", self.potential, self.potential in POTENTIALS, f"one of {', '.join(POTENTIALS)}")

    @property
    def neighbours(self) -> int:
        """The graph's attribute `knn_k`: 0 for `nearest`."""
        return self.knn_k if self.potential == "knn" else 0


_BETA_TEXTS: Mapping[str, Any] = {"creative": "1.5+1.5*T"}  # for presets whose beta depends on the temperature

PRESETS: Mapping[str, tuple[TopWParameters, TopWOptions]] = {
    "paper": (TopWParameters(), TopWOptions()),
    "released": (TopWParameters(geom_scale=0.6), TopWOptions(alt_iters=9, metric="cosine")),
    "creative": (TopWParameters(beta=_BETA_TEXTS["creative"]), TopWOptions()),
}
"""Name of an export's preset -> (its parameters, its options). `beta` is evaluated at the preset's temperature."""


def preset_values(name: str) -> dict[str, Any]:
    """The parameters of a preset in PRESETS, by name. A `beta` that depends on the temperature stays text."""
    return {**asdict(PRESETS[name][0]), **({"beta": _BETA_TEXTS[name]} if name in _BETA_TEXTS else {})}


PARAMETER_NAMES = tuple(f.name for f in fields(TopWParameters))
OPTION_NAMES = tuple(f.name for f in fields(TopWOptions))


def canonical_names(given: Mapping[str, Any], known: Iterable[str] = PARAMETER_NAMES) -> dict[str, Any]:
    """Replace the authors' aliases in `given` by the names used here.

    Raises ParameterError for a name outside `known`, listing the known ones, and for a parameter given under two names.
    """
    known = tuple(known)
    used: dict[str, str] = {}
    for name in given:
        ours = ALIASES.get(name, name)
        if ours not in known:
            raise unknown_name(name, known)
        if ours in used:
            raise ParameterError(f"{ours} is given twice, as {used[ours]} and as {name}; give it once.", ours)
        used[ours] = name
    return {ours: given[name] for ours, name in used.items()}


def unknown_name(name: str, known: Iterable[str]) -> ParameterError:
    """The error for an unknown parameter, suggesting the nearest known name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return ParameterError(f"unknown parameter {name!r}: {hint}known are {', '.join(known)}.")
