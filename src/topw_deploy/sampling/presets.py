"""Presets of a request's parameters, and the unit of `geom_scale`. They set no option that an export fixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import IN_FLOAT32, PRESETS, TopWParameters, as_number, preset_values

GEOM_UNITS = ("raw", "median")
"""Units of `geom_scale`: per unit of the metric, or per median distance of likely pairs."""

LIVELY_DISTANCE = 1.5
"""The product of geom_scale and `typical_distance` under `lively`."""

# Selection temperature 1: at 1.5 the crop would often be the whole pool.
_LIVELY = TopWParameters(lam=1.0, beta=4.0, selection_temperature=1.0, init_top_p=0.3)

REQUEST_PRESETS: Mapping[str, str] = {
    "paper": "the paper's parameters, which keep few tokens and are nearly always certified",
    "creative": "the paper's creative setting: `paper` with beta 1.5+1.5*T, T the temperature",
    "lively": "parameters at which token geometry decides most crops (docs/lab/results.md)",
}
"""Name -> description in one line."""


_NOT_MEASURED = (
    "this export has no median distance of likely pairs, which its verification measures; export the model again "
    "without --no-verify, or give geom_scale with geom_unit raw"
)


def preset_parameters(name: str, metric: str, width: int | None) -> dict[str, Any]:
    """The six parameters of preset `name`, by name. A `beta` that depends on the temperature is text (`sampling.beta`).

    metric, width: the model's metric and embedding width. `mahalanobis` distances grow with the width, so `lively`
        divides its geom_scale by the typical distance.

    Raises ParameterError for an unknown name, listing the known ones, and for `lively` under `mahalanobis` without a
    width.
    """
    check_preset(name)
    if name in PRESETS:
        return preset_values(name)
    return asdict(replace(_LIVELY, geom_scale=LIVELY_DISTANCE / typical_distance(metric, width)))


def check_preset(name: object) -> str:
    """Return `name`. Raises ParameterError if it is not a preset."""
    if not isinstance(name, str) or name not in REQUEST_PRESETS:
        raise ParameterError(f"preset is {name!r:.60}, but must be one of {', '.join(REQUEST_PRESETS)}.")
    return name


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


def check_geom_unit(unit: object) -> str:
    """Return `unit`. Raises ParameterError if it is not one of GEOM_UNITS."""
    if not isinstance(unit, str) or unit not in GEOM_UNITS:
        raise ParameterError(f"geom_unit is {unit!r:.60}, but must be one of {', '.join(GEOM_UNITS)}.", "geom_unit")
    return unit


def with_raw_scale(stated: Mapping[str, Any], median: float | None, unknown: str = _NOT_MEASURED) -> Mapping[str, Any]:
    """Convert the geom_scale of `stated` to the metric's unit if its geom_unit is `median`; else return `stated`.

    stated: parameters by name, from one source: its geom_unit applies only to its own geom_scale.
    median: the median distance, or None if it is unknown.
    unknown: why `median` is None, and the next step, as a clause for the error message.

    Raises ParameterError for an unknown unit, a geom_unit without geom_scale, an unknown median, and a result beyond
    float32.
    """
    unit = stated.get("geom_unit")
    if unit is None or check_geom_unit(unit) == "raw":
        return stated
    if "geom_scale" not in stated:
        raise ParameterError(
            f"geom_unit is {unit!r}, but geom_scale is not given with it; give both together.",
            "geom_unit",
            "geom_scale",
        )
    if median is None:
        raise ParameterError(f"geom_unit is 'median', but {unknown}.", "geom_unit")
    geom_scale = as_number("geom_scale", stated["geom_scale"])
    raw = geom_scale / median
    if not abs(raw) <= float(np.finfo(np.float32).max):
        raise ParameterError(
            f"geom_scale is {geom_scale!r}, {raw:g} when divided by the median distance {median:g}, but must be finite "
            f"{IN_FLOAT32}.",
            "geom_scale",
        )
    return {**stated, "geom_scale": raw}
