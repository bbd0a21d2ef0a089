"""Sums over the whole vocabulary, from which the rules compute their thresholds."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from topw_deploy.export.tail.inputs import BLOCK, LARGEST, Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RuleRows

THRESHOLD_RULES = ("min_p", "epsilon", "eta", "p_less", "top_n_sigma")
"""The rules that keep all tokens above a threshold."""

LEAST = -1e4
"""The lower bound of a weight's logarithm; its weight is already 0."""

_SERIES_BELOW = 0.01  # below this x, three terms of the series of ln(1 + x) have float32 precision


@dataclass(frozen=True)
class Sums:
    """Columns [batch, 1], float32; weights are w = exp(a), a = (l - l_max) / Ts.

    largest: l_max.
    total, log_total: Z = sum of w, and ln Z.
    mean: sum of w a / Z; the entropy is ln Z - mean.
    squares: sum of w^2.
    deviation: sigma of the finite logits.
    span: l_max minus the smallest finite logit.
    finite: number of finite logits.
    """

    largest: Tensor
    total: Tensor
    log_total: Tensor
    mean: Tensor
    squares: Tensor
    deviation: Tensor
    span: Tensor
    finite: Tensor


@dataclass(frozen=True)
class Statistics(Sums):
    """Sums, and what a row's rule derives from them: columns [batch, 1], float32.

    lowest: the smallest l - l_max that the rule's threshold keeps. It is -LARGEST for a rule without a threshold, and
        positive if no token reaches the threshold.
    flat: Min-k's floor(tau / span), at most the number of finite tokens. If all finite logits are equal, it is that
        number for tau > 0, else 0.
    """

    lowest: Tensor
    flat: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of rows, in blocks: [batch, 1, blocks, BLOCK]. The second axis broadcasts over thresholds.

    logits, drop: l and l - l_max, -inf for banned tokens.
    finite: bool.
    a, weight: see `Sums`; a >= LEAST.
    """

    logits: Tensor
    drop: Tensor
    finite: Tensor
    a: Tensor
    weight: Tensor


@scope
def sums_of(op: Ops, values: Tensor) -> Tensor:
    """Sums of [batch, n, blocks, BLOCK]: [batch, n, 1, 1]. In two steps, because long float32 sums lose digits."""
    inner = op.ReduceSum(values, op.constant([3], np.int64), keepdims=1)
    return op.ReduceSum(inner, op.constant([2], np.int64), keepdims=1)


@scope
def total_of(op: Ops, values: Tensor) -> Tensor:
    """Sums of [batch, 1, blocks, BLOCK]: [batch, 1]."""
    return op.Squeeze(sums_of(op, values), op.constant([2, 3], np.int64))


@scope
def count_of(op: Ops, flags: Tensor) -> Tensor:
    """Numbers of true flags, float32 [batch, 1]."""
    return total_of(op, op.Cast(flags, to=1))


@scope
def largest_of(op: Ops, values: Tensor) -> Tensor:
    """Maxima of [batch, 1, blocks, BLOCK]: [batch, 1]."""
    return op.ReduceMax(values, op.constant([2, 3], np.int64), keepdims=0)


def over_blocks(op: Ops, column: Tensor) -> Tensor:
    """[batch, 1] -> [batch, 1, 1, 1]"""
    return op.Unsqueeze(column, op.constant([2, 3], np.int64))


@scope
def vocabulary(op: Ops, logits: Tensor, largest: Tensor, rows: Rows) -> Vocabulary:
    """logits: edited and masked, [batch, padded]; largest: [batch, 1]."""
    grid = op.Reshape(logits, op.constant([0, 1, -1, BLOCK], np.int64))
    drop = op.Sub(grid, over_blocks(op, largest))
    a = op.Max(op.Div(drop, over_blocks(op, rows.selection)), op.constant(LEAST))
    return Vocabulary(grid, drop, op.Greater(grid, op.constant(-np.inf)), a, op.Exp(a))


@scope
def row_statistics(op: Ops, logits: Tensor, largest: Tensor, ruled: RuleRows, rows: Rows) -> Statistics:
    """logits: edited and masked, [batch, padded]; largest: [batch, 1]."""
    sums = row_sums(op, vocabulary(op, logits, largest, rows), largest)
    own = {field.name: getattr(sums, field.name) for field in fields(sums)}
    return Statistics(**own, lowest=lowest_drop(op, ruled, sums, rows), flat=flat_size(op, ruled, sums))


@scope
def take_statistics(op: Ops, found: Statistics, index: Tensor) -> Statistics:
    """The rows with these indices, int64 [n]."""
    return Statistics(*(op.Gather(getattr(found, f.name), index, axis=0) for f in fields(found)))


@scope
def row_sums(op: Ops, words: Vocabulary, largest: Tensor) -> Sums:
    zero, one = op.constant(0.0), op.constant(1.0)
    total = total_of(op, words.weight)
    below = op.Less(words.drop, zero)
    others = op.Sub(count_of(op, op.Not(below)), one)  # tokens with the largest logit, except one
    rest = op.Add(total_of(op, op.Where(below, words.weight, zero)), others)
    finite = count_of(op, words.finite)
    drop = op.Where(words.finite, words.drop, zero)
    span = largest_of(op, op.Neg(drop))
    unit = op.Where(op.Greater(span, zero), span, one)  # so that squares of large negative logits do not overflow
    parts = op.Div(drop, over_blocks(op, unit))
    mean = op.Div(total_of(op, parts), finite)
    apart = op.Where(words.finite, op.Sub(parts, over_blocks(op, mean)), zero)
    variance = op.Div(total_of(op, op.Mul(apart, apart)), op.Max(op.Sub(finite, one), one))
    return Sums(
        largest=largest,
        total=total,
        log_total=log_one_plus(op, rest),
        mean=op.Div(total_of(op, op.Mul(words.weight, words.a)), total),
        squares=total_of(op, op.Mul(words.weight, words.weight)),
        deviation=op.Mul(unit, op.Sqrt(variance)),
        span=span,
        finite=finite,
    )


@scope
def log_one_plus(op: Ops, x: Tensor) -> Tensor:
    """ln(1 + x) for x >= 0, accurate for small x."""
    series = op.Mul(x, op.Sub(op.constant(1.0), op.Mul(x, op.Sub(op.constant(0.5), op.Div(x, op.constant(3.0))))))
    return op.Where(op.Less(x, op.constant(_SERIES_BELOW)), series, op.Log(op.Add(x, op.constant(1.0))))


@scope
def lowest_drop(op: Ops, ruled: RuleRows, found: Sums, rows: Rows) -> Tensor:
    """`Statistics.lowest`.

    For min_p, epsilon, eta and p_less it is Ts times ln of the threshold in units of the largest probability.
    """
    none = op.constant(-LARGEST)
    if not ruled.carries(*THRESHOLD_RULES):
        return op.Min(found.total, none)
    log_value = op.Log(ruled.v0)
    scaled = ruled.choose(
        op,
        none,
        min_p=lambda: log_value,
        epsilon=lambda: op.Add(log_value, found.log_total),
        eta=lambda: op.Min(op.Add(log_value, found.log_total), op.Add(op.Mul(log_value, op.constant(0.5)), found.mean)),
        p_less=lambda: op.Log(op.Div(found.squares, found.total)),
    )
    limit = ruled.choose(
        op,
        op.Mul(scaled, rows.selection),
        top_n_sigma=lambda: op.Neg(op.Mul(ruled.v0, found.deviation)),
    )
    return op.Max(limit, none)


@scope
def flat_size(op: Ops, ruled: RuleRows, found: Sums) -> Tensor:
    """`Statistics.flat`."""
    zero = op.constant(0.0)
    if not ruled.carries("min_k"):
        return op.Mul(found.finite, zero)
    span = op.Where(op.Greater(found.span, zero), found.span, op.constant(1.0))
    size = op.Floor(op.Min(op.Div(ruled.v0, span), found.finite))
    everything = op.Where(op.Greater(ruled.v0, zero), found.finite, zero)
    return op.Where(op.Greater(found.span, zero), size, everything)
