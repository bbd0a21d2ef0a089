"""Presets of a request's parameters. They set no option that an export fixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import PRESETS, TopWParameters, preset_values

LIVELY_DISTANCE = 1.5
"""The product of geom_scale and `typical_distance` under `lively`."""

# Selection temperature 1: at 1.5 the crop would often be the whole pool.
_LIVELY = TopWParameters(lam=1.0, beta=4.0, selection_temperature=1.0, init_top_p=0.3)

REQUEST_PRESETS: Mapping[str, str] = {
    "paper": "the paper's parameters, which keep few tokens and are nearly always certified",
    "creative": "the paper's creative setting: `paper` with beta 1.5+1.5*T, T the temperature",
    "lively": "parameters at which token geometry decides most crops (docs/lab/lively.md)",
}
"""Name -> description in one line."""


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
