"""The sampling rules other than Top-W: kept set and draw by thresholds (docs/contract/rules.md).

A rule keeps the tokens whose key is largest, up to a sum of terms: for top-p the keys are logits and the terms weights.
So its kept set is a threshold for keys, and the draw is a threshold for kept logits. `largest_threshold` finds both, by
a sort of at most `LONGEST_SORT` tokens, or by a search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.sampler.candidates import DrawColumns, first_position
from topw_deploy.export.sampler.inputs import (
    BELOW_ONE,
    BLOCK,
    CANDIDATES,
    LARGEST,
    SMALLEST,
    RowParameters,
    all_true_in_row,
)
from topw_deploy.export.sampler.ops import Ops, Tensor, scope
from topw_deploy.sampling.rules import ALL_RULES, LARGEST_COUNT, RULES

LONGEST_SORT = 3840
"""The largest number of values that TensorRT's TopK can sort."""

LIST = 1024
"""The number of largest logits that are tried before the whole vocabulary."""

THRESHOLD_RULES = ("min_p", "epsilon", "eta", "p_less", "top_n_sigma")
"""The rules that keep all tokens whose logit reaches a threshold."""

LIMIT_RULES = ("top_k", "top_p", "top_h", "typical", "min_k")
"""The rules that keep tokens in some order up to a mass or number."""

LEAST_LOG_WEIGHT = -1e4
"""The lower bound of log weights. It makes those of -inf finite; the weight is 0 long before."""

JUMPS = 3
"""Jumps of `min_k_cliff` after the sorted logits. Rows that are masked by large negative numbers need two."""

_SERIES_BELOW = 0.01  # below this x, three terms of the series of ln(1 + x) have float32 precision
_VECTOR = 16  # columns that onnxruntime's logarithm rounds alike

# Of normal float32 numbers.
_MANTISSA_BITS = 23
_EXPONENTS = range(-126, 128)

_PER_ROUND = 3
"""Thresholds per round of the search. With more there are fewer rounds, which together take longer."""

_BELOW_ONE = 1 - 2.0**-24  # turns the condition sum > limit of a threshold into sum >= limit

GREEDY_RULE = "top_k"
"""The rule that answers greedy rows, with k = 1. A function that carries any rule but Top-W computes it too."""

UNUSED_INTERVAL = (-np.inf, np.inf)
"""Stands for a value that the rule does not use."""

# Intervals: integers, (0, 1], (0, 1) and [0, infinity).
_COUNT, _SHARE, _OPEN_SHARE = (1.0, float(LARGEST_COUNT)), (SMALLEST, 1.0), (SMALLEST, BELOW_ONE)
_NOT_NEGATIVE = (0.0, LARGEST)

INTERVALS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "top_k": (_COUNT,),
    "top_p": (_SHARE,),
    "min_p": ((0.0, 1.0),),
    "top_h": (_SHARE, _COUNT),
    "typical": (_OPEN_SHARE,),
    "epsilon": (_OPEN_SHARE,),
    "eta": (_OPEN_SHARE,),
    "top_n_sigma": (_NOT_NEGATIVE,),
    "min_k": (_NOT_NEGATIVE,),
}
"""Rule -> the closed interval of each float32 value. A comparison with its ends is false for NaN."""


@dataclass(frozen=True)
class RowRules:
    """The rule of each row and its values, as columns [batch, 1].

    code: the rule's code, float32. It is that of `GREEDY_RULE` in greedy rows, and that of `none` for an unknown code.
    v0, v1: the rule's values, float32; 0 where invalid or unused. v0 is 1 in greedy rows.
    is_valid: whether the function carries the rule and its values lie in their intervals, bool.
    carried: the names of the rules that the function carries.
    """

    code: Tensor
    v0: Tensor
    v1: Tensor
    is_valid: Tensor
    carried: frozenset[str]

    def carries(self, *names: str) -> bool:
        """Whether the function carries any of these rules."""
        return not self.carried.isdisjoint(names)

    def choose(self, op: Ops, default: Tensor, **by_rule: Callable[[], Tensor]) -> Tensor:
        """Compute a column from each row's rule, [batch, 1].

        default: the column for all rules that `by_rule` lacks.
        by_rule: computes the column for the rule of this name; called only if the function carries the rule.
        """
        column = default
        for name, compute in by_rule.items():
            if name == GREEDY_RULE or self.carries(name):
                column = op.Where(self.uses(op, name), compute(), column)
        return column

    def uses(self, op: Ops, *names: str) -> Tensor:
        """Whether a row uses one of these rules: bool [batch, 1]."""
        flags = [op.Equal(self.code, op.constant(float(RULES[name].code))) for name in names]
        uses_any = flags[0]
        for flag in flags[1:]:
            uses_any = op.Or(uses_any, flag)
        return uses_any


