"""Sums over the whole vocabulary, and the thresholds that the rules derive from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from topw_deploy.export.tail.inputs import BLOCK, LARGEST, RowParameters
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RowRules

THRESHOLD_RULES = ("min_p", "epsilon", "eta", "p_less", "top_n_sigma")
"""The rules that keep all tokens whose logit reaches a threshold."""

LEAST_LOG_WEIGHT = -1e4
"""The lower bound of log weights. It makes those of -inf finite; the weight is 0 long before."""

_SERIES_BELOW = 0.01  # below this x, three terms of the series of ln(1 + x) have float32 precision


@dataclass(frozen=True)
class RowSums:
    """Sums over the finite logits of each row: columns [batch, 1], float32.

    The weight of a logit l is w = exp(a), with a = (l - l_max) / Ts.

    largest: l_max.
    total: Z, the sum of w.
    log_total: ln Z.
    mean_log_weight: the sum of w a, divided by Z; the entropy is ln Z minus this.
    squared_total: the sum of w^2.
    deviation: sigma, the standard deviation of the logits, with n - 1 in the denominator.
    span: l_max minus the smallest finite logit.
    finite_count: the number of finite logits.
    """

    largest: Tensor
    total: Tensor
    log_total: Tensor
    mean_log_weight: Tensor
    squared_total: Tensor
    deviation: Tensor
    span: Tensor
    finite_count: Tensor


@dataclass(frozen=True)
class RuleStatistics(RowSums):
    """The sums of each row and two numbers that its rule derives from them: columns [batch, 1], float32.

    lowest_kept_drop: the smallest l - l_max that reaches the rule's threshold. It is -LARGEST for a rule without a
        threshold, and positive if no token reaches the threshold.
    flat_size: Min-k's floor(tau / span), at most the number of finite tokens. If all finite logits are equal, it is
        that number for tau > 0, else 0.
    """

    lowest_kept_drop: Tensor
    flat_size: Tensor


@dataclass(frozen=True)
class VocabularyBlocks:
    """The logits of the whole vocabulary in blocks, [batch, 1, blocks, BLOCK]; the second axis is for thresholds.

    logits: float32; -inf for banned tokens and in the padding.
    drop: l - l_max, float32.
    is_finite: bool.
    a: the log weight, see `RowSums`, at least LEAST_LOG_WEIGHT; float32.
    weight: exp(a), float32.
    """

    logits: Tensor
    drop: Tensor
    is_finite: Tensor
    a: Tensor
    weight: Tensor


@scope
def block_sums(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, n, blocks, BLOCK] to [batch, n, 1, 1]: first in blocks, as long float32 sums lose digits."""
    inner = op.ReduceSum(values, op.constant([3], np.int64), keepdims=1)
    return op.ReduceSum(inner, op.constant([2], np.int64), keepdims=1)


