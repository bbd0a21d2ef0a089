"""The kept set and the draw from a vocabulary that is too large to sort, with static shapes.

Both are found by thresholds for logits; see `largest_threshold`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, DrawColumns
from topw_deploy.export.tail.inputs import LARGEST, RowParameters
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import (
    LONGEST_SORT,
    SortedList,
    sorted_list,
    steepest_drop,
    top_h_pool_entropy,
)
from topw_deploy.export.tail.rules.inputs import GREEDY_RULE, RowRules
from topw_deploy.export.tail.rules.statistics import (
    RuleStatistics,
    VocabularyBlocks,
    block_sums,
    broadcast_over_blocks,
    row_count,
    row_maximum,
    row_total,
)
from topw_deploy.export.tail.spec import TailSpec

# Of normal float32 numbers.
_MANTISSA_BITS = 23
_EXPONENTS = range(-126, 128)

_PER_ROUND = 3
"""Thresholds per round of the search. With more there are fewer rounds, which together take longer."""

JUMPS = 3
"""Jumps of `min_k_cliff` after the 3840 largest logits. Rows that are masked by large negative numbers need two."""

_BELOW_ONE = 1 - 2.0**-24  # turns the condition sum > limit of the search into sum >= limit

_LIMIT_RULES = ("top_k", "top_p", "top_h", "typical", "min_k")
"""Rules that keep tokens in some order up to a mass or number. The others keep all tokens that reach a threshold."""


@dataclass(frozen=True)
class KeptSet:
    """The kept set of each row.

    flags: bool [batch, 1, blocks, BLOCK].
    is_certified: whether all kept tokens are among the `CANDIDATES` largest, bool [batch, 1].
    """

    flags: Tensor
    is_certified: Tensor


@scope
def rank_among(op: Ops, flags: Tensor) -> Tensor:
    """The number of true flags up to each id, inclusive: float32 [batch, 1, blocks, BLOCK]."""
    numbers = op.Cast(flags, to=1)
    inner = op.CumSum(numbers, op.constant(3, np.int64))
    totals = op.ReduceSum(numbers, op.constant([3], np.int64), keepdims=1)
    return op.Add(inner, op.Sub(op.CumSum(totals, op.constant(2, np.int64)), totals))


def _where_or_zero(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    """The values where the flag is true, else 0."""
    return op.Where(flags, values, op.constant(0.0))


@scope
def tokens_up_to_limit(op: Ops, keys: Tensor, terms: Tensor, limit: Tensor, is_upper_limit: Tensor) -> Tensor:
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
    least = broadcast_over_blocks(op, op.Where(is_upper_limit, limit, op.Mul(limit, op.constant(_BELOW_ONE))))

    def sums(thresholds: Tensor) -> Tensor:
        return block_sums(op, _where_or_zero(op, op.GreaterOrEqual(keys, thresholds), terms))

    cut = largest_threshold(op, sums, least)
    above, equal = op.Greater(keys, cut), op.Equal(keys, cut)
    one = op.constant(1.0)
    term = op.Max(row_maximum(op, _where_or_zero(op, equal, terms)), op.constant(float(np.finfo(np.float32).tiny)))
    missing = op.Div(op.Sub(limit, row_total(op, _where_or_zero(op, above, terms))), term)
    equal_count = op.Where(is_upper_limit, op.Floor(missing), op.Max(op.Ceil(missing), one))
    tied = op.And(equal, op.LessOrEqual(rank_among(op, equal), broadcast_over_blocks(op, equal_count)))
    all_tokens = op.And(op.Greater(keys, op.constant(-np.inf)), op.Not(op.Greater(sums(cut), least)))
    may_choose = op.Or(op.Not(is_upper_limit), op.Greater(limit, op.constant(0.0)))
    return op.And(op.Or(op.Or(above, tied), all_tokens), broadcast_over_blocks(op, may_choose))


@scope
def _tokens_up_to_rule_limit(
    op: Ops,
    spec: TailSpec,
    blocks: VocabularyBlocks,
    above_threshold: Tensor,
    rules: RowRules,
    statistics: RuleStatistics,
    parameters: RowParameters,
) -> Tensor:
    """The tokens that each row's rule keeps, under `_LIMIT_RULES` by their order, terms and limit.

    Other rules have an infinite limit, and keep all tokens that `above_threshold`, bool [batch, 1, blocks, BLOCK], has.
    """
    has_whole_value = op.GreaterOrEqual(rules.v0, op.constant(1.0))  # for top_p and top_h: the value 1
    keys, terms, is_upper_limit = blocks.logits, blocks.weight, op.Less(rules.v0, rules.v0)  # false everywhere
    counts = rules.uses(op, *(name for name in (GREEDY_RULE, "min_k") if name == GREEDY_RULE or rules.carries(name)))
    if rules.carries("typical"):
        closeness = op.Neg(op.Abs(op.Sub(blocks.a, broadcast_over_blocks(op, statistics.mean_log_weight))))
        keys = op.Where(broadcast_over_blocks(op, rules.uses(op, "typical")), closeness, keys)
    if rules.carries("top_h"):
        uses_top_h = rules.uses(op, "top_h")
        entropy = op.Mul(blocks.weight, op.Sub(broadcast_over_blocks(op, statistics.log_total), blocks.a))
        terms = op.Where(broadcast_over_blocks(op, uses_top_h), entropy, terms)
        counts = op.Or(counts, op.And(uses_top_h, has_whole_value))  # top_h = 1 keeps the whole pool, of v1 tokens
        is_upper_limit = op.And(uses_top_h, op.Not(has_whole_value))
    terms = op.Where(broadcast_over_blocks(op, counts), op.constant(1.0), terms)
    infinite, mass = op.constant(np.inf), op.Mul(rules.v0, statistics.total)

    def longest_list() -> SortedList:
        logits = flatten_blocks(op, blocks.logits)
        return sorted_list(op, logits, statistics, parameters, spec.vocab_size, LONGEST_SORT)

    def top_h_limit() -> Tensor:
        entropy = top_h_pool_entropy(op, longest_list(), rules, statistics)
        return op.Where(has_whole_value, rules.v1, op.Mul(rules.v0, entropy))

    limit = rules.choose(
        op,
        infinite,
        top_k=lambda: rules.v0,
        top_p=lambda: op.Where(has_whole_value, infinite, mass),
        typical=lambda: mass,
        top_h=top_h_limit,
        min_k=lambda: op.Max(min_k_cliff(op, blocks, longest_list()), statistics.flat_size),
    )
    keys = op.Where(above_threshold, keys, op.constant(-np.inf))
    return tokens_up_to_limit(op, keys, terms, limit, is_upper_limit)


@scope
def kept_tokens(
    op: Ops,
    spec: TailSpec,
    blocks: VocabularyBlocks,
    rules: RowRules,
    statistics: RuleStatistics,
    parameters: RowParameters,
) -> KeptSet:
    """Find the kept set of each row under its rule."""
    lowest_drop = broadcast_over_blocks(op, statistics.lowest_kept_drop)
    flags = op.And(blocks.is_finite, op.GreaterOrEqual(blocks.drop, lowest_drop))
    if rules.carries(*_LIMIT_RULES):
        flags = _tokens_up_to_rule_limit(op, spec, blocks, flags, rules, statistics, parameters)
    else:
        flags = op.And(flags, op.Not(broadcast_over_blocks(op, rules.uses(op, GREEDY_RULE))))
    # A rule that keeps nothing so far, and a greedy row, keep the lowest id of the largest logits.
    is_empty = op.Equal(row_count(op, flags), op.constant(0.0))
    largest = op.And(op.Equal(blocks.drop, op.constant(0.0)), broadcast_over_blocks(op, is_empty))
    flags = op.Or(flags, op.And(largest, op.Equal(rank_among(op, largest), op.constant(1.0))))
    lowest = op.Neg(row_maximum(op, op.Where(flags, op.Neg(blocks.logits), op.constant(-np.inf))))
    cut = broadcast_over_blocks(op, lowest)
    kept_at_cut = op.And(flags, op.Equal(blocks.logits, cut))
    last_rank = op.Add(row_count(op, op.Greater(blocks.logits, cut)), row_count(op, kept_at_cut))
    return KeptSet(flags, op.LessOrEqual(last_rank, op.constant(float(CANDIDATES))))


@scope
def draw_kept(op: Ops, blocks: VocabularyBlocks, kept: Tensor, parameters: RowParameters) -> DrawColumns:
    """Draw from the kept tokens, bool [batch, 1, blocks, BLOCK] (docs/contract/graph.md, section 5)."""
    one = op.constant(1.0)
    logits = op.Where(kept, blocks.logits, op.constant(-np.inf))
    largest = row_maximum(op, logits)
    drop = op.Sub(logits, broadcast_over_blocks(op, largest))
    weight = op.Exp(op.Div(drop, broadcast_over_blocks(op, parameters.temperature)))
    total = row_total(op, weight)
    target = op.Mul(parameters.uniform, total)

    def sums(thresholds: Tensor) -> Tensor:
        return block_sums(op, _where_or_zero(op, op.GreaterOrEqual(logits, thresholds), weight))

    drawn_logit = largest_threshold(op, sums, broadcast_over_blocks(op, target))
    above, equal = op.Greater(logits, drawn_logit), op.Equal(logits, drawn_logit)
    missing = op.Sub(target, row_total(op, _where_or_zero(op, above, weight)))
    rank = op.Add(op.Floor(op.Div(missing, row_maximum(op, _where_or_zero(op, equal, weight)))), one)
    rank = op.Max(op.Min(rank, row_count(op, equal)), one)
    # The id of the token is the number of ids before it.
    token = row_count(op, op.Less(rank_among(op, equal), broadcast_over_blocks(op, rank)))
    drawn_drop = op.Sub(op.Squeeze(drawn_logit, op.constant([2, 3], np.int64)), largest)
    log_weight = op.Div(drawn_drop, parameters.temperature)
    return DrawColumns(op.Cast(token, to=7), op.Sub(log_weight, op.Log(total)), op.Cast(row_count(op, kept), to=7))


@scope
def crop_mass(op: Ops, blocks: VocabularyBlocks, kept: Tensor) -> Tensor:
    """The sum of the kept tokens' weights at Ts: float32 [batch, 1]."""
    return row_total(op, _where_or_zero(op, kept, blocks.weight))