@scope
def row_rules(op: Ops, carried: Collection[str], rule: Tensor, values: Tensor, parameters: RowParameters) -> RowRules:
    """Turn the node's inputs into columns.

    carried: the names of the rules that the function carries.
    rule: int32 [batch].
    values: float32 [batch, 2].
    """
    last = op.constant(len(ALL_RULES) - 1, np.int32)  # the code of `none`
    known = op.And(op.GreaterOrEqual(rule, op.constant(0, np.int32)), op.LessOrEqual(rule, last))
    code = op.Where(known, rule, last)
    lowest, highest, is_unused, is_count = (op.Gather(table, code, axis=0) for table in _interval_tables(op))
    in_interval = op.And(op.GreaterOrEqual(values, lowest), op.LessOrEqual(values, highest))
    has_type = op.Or(op.Not(is_count), op.Equal(op.Floor(values), values))
    is_valid = op.Or(is_unused, op.And(in_interval, has_type))
    used_values = op.Where(op.And(is_valid, op.Not(is_unused)), values, op.constant(0.0))
    v0, v1 = (op.Gather(used_values, op.constant([number], np.int64), axis=1) for number in (0, 1))
    if not set(carried).issuperset(RULES):
        flags = [each.name in carried for each in ALL_RULES]
        known = op.And(known, op.Gather(op.constant(flags, np.bool_), code, axis=0))
    axis = op.constant([1], np.int64)
    return RowRules(
        code=op.Where(
            parameters.is_greedy, op.constant(float(RULES[GREEDY_RULE].code)), op.Cast(op.Unsqueeze(code, axis), to=1)
        ),
        v0=op.Where(parameters.is_greedy, op.constant(1.0), v0),
        v1=v1,
        is_valid=op.And(op.Unsqueeze(known, axis), op.Cast(all_true_in_row(op, is_valid), to=9)),
        carried=frozenset(carried),
    )


def _interval_tables(op: Ops) -> tuple[Tensor, ...]:
    """Tables [rules, 2] by a rule's code, for its values (v0, v1).

    Returns the lowest and the highest value, whether the rule does not use the value, and whether it is an integer.
    """
    intervals = [(*INTERVALS.get(rule.name, ()), UNUSED_INTERVAL, UNUSED_INTERVAL)[:2] for rule in ALL_RULES]
    bounds = np.array(intervals)  # [rules, 2, (low, high)]
    unused = np.array([[bound == UNUSED_INTERVAL for bound in pair] for pair in intervals])
    counts = np.array([[bound == _COUNT for bound in pair] for pair in intervals])
    return (
        op.constant(bounds[..., 0]),
        op.constant(bounds[..., 1]),
        op.constant(unused, np.bool_),
        op.constant(counts, np.bool_),
    )


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
class Tokens:
    """The tokens of the whole vocabulary, or of a list, in blocks [batch, 1, blocks, BLOCK], in the order of their ids.

    The second axis is for thresholds.

    logits: float32; -inf for banned tokens and in the padding.
    drop: l - l_max, float32.
    is_finite: bool.
    a: the log weight, see `RowSums`, at least LEAST_LOG_WEIGHT; float32.
    weight: exp(a), float32.
    count: the number of tokens.
    ids: of a list, int64 [batch, count]; None for the whole vocabulary.
    descending: the `count` or LONGEST_SORT largest logits, descending, float32 [batch, n].
    """

    logits: Tensor
    drop: Tensor
    is_finite: Tensor
    a: Tensor
    weight: Tensor
    count: int
    ids: Tensor | None
    descending: Tensor


@dataclass(frozen=True)
class KeptSet:
    """The kept set of each row.

    flags: bool [batch, 1, blocks, BLOCK].
    lowest: the lowest kept logit, float32 [batch, 1].
    is_certified: whether all kept tokens are among the `CANDIDATES` largest, bool [batch, 1].
    is_proven: whether no token outside the list can be kept, bool [batch, 1]; None for the whole vocabulary.
    """

    flags: Tensor
    lowest: Tensor
    is_certified: Tensor
    is_proven: Tensor | None


