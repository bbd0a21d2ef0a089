"""The parameters of each row: as columns beside the row's tokens, with the values that stand for "greedy"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.sampling.parameters import GREEDY_BELOW

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

# Interval of each parameter, both ends included, in the order of `Rows.given`. NaN lies in none.
_INTERVALS = {
    "temperature": (0.0, LARGEST),
    "selection_temperature": (0.0, LARGEST),
    "lam": (0.0, LARGEST),
    "beta": (0.0, LARGEST),
    "init_top_p": (SMALLEST, 1.0),
    "geom_scale": (-LARGEST, LARGEST),
    "uniform": (0.0, _BELOW_ONE),
}
PARAMETERS = tuple(_INTERVALS)

Bounded = tuple[Tensor, float, float]
"""A column [batch, 1] with the lowest and the highest value that it may have."""


@dataclass(frozen=True)
class Rows:
    """Parameters as float32 columns [batch, 1].

    given: the seven inputs in the order of `PARAMETERS`, as they came.
    greedy: bool, temperature below 1e-5. Such a row keeps one token, whatever else it asks for: `reward` is -1 there
        (no second token pays) and `scale` 0.
    temperature, selection: T and Ts, never 0.
    lam, beta: weights of the entropy term and of the log-mass reward.
    reward: beta - lam, the weight of log Gamma in J.
    warm_mass, scale, uniform: init_top_p, geom_scale and the uniform number of the draw.
    """

    given: tuple[Tensor, ...]
    greedy: Tensor
    temperature: Tensor
    selection: Tensor
    lam: Tensor
    beta: Tensor
    reward: Tensor
    warm_mass: Tensor
    scale: Tensor
    uniform: Tensor


@step
def row_parameters(op: Ops, inputs: Sequence[Tensor]) -> Rows:
    """The seven inputs [batch], in the order of `PARAMETERS`, as `Rows`."""
    axis = op.constant([1], np.int64)
    given = tuple(op.Unsqueeze(value, axis) for value in inputs)
    temperature, selection, lam, beta, warm_mass, scale, uniform = given
    zero = op.constant(0.0)
    greedy = op.Less(temperature, op.constant(GREEDY_BELOW))
    nonzero = op.Max(temperature, op.constant(GREEDY_BELOW))
    return Rows(
        given=given,
        greedy=greedy,
        temperature=nonzero,
        selection=op.Where(op.Equal(selection, zero), nonzero, selection),
        lam=lam,
        beta=beta,
        reward=op.Where(greedy, op.constant(-1.0), op.Sub(beta, lam)),
        warm_mass=warm_mass,
        scale=op.Where(greedy, zero, scale),
        uniform=uniform,
    )


@step
def within(op: Ops, rows: Rows, further: Sequence[Bounded] = ()) -> Tensor:
    """bool [batch, 7 + further]: does each parameter, and each further column, lie in its interval?

    One comparison against a row of bounds, because a graph pays per
    node and not per number.
    """
    bounds = [*_INTERVALS.values(), *((low, high) for _, low, high in further)]
    columns = op.Concat(*rows.given, *(column for column, _, _ in further), axis=1)
    lowest = op.constant([low for low, _ in bounds])
    highest = op.constant([high for _, high in bounds])
    return op.And(op.GreaterOrEqual(columns, lowest), op.LessOrEqual(columns, highest))


@step
def all_true(op: Ops, flags: Tensor, axis: int | None = None) -> Tensor:
    """Logical AND of bool `flags` over everything (a scalar) or along one axis (kept, with length 1)."""
    numbers = op.Cast(flags, to=1)
    if axis is None:
        return op.Cast(op.ReduceMin(numbers, keepdims=0), to=9)
    return op.Cast(op.ReduceMin(numbers, op.constant([axis], np.int64), keepdims=1), to=9)