@scope
def flatten_blocks(op: Ops, values: Tensor) -> Tensor:
    """Reshape [batch, 1, blocks, BLOCK] to [batch, padded]."""
    return op.Reshape(values, op.constant([0, -1], np.int64))


@scope
def min_k_cliff(op: Ops, blocks: VocabularyBlocks, tokens: SortedList) -> Tensor:
    """The number of tokens before Min-k's cliff, the steepest drop of the sorted logits: float32 [batch, 1].

    Of equally steep drops, it is the first. The search does not sort. With g the steepest (l_i - l_(i+1)) / i so far, a
    drop after token i is steeper only if it exceeds i g. So the logits from l_i - i g to l_i have no steeper drop among
    them, and the search jumps over them. These intervals grow, so that few jumps pass over a whole vocabulary.

    tokens: the `LONGEST_SORT` largest logits.
    """
    least, zero = op.constant(-LARGEST), op.constant(0.0)
    slope, cliff = steepest_drop(op, tokens.logits)
    slope, cliff = op.Max(slope, zero), op.Cast(cliff, to=1)
    here = op.Max(tokens.last, least)
    count = row_count(op, op.GreaterOrEqual(blocks.logits, broadcast_over_blocks(op, here)))
    for _ in range(JUMPS):
        passed = op.GreaterOrEqual(blocks.logits, broadcast_over_blocks(op, op.Sub(here, op.Mul(slope, count))))
        count = row_count(op, passed)
        lowest = op.Neg(row_maximum(op, op.Where(passed, op.Neg(blocks.logits), op.constant(-np.inf))))
        following = row_maximum(op, op.Where(passed, op.constant(-np.inf), blocks.logits))
        is_finite = op.GreaterOrEqual(following, least)
        drop = op.Where(is_finite, op.Div(op.Sub(lowest, following), count), zero)
        is_steeper = op.Greater(drop, slope)
        slope, cliff = op.Where(is_steeper, drop, slope), op.Where(is_steeper, count, cliff)
        here = op.Where(is_finite, following, lowest)
    return cliff


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
def largest_threshold(op: Ops, sums: Callable[[Tensor], Tensor], limit: Tensor) -> Tensor:
    """The largest float32 number t with sums(t) > limit, exactly: float32 [batch, 1, 1, 1].

    It is -LARGEST, the lowest finite number, if even sums(-LARGEST) is at most `limit`.

    Replaces a sort: TensorRT's TopK takes at most 3840 numbers, and on a CPU sorting a vocabulary is not faster. Tries
    three thresholds in each of 17 rounds: five rounds find the exponent, twelve the mantissa.

    sums: maps thresholds [batch, n, 1, 1] to sums [batch, n, 1, 1], which do not rise with the threshold.
    limit: float32 [batch, 1, 1, 1].
    """
    first, spacing = (op.constant(values) for values in _float32_runs())
    axis, multiples = op.constant([1], np.int64), np.arange(1, 1 + _PER_ROUND).reshape(1, -1, 1, 1)

    def last_above_limit(ascending: Tensor, thresholds: Tensor, otherwise: Tensor) -> Tensor:
        """The last of `ascending` whose threshold has a sum above the limit, or `otherwise`: [batch, 1, 1, 1]."""
        is_above = op.Greater(sums(thresholds), limit)
        return op.ReduceMax(op.Where(is_above, ascending, otherwise), axis, keepdims=1)

    run = op.constant(np.zeros((1, 1, 1, 1)), np.int64)
    for bit in range(8, -1, -2):
        runs = op.Add(run, op.constant(multiples << bit, np.int64))
        run = last_above_limit(runs, op.Gather(first, runs, axis=0), run)
    threshold, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in range(_MANTISSA_BITS - 1, -1, -2):
        thresholds = op.Add(threshold, op.Mul(unit, op.constant(multiples << bit)))
        threshold = last_above_limit(thresholds, thresholds, threshold)
    return threshold
