"""`beta` as a function of the temperature, such as "1.5+1.5*T", the paper's creative setting."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.text import short_repr

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


METRICS = ("mahalanobis", "unit", "cosine", "uniform")
POTENTIALS = ("nearest", "knn")
GREEDY_BELOW = 9.999999747378752e-06  # 1e-5 in float32; below it, a temperature means argmax

ALIASES = {"lambda_geom": "lam", "warm_p": "init_top_p", "m": "top_m"}
"""Name in the authors' released code -> name here."""

IN_FLOAT32 = "in float32 too, which holds magnitudes from 1.4e-45 to 3.4e+38"
"""The end of a message about a value that leaves its interval when rounded to float32."""


def read_number(name: str, value: object, holds: Callable[[float], bool], bound: str) -> float:
    """The value of the parameter `name` as a float. Raises ParameterError unless it is a number that `holds`, in
    float32 too.

    bound: the interval, for the message.
    """
    number = math.nan
    if not is_boolean(value) and hasattr(value, "__float__"):  # numpy's scalars have it, strings do not
        with contextlib.suppress(TypeError, ValueError):  # arrays and tensors have it too, but raise
            try:
                number = float(value)
            except OverflowError:  # an integer beyond float64
                number = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if not holds(number) or not holds(ctypes.c_float(number).value):
        raise ParameterError(
            f"{name} is {short_repr(value)}, but must be {bound}{f' {IN_FLOAT32}' if holds(number) else ''}.", name
        )
    return number


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value`. Raises ParameterError if it is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ParameterError(f"{name} is {value!r:.60}, but must be one of {', '.join(choices)}.", name)
    return value


def is_boolean(value: object) -> bool:
    """Whether `value` is a boolean of Python, numpy or torch, which Python counts as a number."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def _is_finite_and_not_negative(value: float) -> bool:
    return 0 <= value < math.inf


RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "lam": (_is_finite_and_not_negative, "a finite number >= 0"),
    "beta": (_is_finite_and_not_negative, "a finite number >= 0"),
    "temperature": (_is_finite_and_not_negative, "a finite number >= 0"),
    "selection_temperature": (_is_finite_and_not_negative, "a finite number >= 0"),
    "init_top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "geom_scale": (math.isfinite, "a finite number"),
}
"""Name of a parameter -> (whether a number is in its range, the range for messages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopWParameters:
    """Parameters of a row; the graph takes each as float32 [batch].

    lam: weight of the entropy term, >= 0.
    beta: weight of the log-mass reward, >= 0; text such as "1.5+1.5*T" is evaluated at `temperature` (`beta_at`).
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
            read_number("temperature", self.temperature, *RANGES["temperature"])
            object.__setattr__(self, "beta", beta_at(beta, 0.0 if self.greedy else self.temperature))
        for name, (holds, bound) in RANGES.items():
            read_number(name, getattr(self, name), holds, bound)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def as_float32(parameters: TopWParameters | Mapping[str, float]) -> TopWParameters:
    """Round parameters to float32, as a graph receives them. Missing names get defaults.

    Raises ParameterError for a number out of range.
    """
    given = parameters if isinstance(parameters, TopWParameters) else TopWParameters(**parameters)
    return TopWParameters(**{name: ctypes.c_float(value).value for name, value in asdict(given).items()})


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
        check_choice("metric", self.metric, METRICS)
        check_choice("potential", self.potential, POTENTIALS)
        for name in ("top_m", "alt_iters", "knn_k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ParameterError(f"{name} is {value!r}, but must be an integer >= 1.", name)

    @property
    def neighbours(self) -> int:
        """The graph's attribute `knn_k`: 0 for `nearest`."""
        return self.knn_k if self.potential == "knn" else 0


_BETA_TEXTS: Mapping[str, Any] = {"creative": "1.5+1.5*T"}  # for presets whose beta depends on the temperature

LIVELY = "lively"
LIVELY_DISTANCE = 1.5
"""The product of geom_scale and `typical_distance` under `lively`."""

PRESETS: Mapping[str, tuple[TopWParameters, TopWOptions]] = {
    "paper": (TopWParameters(), TopWOptions()),
    "released": (TopWParameters(geom_scale=0.6), TopWOptions(alt_iters=9, metric="cosine")),
    "creative": (TopWParameters(beta=_BETA_TEXTS["creative"]), TopWOptions()),
    # Selection temperature 1: at 1.5 the kept set would often be the whole pool.
    LIVELY: (
        TopWParameters(lam=1.0, beta=4.0, selection_temperature=1.0, init_top_p=0.3, geom_scale=LIVELY_DISTANCE),
        TopWOptions(),
    ),
}
"""Name -> (parameters, options). `beta` is evaluated at the preset's temperature; the geom_scale of LIVELY is per
`typical_distance`. Only an export can set the options."""


def preset_values(name: str) -> dict[str, Any]:
    """The parameters of a preset, as in PRESETS, by name. A `beta` that depends on the temperature stays text."""
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
    return ParameterError(f"unknown parameter {name!r}: {known_clause(name, sorted(known))}.")


def known_clause(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, and all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"{f'did you mean {close[0]}? ' if close else ''}known are {', '.join(known)}"


GEOM_UNITS = ("raw", "median")
"""Units of `geom_scale`: per unit of the metric, or per median distance of likely pairs."""

_NOT_MEASURED = (
    "this export has no median distance of likely pairs, which its verification measures; export the model again "
    "without --no-verify, or give geom_scale with geom_unit raw"
)


def preset_parameters(name: str, metric: str, width: int | None) -> dict[str, Any]:
    """The six parameters of preset `name`, by name. A `beta` that depends on the temperature is text (`beta_at`).

    metric, width: the model's metric and embedding width. `mahalanobis` distances grow with the width, so `lively`
        divides its geom_scale by the typical distance.

    Raises ParameterError for an unknown name, listing the known ones, for `released` under another metric than its own,
    and for `lively` under `mahalanobis` without a width.
    """
    check_choice("preset", name, PRESETS)
    if name == "released" and metric != PRESETS[name][1].metric:
        raise ParameterError(
            f"preset is {name!r}, which needs the metric cosine, but this model has {metric}; export it with --preset "
            f"{name}.",
            "preset",
        )
    values = preset_values(name)
    return {**values, "geom_scale": LIVELY_DISTANCE / typical_distance(metric, width)} if name == LIVELY else values


def typical_distance(metric: str, width: int | None) -> float:
    """The typical distance between two tokens whose features are uncorrelated.

    Under `mahalanobis`, each coordinate of the features has a mean square of 1, so the distance is sqrt(2 width).
    `unit` and `cosine` normalise features: sqrt(2) and 1. `uniform` has only the distance 1.

    Raises ParameterError for `mahalanobis` without a width.
    """
    if metric == "mahalanobis":
        if width is None:
            raise ParameterError("width is None, but the distance mahalanobis grows with the embedding width; give it.")
        return math.sqrt(2 * width)
    return math.sqrt(2) if metric == "unit" else 1.0


def with_raw_scale(stated: Mapping[str, Any], median: float | None, unknown: str = _NOT_MEASURED) -> Mapping[str, Any]:
    """Convert the geom_scale of `stated` to the metric's unit if its geom_unit is `median`; else return `stated`.

    stated: parameters by name, from one source: its geom_unit applies only to its own geom_scale.
    median: the median distance, or None if it is unknown.
    unknown: why `median` is None, and the next step, as a clause for the error message.

    Raises ParameterError for an unknown unit, a geom_unit without geom_scale, an unknown median, and a result beyond
    float32.
    """
    unit = stated.get("geom_unit")
    if unit is None or check_choice("geom_unit", unit, GEOM_UNITS) == "raw":
        return stated
    if "geom_scale" not in stated:
        raise ParameterError(
            f"geom_unit is {unit!r}, but geom_scale is not given with it; give both together.",
            "geom_unit",
            "geom_scale",
        )
    if median is None:
        raise ParameterError(f"geom_unit is 'median', but {unknown}.", "geom_unit")
    geom_scale = read_number("geom_scale", stated["geom_scale"], *RANGES["geom_scale"])
    raw = geom_scale / median
    if abs(raw) > _LARGEST_FLOAT32:
        raise ParameterError(
            f"geom_scale is {geom_scale!r}, {raw:g} when divided by the median distance {median:g}, but must be finite "
            f"{IN_FLOAT32}.",
            "geom_scale",
        )
    return {**stated, "geom_scale": raw}