@scope
def block_sums(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, n, blocks, BLOCK] to [batch, n, 1, 1]: first in blocks, as long float32 sums lose digits."""
    inner = op.ReduceSum(values, op.constant([3], np.int64), keepdims=1)
    return op.ReduceSum(inner, op.constant([2], np.int64), keepdims=1)


@scope
def row_total(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, 1, blocks, BLOCK] to [batch, 1].

    onnxruntime sums a single row in another order than several, so each row is summed twice.
    """
    inner = op.ReduceSum(values, op.constant([3], np.int64), keepdims=0)
    totals = op.ReduceSum(op.Concat(inner, inner, axis=1), op.constant([2], np.int64), keepdims=0)
    return op.Gather(totals, op.constant([0], np.int64), axis=1)


@scope
def row_count(op: Ops, flags: Tensor) -> Tensor:
    """Count the true flags of [batch, 1, blocks, BLOCK]: float32 [batch, 1]."""
    return op.Squeeze(block_sums(op, op.Cast(flags, to=1)), op.constant([2, 3], np.int64))


@scope
def row_maximum(op: Ops, values: Tensor) -> Tensor:
    """The maximum of each row of [batch, 1, blocks, BLOCK]: [batch, 1]."""
    return op.ReduceMax(values, op.constant([2, 3], np.int64), keepdims=0)


def broadcast_over_blocks(op: Ops, column: Tensor) -> Tensor:
    """Reshape a column [batch, 1] to [batch, 1, 1, 1], which broadcasts against blocks."""
    return op.Unsqueeze(column, op.constant([2, 3], np.int64))