@scope
def row_total(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, 1, blocks, BLOCK] to [batch, 1]."""
    return op.Squeeze(block_sums(op, values), op.constant([2, 3], np.int64))


@scope
def row_count(op: Ops, flags: Tensor) -> Tensor:
    """Count the true flags of [batch, 1, blocks, BLOCK]: float32 [batch, 1]."""
    return row_total(op, op.Cast(flags, to=1))


@scope
def row_maximum(op: Ops, values: Tensor) -> Tensor:
    """The maximum of each row of [batch, 1, blocks, BLOCK]: [batch, 1]."""
    return op.ReduceMax(values, op.constant([2, 3], np.int64), keepdims=0)


def broadcast_over_blocks(op: Ops, column: Tensor) -> Tensor:
    """Reshape a column [batch, 1] to [batch, 1, 1, 1], which broadcasts against blocks."""
    return op.Unsqueeze(column, op.constant([2, 3], np.int64))


@scope
def vocabulary_blocks(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters) -> VocabularyBlocks:
    """Cut rows into blocks and compute their weights.

    logits: edited and masked, float32 [batch, padded].
    largest: the largest logit of each row, float32 [batch, 1].
    """
    grid = op.Reshape(logits, op.constant([0, 1, -1, BLOCK], np.int64))
    drop = op.Sub(grid, broadcast_over_blocks(op, largest))
    a = op.Max(op.Div(drop, broadcast_over_blocks(op, parameters.selection_temperature)), op.constant(LEAST_LOG_WEIGHT))
    return VocabularyBlocks(grid, drop, op.Greater(grid, op.constant(-np.inf)), a, op.Exp(a))


@scope
def row_statistics(
    op: Ops, logits: Tensor, largest: Tensor, rules: RowRules, parameters: RowParameters
) -> RuleStatistics:
    """Compute the statistics of each row.

    logits: edited and masked, float32 [batch, padded].
    largest: the largest logit of each row, float32 [batch, 1].
    """
    sums = row_sums(op, vocabulary_blocks(op, logits, largest, parameters), largest)
    columns = {field.name: getattr(sums, field.name) for field in fields(sums)}
    columns["lowest_kept_drop"] = lowest_kept_drop(op, rules, sums, parameters)
    return RuleStatistics(**columns, flat_size=flat_size(op, rules, sums))


@scope
def take_statistics(op: Ops, statistics: RuleStatistics, index: Tensor) -> RuleStatistics:
    """The statistics of rows `index`, int64 [n]."""
    return RuleStatistics(*(op.Gather(getattr(statistics, f.name), index, axis=0) for f in fields(statistics)))


@scope
def row_sums(op: Ops, blocks: VocabularyBlocks, largest: Tensor) -> RowSums:
    """Compute the sums of each row. largest: the largest logit, float32 [batch, 1]."""
    zero, one = op.constant(0.0), op.constant(1.0)
    total = row_total(op, blocks.weight)
    # ln Z is ln(1 + rest), which is accurate also where `rest` is tiny.
    below_largest = op.Less(blocks.drop, zero)
    further_largest = op.Sub(row_count(op, op.Not(below_largest)), one)  # equal to the largest; each has weight 1
    rest = op.Add(row_total(op, op.Where(below_largest, blocks.weight, zero)), further_largest)
    finite_count = row_count(op, blocks.is_finite)
    drop = op.Where(blocks.is_finite, blocks.drop, zero)
    span = row_maximum(op, op.Neg(drop))
    unit = op.Where(op.Greater(span, zero), span, one)  # squares of large negative logits would overflow without it
    scaled_drop = op.Div(drop, broadcast_over_blocks(op, unit))
    mean = op.Div(row_total(op, scaled_drop), finite_count)
    difference = op.Where(blocks.is_finite, op.Sub(scaled_drop, broadcast_over_blocks(op, mean)), zero)
    variance = op.Div(row_total(op, op.Mul(difference, difference)), op.Max(op.Sub(finite_count, one), one))
    return RowSums(
        largest=largest,
        total=total,
        log_total=log_one_plus(op, rest),
        mean_log_weight=op.Div(row_total(op, op.Mul(blocks.weight, blocks.a)), total),
        squared_total=row_total(op, op.Mul(blocks.weight, blocks.weight)),
        deviation=op.Mul(unit, op.Sqrt(variance)),
        span=span,
        finite_count=finite_count,
    )


@scope
def log_one_plus(op: Ops, x: Tensor) -> Tensor:
    """ln(1 + x) for x >= 0, accurate for small x."""
    series = op.Mul(x, op.Sub(op.constant(1.0), op.Mul(x, op.Sub(op.constant(0.5), op.Div(x, op.constant(3.0))))))
    return op.Where(op.Less(x, op.constant(_SERIES_BELOW)), series, op.Log(op.Add(x, op.constant(1.0))))


@scope
def lowest_kept_drop(op: Ops, rules: RowRules, sums: RowSums, parameters: RowParameters) -> Tensor:
    """Compute `RuleStatistics.lowest_kept_drop`.

    min_p, epsilon, eta and p_less have a threshold for probabilities. With r the threshold divided by the largest
    probability, the drop is Ts ln r.
    """
    no_threshold = op.constant(-LARGEST)
    if not rules.carries(*THRESHOLD_RULES):
        return op.Min(sums.total, no_threshold)  # a column with as many rows as the batch
    log_value = op.Log(rules.v0)
    log_ratio = rules.choose(
        op,
        no_threshold,
        min_p=lambda: log_value,
        epsilon=lambda: op.Add(log_value, sums.log_total),
        eta=lambda: op.Min(
            op.Add(log_value, sums.log_total), op.Add(op.Mul(log_value, op.constant(0.5)), sums.mean_log_weight)
        ),
        p_less=lambda: op.Log(op.Div(sums.squared_total, sums.total)),
    )
    drop = rules.choose(
        op,
        op.Mul(log_ratio, parameters.selection_temperature),
        top_n_sigma=lambda: op.Neg(op.Mul(rules.v0, sums.deviation)),
    )
    return op.Max(drop, no_threshold)


@scope
def flat_size(op: Ops, rules: RowRules, sums: RowSums) -> Tensor:
    """Compute `RuleStatistics.flat_size`; 0 for a function that does not carry Min-k."""
    zero = op.constant(0.0)
    if not rules.carries("min_k"):
        return op.Mul(sums.finite_count, zero)  # a column with as many rows as the batch
    span = op.Where(op.Greater(sums.span, zero), sums.span, op.constant(1.0))
    size = op.Floor(op.Min(op.Div(rules.v0, span), sums.finite_count))
    size_of_equal_logits = op.Where(op.Greater(rules.v0, zero), sums.finite_count, zero)
    return op.Where(op.Greater(sums.span, zero), size, size_of_equal_logits)
