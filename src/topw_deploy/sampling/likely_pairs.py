"""A model's median distance of likely pairs, the unit of `geom_scale` under `geom_unit="median"`.

Distances depend on the metric, the embedding width and the table. The median makes them comparable between models
(docs/contract/graph.md, section 2). It is measured over the decode steps of the first and the last tokens of
SAMPLE_TEXT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import Floats, Ids
from topw_deploy.sampling.parameters import IN_FLOAT32

GEOM_UNITS = ("raw", "median")
"""Units of `geom_scale`: per unit of the metric, or per median distance of likely pairs."""

LIKELY_TOKENS = 64
"""The number of likeliest tokens of a step whose pairs are counted."""

LIKELY_TEXT_TOKENS = 64
"""The largest number of tokens in each text, including the tokenizer's leading special tokens."""

SAMPLE_TEXT = """\
The river had been rising since noon. By four o'clock it had covered the stepping stones below the mill, and
the children who crossed there on their way home from school were sent round by the bridge. Nobody was alarmed: it
rose every spring when the snow went, and every spring it fell again within a week. Old Martha, who had kept a record
of the height in chalk on the wall of her cellar for thirty-one years, said that it had been higher in eleven of them.

What was different this time was the sound. Water that runs over stones makes a bright, broken noise; this was one low
note, steady as an organ pipe, and it came from somewhere under the embankment. The engineer whom the county sent
listened to it for a long time. He measured 2.4 metres at the gauge, then 2.6 an hour later, wrote both numbers down,
and asked for sandbags.

To sort a list of records by two keys, sort by the second key first and then by the first, because the sort is stable:

def by_name_then_age(records):
    records = sorted(records, key=lambda r: r.age)
    return sorted(records, key=lambda r: r.name)

The same can be written with one key function that returns a tuple. If an exception is raised while a key is computed,
the list is left unchanged. The function returns None for an empty sequence and raises ValueError if the size of the
step is zero or negative.
"""
"""Prose and code on which the median is measured."""

_NOT_MEASURED = (
    "this export has no median distance of likely pairs, which its verification measures; export the model again "
    "without --no-verify, or give geom_scale with geom_unit raw"
)


class TokenDistances(Protocol):
    """What `median_distance` needs of a `Geometry`."""

    def distances(self, rows: ArrayLike, cols: ArrayLike) -> Floats:
        """Distances [n, m] between token ids [n] and [m]."""


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

    Raises ParameterError for an unknown unit and a geom_unit without geom_scale, and the errors of `raw_geom_scale`.
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
    return {**stated, "geom_scale": raw_geom_scale(stated["geom_scale"], median, unknown)}


def raw_geom_scale(geom_scale: float, median: float | None, unknown: str = _NOT_MEASURED) -> float:
    """Convert `geom_scale` from units of the median distance to the metric's unit: geom_scale / median.

    Raises ParameterError if `median` is None, with the reason `unknown`, and for a result beyond float32.
    """
    if median is None:
        raise ParameterError(f"geom_unit is 'median', but {unknown}.", "geom_unit")
    raw = geom_scale / median
    if not abs(raw) <= float(np.finfo(np.float32).max):
        raise ParameterError(
            f"geom_scale is {geom_scale!r}, {raw:g} when divided by the median distance {median:g}, but must be finite "
            f"{IN_FLOAT32}.",
            "geom_scale",
        )
    return raw


def median_distance(geometry: TokenDistances, logits: Iterable[NDArray[Any]]) -> float | None:
    """The median distance between two independent draws at one step, given that they are different tokens.

    A pair (i, j) has the weight p_i p_j, where p is the softmax at temperature 1. So pairs of likely tokens weigh most,
    and steps with one certain token weigh hardly anything. Each step contributes its LIKELY_TOKENS likeliest tokens.

    geometry: any metric.
    logits: one row [V] per step; rows with NaN, +inf or nothing finite are left out.

    Returns None if no step has two likely tokens, or if the median is 0.
    """
    steps = [_pair_distances(geometry, row) for row in logits if np.isfinite(row.max())]
    if not steps:
        return None
    distances, weights = (np.concatenate(part) for part in zip(*steps, strict=True))
    order = np.argsort(distances)
    cumulative = np.cumsum(weights[order])
    if not len(cumulative) or cumulative[-1] <= 0:
        return None
    median = float(distances[order][np.searchsorted(cumulative, cumulative[-1] / 2)])
    return median if median > 0 else None


def split_special_prefix(ids: Sequence[int], special: Sequence[int], vocab_size: int) -> tuple[Ids, Ids]:
    """Split an encoded text into (its leading special tokens, its other tokens), without ids outside the vocabulary.

    special: 1 for each special token of `ids`, else 0.
    """
    prefix = list(special).index(0) if 0 in special else 0
    tokens = np.asarray(ids, dtype=np.int64)
    start, body = tokens[:prefix], tokens[prefix:]
    return start[start < vocab_size], body[body < vocab_size]


def first_and_last_tokens(start: Ids, body: Ids, longest: int) -> list[Ids]:
    """Texts of at most `longest` tokens: `start` and the first tokens of `body`, `start` and its last tokens.

    Returns one text if all of `body` fits, and [] if `start` leaves no space or `body` is empty.
    """
    length = longest - len(start)
    if length < 1 or not len(body):
        return []
    ends = [body[:length], body[-length:]] if len(body) > length else [body]
    return [np.concatenate([start, end]) for end in ends]


def _pair_distances(geometry: TokenDistances, row: NDArray[Any]) -> tuple[Floats, Floats]:
    """Distances and weights of the step's pairs, each [n (n - 1) / 2]."""
    weights = np.exp(row.astype(np.float64) - row.max())
    weights /= weights.sum()
    n = min(LIKELY_TOKENS, len(row))
    likely = np.argpartition(-weights, n - 1)[:n]
    i, j = np.triu_indices(n, 1)
    p = weights[likely]
    return geometry.distances(likely, likely)[i, j], p[i] * p[j]