def _where_or_zero(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    """The values where the flag is true, else 0."""
    return op.Where(flags, values, op.constant(0.0))


def flatten_blocks(op: Ops, values: Tensor) -> Tensor:
    """Reshape [batch, 1, blocks, BLOCK] to [batch, blocks * BLOCK]."""
    return op.Reshape(values, op.constant([0, -1], np.int64))


@scope
def list_tokens(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters) -> Tokens:
    """The `LIST` largest tokens of each row. Does not depend on how TopK orders equal logits.

    logits: edited and masked, float32 [batch, padded].
    largest: the largest logit of each row, float32 [batch, 1].
    """
    size = op.constant([LIST], np.int64)
    descending, ids = op.TopK(logits, size, axis=1)
    ids, order = op.TopK(ids, size, axis=1, largest=0)
    return _new_tokens(op, op.GatherElements(descending, order, axis=1), largest, parameters, LIST, ids, descending)


@scope
def vocabulary_tokens(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters, count: int) -> Tokens:
    """All `count` tokens; see `list_tokens`."""
    descending, _ = op.TopK(logits, op.constant([min(max(count, 2), LONGEST_SORT)], np.int64), axis=1)
    return _new_tokens(op, logits, largest, parameters, count, None, descending)


def _new_tokens(
    op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters, count: int, ids: Tensor | None,
    descending: Tensor,
) -> Tokens:  # fmt: skip
    grid = op.Reshape(logits, op.constant([0, 1, -1, BLOCK], np.int64))
    drop = op.Sub(grid, broadcast_over_blocks(op, largest))
    a = op.Max(op.Div(drop, broadcast_over_blocks(op, parameters.selection_temperature)), op.constant(LEAST_LOG_WEIGHT))
    return Tokens(grid, drop, op.Greater(grid, op.constant(-np.inf)), a, op.Exp(a), count, ids, descending)


@scope
def row_sums(op: Ops, blocks: Tokens, largest: Tensor) -> RowSums:
    """Compute the sums of each row.

    blocks: the whole vocabulary.
    largest: the largest logit, float32 [batch, 1].
    """
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
def row_log(op: Ops, column: Tensor) -> Tensor:
    """The logarithm of a column [batch, 1], whose bits do not depend on a row's position in the batch.

    onnxruntime rounds full vectors and remainders differently, so each row becomes a full vector.
    """
    vectors = op.Log(op.Expand(column, op.constant([1, _VECTOR], np.int64)))
    return op.Gather(vectors, op.constant([0], np.int64), axis=1)


@scope
def log_one_plus(op: Ops, x: Tensor) -> Tensor:
    """ln(1 + x) for x >= 0, accurate for small x."""
    series = op.Mul(x, op.Sub(op.constant(1.0), op.Mul(x, op.Sub(op.constant(0.5), op.Div(x, op.constant(3.0))))))
    return op.Where(op.Less(x, op.constant(_SERIES_BELOW)), series, row_log(op, op.Add(x, op.constant(1.0))))


@scope
def lowest_kept_drop(op: Ops, rules: RowRules, sums: RowSums, parameters: RowParameters) -> Tensor:
    """The smallest l - l_max that reaches each row's threshold: float32 [batch, 1].

    It is -LARGEST for a rule without a threshold, and positive if no token reaches the threshold.

    min_p, epsilon, eta and p_less have a threshold for probabilities. With r the threshold divided by the largest
    probability, the drop is Ts ln r.
    """
    no_threshold = op.constant(-LARGEST)
    if not rules.carries(*THRESHOLD_RULES):
        return op.Min(sums.total, no_threshold)  # a column with as many rows as the batch
    log_value = row_log(op, rules.v0)
    log_ratio = rules.choose(
        op,
        no_threshold,
        min_p=lambda: log_value,
        epsilon=lambda: op.Add(log_value, sums.log_total),
        eta=lambda: op.Min(
            op.Add(log_value, sums.log_total), op.Add(op.Mul(log_value, op.constant(0.5)), sums.mean_log_weight)
        ),
        p_less=lambda: row_log(op, op.Div(sums.squared_total, sums.total)),
    )
    drop = rules.choose(
        op,
        op.Mul(log_ratio, parameters.selection_temperature),
        top_n_sigma=lambda: op.Neg(op.Mul(rules.v0, sums.deviation)),
    )
    return op.Max(drop, no_threshold)


@scope
def flat_size(op: Ops, rules: RowRules, sums: RowSums) -> Tensor:
    """Min-k's floor(tau / span), at most the number of finite tokens: float32 [batch, 1].

    If all finite logits are equal, it is that number for tau > 0, else 0.
    """
    zero = op.constant(0.0)
    span = op.Where(op.Greater(sums.span, zero), sums.span, op.constant(1.0))
    size = op.Floor(op.Min(op.Div(rules.v0, span), sums.finite_count))
    size_of_equal_logits = op.Where(op.Greater(rules.v0, zero), sums.finite_count, zero)
    return op.Where(op.Greater(sums.span, zero), size, size_of_equal_logits)


@scope
def largest_threshold(op: Ops, tokens: Tokens, keys: Tensor, terms: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The largest t for which the terms of the keys >= t sum to more than `limit`, and whether there is one.

    t is float32 [batch, 1, 1, 1]: one of the keys, or -LARGEST if there is none; the flag is bool [batch, 1].

    keys, terms: float32 [batch, 1, blocks, BLOCK]; keys of -inf do not count.
    limit: float32 [batch, 1].
    """
    if tokens.count > LONGEST_SORT:
        return _search_threshold(op, keys, terms, limit)
    count = tokens.count
    descending, order = op.TopK(flatten_blocks(op, keys), op.constant([count], np.int64), axis=1)
    terms = op.GatherElements(flatten_blocks(op, terms), order, axis=1)
    sums = op.CumSum(op.Cast(terms, to=11), op.constant(1, np.int64))
    is_reached = op.And(op.Greater(sums, op.Cast(limit, to=11)), op.Greater(descending, op.constant(-np.inf)))
    last = op.constant(count, np.int64)  # where a column of -LARGEST follows
    first = first_position(op, is_reached, op.constant(np.arange(count), np.int64), last)
    lowest = op.constant(-LARGEST)
    thresholds = op.Max(op.Pad(descending, op.constant([0, 0, 0, 1], np.int64), lowest), lowest)
    return broadcast_over_blocks(op, op.GatherElements(thresholds, first, axis=1)), op.Less(first, last)


@scope
def _search_threshold(op: Ops, keys: Tensor, terms: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `largest_threshold`. Exact for every float32 number, and faster than a sort of a large vocabulary.

    Tries three thresholds in each of 17 rounds: five rounds find the exponent, twelve the mantissa.
    """
    first, spacing = (op.constant(values) for values in _float32_runs())
    axis, multiples = op.constant([1], np.int64), np.arange(1, 1 + _PER_ROUND).reshape(1, -1, 1, 1)
    limit = broadcast_over_blocks(op, limit)

    def is_above(thresholds: Tensor) -> Tensor:
        """Whether each of the thresholds [batch, n, 1, 1] has a sum above the limit."""
        return op.Greater(block_sums(op, _where_or_zero(op, op.GreaterOrEqual(keys, thresholds), terms)), limit)

    def last_above(ascending: Tensor, thresholds: Tensor, otherwise: Tensor) -> Tensor:
        """The last of `ascending` whose threshold has a sum above the limit, or `otherwise`: [batch, 1, 1, 1]."""
        return op.ReduceMax(op.Where(is_above(thresholds), ascending, otherwise), axis, keepdims=1)

    run = op.constant(np.zeros((1, 1, 1, 1)), np.int64)
    for bit in range(8, -1, -2):
        runs = op.Add(run, op.constant(multiples << bit, np.int64))
        run = last_above(runs, op.Gather(first, runs, axis=0), run)
    threshold, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in range(_MANTISSA_BITS - 1, -1, -2):
        thresholds = op.Add(threshold, op.Mul(unit, op.constant(multiples << bit)))
        threshold = last_above(thresholds, thresholds, threshold)
    # Again with three thresholds, because onnxruntime would sum a single one in another order.
    is_reached = is_above(op.Expand(threshold, op.constant([1, _PER_ROUND, 1, 1], np.int64)))
    return threshold, op.Gather(
        op.Squeeze(is_reached, op.constant([2, 3], np.int64)), op.constant([0], np.int64), axis=1
    )


def _float32_runs() -> tuple[np.ndarray, np.ndarray]:
    """The first number of each run of equally spaced float32 numbers, ascending, and the spacing of each run.

    float32 [1024] each; the unused last entries are infinite, with spacing 1.
    """
    smallest = 2.0**-149
    negative = [(-(2.0 ** (e + 1)) if e < 127 else -LARGEST, 2.0 ** (e - _MANTISSA_BITS)) for e in reversed(_EXPONENTS)]
    tiny = [(-(2.0**-126), smallest), (0.0, smallest)]
    positive = [(2.0**e, 2.0 ** (e - _MANTISSA_BITS)) for e in _EXPONENTS]
    runs = [*negative, *tiny, *positive]
    runs += [(np.inf, 1.0)] * (1024 - len(runs))
    first, spacing = np.array(runs, np.float32).T
    return first, spacing


@scope
def rank_among(op: Ops, flags: Tensor) -> Tensor:
    """The number of true flags up to each id, inclusive: float32 [batch, 1, blocks, BLOCK]."""
    numbers = op.Cast(flags, to=1)
    inner = op.CumSum(numbers, op.constant(3, np.int64))
    totals = op.ReduceSum(numbers, op.constant([3], np.int64), keepdims=1)
    return op.Add(inner, op.Sub(op.CumSum(totals, op.constant(2, np.int64)), totals))


@scope
def tokens_up_to_limit(
    op: Ops, tokens: Tokens, keys: Tensor, terms: Tensor, limit: Tensor, is_upper_limit: Tensor
) -> Tensor:
    """The tokens of largest key whose terms sum to `limit`: bool [batch, 1, blocks, BLOCK].

    These are the fewest tokens with a sum of at least `limit`, or all tokens if their sum is less. If `is_upper_limit`,
    they are the most tokens with a sum of at most `limit` (Top-H). Of tokens with equal keys, those with the lowest ids
    come first.

    keys: float32 [batch, 1, blocks, BLOCK]; -inf for tokens that are never chosen.
    terms: float32 [batch, 1, blocks, BLOCK]. Tokens whose key equals the lowest chosen one all count with the largest
        of their terms.
    limit: float32 [batch, 1].
    is_upper_limit: bool [batch, 1].
    """
    least = op.Where(is_upper_limit, limit, op.Mul(limit, op.constant(_BELOW_ONE)))
    cut, is_reached = largest_threshold(op, tokens, keys, terms, least)
    above, equal = op.Greater(keys, cut), op.Equal(keys, cut)
    term = op.Max(row_maximum(op, _where_or_zero(op, equal, terms)), op.constant(float(np.finfo(np.float32).tiny)))
    missing = op.Div(op.Sub(limit, row_total(op, _where_or_zero(op, above, terms))), term)
    equal_count = op.Where(is_upper_limit, op.Floor(missing), op.Max(op.Ceil(missing), op.constant(1.0)))
    tied = op.And(equal, op.LessOrEqual(rank_among(op, equal), broadcast_over_blocks(op, equal_count)))
    all_tokens = op.And(op.Greater(keys, op.constant(-np.inf)), broadcast_over_blocks(op, op.Not(is_reached)))
    may_choose = op.Or(op.Not(is_upper_limit), op.Greater(limit, op.constant(0.0)))
    return op.And(op.Or(op.Or(above, tied), all_tokens), broadcast_over_blocks(op, may_choose))


def _entropy_terms(op: Ops, tokens: Tokens, sums: RowSums) -> Tensor:
    """-w ln p of each token: float32 [batch, 1, blocks, BLOCK]."""
    return op.Mul(tokens.weight, op.Sub(broadcast_over_blocks(op, sums.log_total), tokens.a))


@scope
def top_h_pool_entropy(op: Ops, tokens: Tokens, rules: RowRules, sums: RowSums) -> Tensor:
    """The sum of -w ln p over Top-H's pool, the v1 largest logits: float32 [batch, 1].

    The pool must be among the descending logits, or the whole vocabulary.
    """
    size = min(tokens.count, LONGEST_SORT)
    last = op.Clip(op.Sub(rules.v1, op.constant(1.0)), op.constant(0.0), op.constant(float(size - 1)))
    cut = broadcast_over_blocks(op, op.GatherElements(tokens.descending, op.Cast(last, to=7), axis=1))
    above, equal = op.Greater(tokens.logits, cut), op.Equal(tokens.logits, cut)
    terms = _entropy_terms(op, tokens, sums)
    of_equal = op.Mul(op.Sub(rules.v1, row_count(op, above)), row_maximum(op, _where_or_zero(op, equal, terms)))
    of_pool = op.Add(row_total(op, _where_or_zero(op, above, terms)), of_equal)
    of_vocabulary = op.Mul(sums.total, op.Sub(sums.log_total, sums.mean_log_weight))
    return op.Where(op.GreaterOrEqual(rules.v1, sums.finite_count), of_vocabulary, of_pool)


@scope
def steepest_drop(op: Ops, descending: Tensor) -> tuple[Tensor, Tensor]:
    """The largest (l_i - l_(i+1)) / i of logits [batch, n], at least 0, and its first i: float32 [batch, 1]."""
    axis, start = op.constant([1], np.int64), op.constant([0], np.int64)
    here = op.Slice(descending, start, op.constant([-1], np.int64), axis)
    following = op.Slice(descending, axis, op.constant([np.iinfo(np.int64).max], np.int64), axis)
    ones = op.Cast(op.GreaterOrEqual(op.Abs(here), op.constant(0.0)), to=1)
    number = op.CumSum(ones, op.constant(1, np.int64))
    is_finite = op.Greater(following, op.constant(-np.inf))
    decay = op.Where(is_finite, op.Div(op.Sub(here, following), number), op.constant(-1.0))
    slope = op.ReduceMax(decay, axis, keepdims=1)
    numbers = op.Where(op.GreaterOrEqual(decay, slope), number, op.constant(np.inf))
    return op.Max(slope, op.constant(0.0)), op.ReduceMin(numbers, axis, keepdims=1)


@scope
def min_k_cliff(op: Ops, tokens: Tokens) -> Tensor:
    """The number of tokens before Min-k's cliff, the steepest drop of the sorted logits: float32 [batch, 1].

    Of equally steep drops, it is the first. After the sorted logits, the search jumps. With g the steepest
    (l_i - l_(i+1)) / i so far, a drop after token i is steeper only if it exceeds i g. So the logits from l_i - i g to
    l_i have no steeper drop among them, and the search jumps over them. These intervals grow, so that few jumps pass
    over a whole vocabulary.
    """
    least, zero = op.constant(-LARGEST), op.constant(0.0)
    slope, cliff = steepest_drop(op, tokens.descending)
    if tokens.count <= LONGEST_SORT:
        return cliff
    here = op.Max(op.Gather(tokens.descending, op.constant([LONGEST_SORT - 1], np.int64), axis=1), least)
    count = row_count(op, op.GreaterOrEqual(tokens.logits, broadcast_over_blocks(op, here)))
    for _ in range(JUMPS):
        passed = op.GreaterOrEqual(tokens.logits, broadcast_over_blocks(op, op.Sub(here, op.Mul(slope, count))))
        count = row_count(op, passed)
        lowest = op.Neg(row_maximum(op, op.Where(passed, op.Neg(tokens.logits), op.constant(-np.inf))))
        following = row_maximum(op, op.Where(passed, op.constant(-np.inf), tokens.logits))
        is_finite = op.GreaterOrEqual(following, least)
        drop = op.Where(is_finite, op.Div(op.Sub(lowest, following), count), zero)
        is_steeper = op.Greater(drop, slope)
        slope, cliff = op.Where(is_steeper, drop, slope), op.Where(is_steeper, count, cliff)
        here = op.Where(is_finite, following, lowest)
    return cliff


@scope
def _tokens_up_to_rule_limit(
    op: Ops,
    tokens: Tokens,
    keys: Tensor,
    rules: RowRules,
    sums: RowSums,
) -> Tensor:
    """The tokens that each row's rule keeps, under `LIMIT_RULES` by their order, terms and limit.

    Other rules have an infinite limit, and keep all tokens with a finite key. See `kept_tokens`.
    """
    has_whole_value = op.GreaterOrEqual(rules.v0, op.constant(1.0))  # for top_p and top_h: the value 1
    terms, is_upper_limit = tokens.weight, op.Less(rules.v0, rules.v0)  # false everywhere
    counts = rules.uses(op, *(name for name in (GREEDY_RULE, "min_k") if name == GREEDY_RULE or rules.carries(name)))
    if rules.carries("top_h"):
        uses_top_h = rules.uses(op, "top_h")
        terms = op.Where(broadcast_over_blocks(op, uses_top_h), _entropy_terms(op, tokens, sums), terms)
        counts = op.Or(counts, op.And(uses_top_h, has_whole_value))  # top_h = 1 keeps the whole pool, of v1 tokens
        is_upper_limit = op.And(uses_top_h, op.Not(has_whole_value))
    terms = op.Where(broadcast_over_blocks(op, counts), op.constant(1.0), terms)
    infinite, mass = op.constant(np.inf), op.Mul(rules.v0, sums.total)
    limit = rules.choose(
        op,
        infinite,
        top_k=lambda: rules.v0,
        top_p=lambda: op.Where(has_whole_value, infinite, mass),
        typical=lambda: mass,
        top_h=lambda: op.Where(
            has_whole_value, rules.v1, op.Mul(rules.v0, top_h_pool_entropy(op, tokens, rules, sums))
        ),
        min_k=lambda: op.Max(min_k_cliff(op, tokens), flat_size(op, rules, sums)),
    )
    return tokens_up_to_limit(op, tokens, keys, terms, limit, is_upper_limit)


@scope
def kept_tokens(op: Ops, tokens: Tokens, rules: RowRules, sums: RowSums, parameters: RowParameters) -> KeptSet:
    """Find the kept set of each row under its rule."""
    infinity = op.constant(np.inf)
    lowest_drop = broadcast_over_blocks(op, lowest_kept_drop(op, rules, sums, parameters))
    flags = op.And(tokens.is_finite, op.GreaterOrEqual(tokens.drop, lowest_drop))
    keys = tokens.logits
    if rules.carries("typical"):
        closeness = op.Neg(op.Abs(op.Sub(tokens.a, broadcast_over_blocks(op, sums.mean_log_weight))))
        keys = op.Where(broadcast_over_blocks(op, rules.uses(op, "typical")), closeness, keys)
    if rules.carries(*LIMIT_RULES):
        keys = op.Where(flags, keys, op.Neg(infinity))
        flags = _tokens_up_to_rule_limit(op, tokens, keys, rules, sums)
    else:
        flags = op.And(flags, op.Not(broadcast_over_blocks(op, rules.uses(op, GREEDY_RULE))))
    # A rule that keeps nothing so far, and a greedy row, keep the lowest id of the largest logits.
    is_empty = op.Equal(row_count(op, flags), op.constant(0.0))
    largest = op.And(op.Equal(tokens.drop, op.constant(0.0)), broadcast_over_blocks(op, is_empty))
    flags = op.Or(flags, op.And(largest, op.Equal(rank_among(op, largest), op.constant(1.0))))
    lowest = _lowest(op, flags, tokens.logits)
    cut = broadcast_over_blocks(op, lowest)
    kept_at_cut = op.And(flags, op.Equal(tokens.logits, cut))
    last_rank = op.Add(row_count(op, op.Greater(tokens.logits, cut)), row_count(op, kept_at_cut))
    is_certified = op.LessOrEqual(last_rank, op.constant(float(CANDIDATES)))
    is_proven = (
        _is_proven(op, tokens, rules, sums, _lowest(op, flags, keys), parameters) if tokens.ids is not None else None
    )
    return KeptSet(flags, lowest, is_certified, is_proven)


def _lowest(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    """The lowest value with a true flag: float32 [batch, 1]."""
    return op.Neg(row_maximum(op, op.Where(flags, op.Neg(values), op.constant(-np.inf))))


@scope
def _is_proven(
    op: Ops, tokens: Tokens, rules: RowRules, sums: RowSums, lowest_key: Tensor, parameters: RowParameters
) -> Tensor:
    """Whether no token outside the list can be kept (docs/contract/rules.md, section 3): bool [batch, 1].

    It is proven if the list has all finite logits. Otherwise the list's last token must not be kept, and no other
    token's key may be larger than its key. Under typical this needs a last token that is less likely than the mean.
    Top-H's pool must be in the list, or the whole vocabulary. Under Min-k, no steeper drop may follow the list.

    lowest_key: the lowest key that is kept, float32 [batch, 1].
    """
    last = op.Gather(tokens.descending, op.constant([LIST - 1], np.int64), axis=1)
    last_drop = op.Sub(last, sums.largest)
    is_complete = op.Equal(last, op.constant(-np.inf))
    last_key, is_proven = last, op.Equal(rules.v0, rules.v0)  # true everywhere
    if rules.carries("typical"):
        uses_typical = rules.uses(op, "typical")
        a = op.Div(last_drop, parameters.selection_temperature)
        last_key = op.Where(uses_typical, op.Sub(a, sums.mean_log_weight), last)
        is_proven = op.Or(op.Not(uses_typical), op.LessOrEqual(last_key, op.constant(0.0)))
    if rules.carries("top_h"):
        in_list = op.LessOrEqual(rules.v1, op.constant(float(LIST)))
        is_known = op.Or(in_list, op.GreaterOrEqual(rules.v1, sums.finite_count))
        is_proven = op.And(is_proven, op.Or(op.Not(rules.uses(op, "top_h")), is_known))
    if rules.carries("min_k"):
        slope, _ = steepest_drop(op, tokens.descending)
        remaining_span = op.Add(last_drop, sums.span)  # l_last - l_n
        is_steepest = op.Greater(slope, op.Div(remaining_span, op.constant(float(LIST))))
        is_proven = op.And(is_proven, op.Or(op.Not(rules.uses(op, "min_k")), is_steepest))
    return op.Or(is_complete, op.And(is_proven, op.Greater(lowest_key, last_key)))


@scope
def draw_kept(op: Ops, tokens: Tokens, kept: KeptSet, parameters: RowParameters) -> DrawColumns:
    """Draw from the kept tokens (docs/contract/graph.md, section 5)."""
    logits = op.Where(kept.flags, tokens.logits, op.constant(-np.inf))
    largest = row_maximum(op, logits)
    drop = op.Sub(logits, broadcast_over_blocks(op, largest))
    weight = op.Exp(op.Div(drop, broadcast_over_blocks(op, parameters.temperature)))
    total = row_total(op, weight)
    target = op.Mul(parameters.uniform, total)
    threshold, _ = largest_threshold(op, tokens, logits, weight, target)
    drawn_logit = op.Max(threshold, broadcast_over_blocks(op, kept.lowest))
    above, equal = op.Greater(logits, drawn_logit), op.Equal(logits, drawn_logit)
    missing = op.Sub(target, row_total(op, _where_or_zero(op, above, weight)))
    rank = op.Add(op.Floor(op.Div(missing, row_maximum(op, _where_or_zero(op, equal, weight)))), op.constant(1.0))
    rank = op.Max(op.Min(rank, row_count(op, equal)), op.constant(1.0))
    # The position of the token is the number of tokens before it.
    position = op.Cast(row_count(op, op.Less(rank_among(op, equal), broadcast_over_blocks(op, rank))), to=7)
    token = position if tokens.ids is None else op.GatherElements(tokens.ids, position, axis=1)
    drawn_drop = op.Sub(op.Squeeze(drawn_logit, op.constant([2, 3], np.int64)), largest)
    logprob = op.Sub(op.Div(drawn_drop, parameters.temperature), row_log(op, total))
    return DrawColumns(token, logprob, op.Cast(row_count(op, kept.flags), to=7))


@scope
def crop_mass(op: Ops, tokens: Tokens, kept: KeptSet) -> Tensor:
    """The sum of the kept tokens' weights at Ts: float32 [batch, 1]."""
    return row_total(op, _where_or_zero(op, kept.flags, tokens.weight))
