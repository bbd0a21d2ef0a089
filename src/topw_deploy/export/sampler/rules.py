"""The sampling rules other than Top-W: kept set and draw by thresholds (docs/contract/rules.md).

A rule keeps the tokens whose key is largest, up to a sum of terms: for top-p the keys are logits and the terms weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.export.sampler.candidates import DrawColumns
from topw_deploy.export.sampler.node import BELOW_ONE, CANDIDATES, LARGEST, SMALLEST, RowParameters, all_true_in_row
from topw_deploy.export.sampler.ops import Input, Ops, Tensor, scope
from topw_deploy.export.sampler.thresholds import (
    LIST,
    LONGEST_SORT,
    Tokens,
    largest_threshold,
    log_one_plus,
    over_blocks,
    rank_among,
    row_count,
    row_log,
    row_maximum,
    row_total,
    tokens_up_to_limit,
)
from topw_deploy.sampling.rules import ALL_RULES, LARGEST_COUNT, RULES

THRESHOLD_RULES = ("min_p", "epsilon", "eta", "p_less", "top_n_sigma")
"""The rules that keep all tokens whose logit reaches a threshold."""

LIMIT_RULES = ("top_k", "top_p", "top_h", "typical", "min_k")
"""The rules that keep tokens in some order up to a mass or number."""

JUMPS = 3
"""Jumps of `min_k_cliff` after the sorted logits. Rows that are masked by large negative numbers need two."""

GREEDY_RULE = "top_k"
"""The rule that answers greedy rows, with k = 1. A function that carries any rule but Top-W computes it too."""

# Intervals: integers, (0, 1], (0, 1) and [0, infinity).
_COUNT, _SHARE, _OPEN_SHARE = (1.0, float(LARGEST_COUNT)), (SMALLEST, 1.0), (SMALLEST, BELOW_ONE)
_NOT_NEGATIVE, _UNUSED = (0.0, LARGEST), (-np.inf, np.inf)

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

    def choose(self, op: Ops, default: Input, **by_rule: Callable[[], Tensor]) -> Tensor:
        """Compute a column from each row's rule, [batch, 1].

        default: the column for all rules that `by_rule` lacks.
        by_rule: computes the column for the rule of this name; called only if the function carries the rule.
        """
        column: Any = default
        for name, compute in by_rule.items():
            if name == GREEDY_RULE or self.carries(name):
                column = op.Where(self.uses(op, name), compute(), column)
        return column

    def uses(self, op: Ops, name: str) -> Tensor:
        """Whether a row uses this rule: bool [batch, 1]."""
        return op.Equal(self.code, float(RULES[name].code))


@scope
def row_rules(op: Ops, carried: Collection[str], rule: Tensor, values: Tensor, parameters: RowParameters) -> RowRules:
    """Turn the node's inputs into columns.

    carried: the names of the rules that the function carries.
    rule: int32 [batch].
    values: float32 [batch, 2].
    """
    last = np.int32(len(ALL_RULES) - 1)  # the code of `none`
    known = op.And(op.GreaterOrEqual(rule, np.int32(0)), op.LessOrEqual(rule, last))
    code = op.Where(known, rule, last)
    lowest, highest, is_unused, is_count = (op.Gather(table, code, axis=0) for table in _interval_tables())
    in_interval = op.And(op.GreaterOrEqual(values, lowest), op.LessOrEqual(values, highest))
    has_type = op.Or(op.Not(is_count), op.Equal(op.Floor(values), values))
    is_valid = op.Or(is_unused, op.And(in_interval, has_type))
    used_values = op.Where(op.And(is_valid, op.Not(is_unused)), values, 0.0)
    v0, v1 = (op.Gather(used_values, [number], axis=1) for number in (0, 1))
    if not set(carried).issuperset(RULES):
        flags = [each.name in carried for each in ALL_RULES]
        known = op.And(known, op.Gather(np.array(flags), code, axis=0))
    column = op.Cast(op.Unsqueeze(code, [1]), to=1)
    return RowRules(
        code=op.Where(parameters.is_greedy, float(RULES[GREEDY_RULE].code), column),
        v0=op.Where(parameters.is_greedy, 1.0, v0),
        v1=v1,
        is_valid=op.And(op.Unsqueeze(known, [1]), op.Cast(all_true_in_row(op, is_valid), to=9)),
        carried=frozenset(carried),
    )


def _interval_tables() -> tuple[np.ndarray, ...]:
    """Tables [rules, 2] by a rule's code, for its values (v0, v1).

    Returns the lowest and the highest value, whether the rule does not use the value, and whether it is an integer.
    """
    intervals = [(*INTERVALS.get(rule.name, ()), _UNUSED, _UNUSED)[:2] for rule in ALL_RULES]
    lowest, highest = np.moveaxis(np.array(intervals, np.float32), 2, 0)
    return lowest, highest, np.isinf(highest), highest == LARGEST_COUNT


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
def row_sums(op: Ops, blocks: Tokens, largest: Tensor) -> RowSums:
    """Compute the sums of each row.

    blocks: the whole vocabulary.
    largest: the largest logit, float32 [batch, 1].
    """
    total = row_total(op, blocks.weight)
    # ln Z is ln(1 + rest), which is accurate also where `rest` is tiny.
    below_largest = op.Less(blocks.drop, 0.0)
    further_largest = op.Sub(row_count(op, op.Not(below_largest)), 1.0)  # equal to the largest; each has weight 1
    rest = op.Add(row_total(op, op.Where(below_largest, blocks.weight, 0.0)), further_largest)
    finite_count = row_count(op, blocks.is_finite)
    drop = op.Where(blocks.is_finite, blocks.drop, 0.0)
    span = row_maximum(op, op.Neg(drop))
    unit = op.Where(op.Greater(span, 0.0), span, 1.0)  # squares of large negative logits would overflow without it
    scaled_drop = op.Div(drop, over_blocks(op, unit))
    mean = op.Div(row_total(op, scaled_drop), finite_count)
    difference = op.Where(blocks.is_finite, op.Sub(scaled_drop, over_blocks(op, mean)), 0.0)
    variance = op.Div(row_total(op, op.Mul(difference, difference)), op.Max(op.Sub(finite_count, 1.0), 1.0))
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
def lowest_kept_drop(op: Ops, rules: RowRules, sums: RowSums, parameters: RowParameters) -> Tensor:
    """The smallest l - l_max that reaches each row's threshold: float32 [batch, 1].

    It is -LARGEST for a rule without a threshold, and positive if no token reaches the threshold.

    min_p, epsilon, eta and p_less have a threshold for probabilities. With r the threshold divided by the largest
    probability, the drop is Ts ln r.
    """
    if not rules.carries(*THRESHOLD_RULES):
        return op.Min(sums.total, -LARGEST)  # a column with as many rows as the batch
    log_value = row_log(op, rules.v0)
    log_epsilon = op.Add(log_value, sums.log_total)
    log_ratio = rules.choose(
        op,
        -LARGEST,
        min_p=lambda: log_value,
        epsilon=lambda: log_epsilon,
        eta=lambda: op.Min(log_epsilon, op.Add(op.Mul(log_value, 0.5), sums.mean_log_weight)),
        p_less=lambda: row_log(op, op.Div(sums.squared_total, sums.total)),
    )
    drop = op.Mul(log_ratio, parameters.selection_temperature)
    drop = rules.choose(op, drop, top_n_sigma=lambda: op.Neg(op.Mul(rules.v0, sums.deviation)))
    return op.Max(drop, -LARGEST)


@scope
def flat_size(op: Ops, rules: RowRules, sums: RowSums) -> Tensor:
    """Min-k's floor(tau / span), at most the number of finite tokens: float32 [batch, 1].

    If all finite logits are equal, it is that number for tau > 0, else 0.
    """
    has_span = op.Greater(sums.span, 0.0)
    size = op.Floor(op.Min(op.Div(rules.v0, op.Where(has_span, sums.span, 1.0)), sums.finite_count))
    return op.Where(has_span, size, op.Where(op.Greater(rules.v0, 0.0), sums.finite_count, 0.0))


def _entropy_terms(op: Ops, tokens: Tokens, sums: RowSums) -> Tensor:
    """-w ln p of each token: float32 [batch, 1, blocks, BLOCK]."""
    return op.Mul(tokens.weight, op.Sub(over_blocks(op, sums.log_total), tokens.a))


@scope
def top_h_pool_entropy(op: Ops, tokens: Tokens, rules: RowRules, sums: RowSums) -> Tensor:
    """The sum of -w ln p over Top-H's pool, the v1 largest logits: float32 [batch, 1].

    The pool must be among the descending logits, or the whole vocabulary.
    """
    size = min(tokens.count, LONGEST_SORT)
    last = op.Clip(op.Sub(rules.v1, 1.0), 0.0, float(size - 1))
    cut = over_blocks(op, op.GatherElements(tokens.descending, op.Cast(last, to=7), axis=1))
    above, equal = op.Greater(tokens.logits, cut), op.Equal(tokens.logits, cut)
    terms = _entropy_terms(op, tokens, sums)
    of_equal = op.Mul(op.Sub(rules.v1, row_count(op, above)), row_maximum(op, op.Where(equal, terms, 0.0)))
    of_pool = op.Add(row_total(op, op.Where(above, terms, 0.0)), of_equal)
    of_vocabulary = op.Mul(sums.total, op.Sub(sums.log_total, sums.mean_log_weight))
    return op.Where(op.GreaterOrEqual(rules.v1, sums.finite_count), of_vocabulary, of_pool)


@scope
def steepest_drop(op: Ops, descending: Tensor) -> tuple[Tensor, Tensor]:
    """The largest (l_i - l_(i+1)) / i of logits [batch, n], at least 0, and its first i: float32 [batch, 1]."""
    here = op.Slice(descending, [0], [-1], [1])
    following = op.Slice(descending, [1], [np.iinfo(np.int64).max], [1])
    number = op.CumSum(op.Cast(op.GreaterOrEqual(op.Abs(here), 0.0), to=1), 1)
    is_finite = op.Greater(following, -np.inf)
    decay = op.Where(is_finite, op.Div(op.Sub(here, following), number), -1.0)
    slope = op.ReduceMax(decay, [1], keepdims=1)
    numbers = op.Where(op.GreaterOrEqual(decay, slope), number, np.inf)
    return op.Max(slope, 0.0), op.ReduceMin(numbers, [1], keepdims=1)


@scope
def min_k_cliff(op: Ops, tokens: Tokens) -> Tensor:
    """The number of tokens before Min-k's cliff, the steepest drop of the sorted logits: float32 [batch, 1].

    Of equally steep drops, it is the first. After the sorted logits, the search jumps. With g the steepest
    (l_i - l_(i+1)) / i so far, a drop after token i is steeper only if it exceeds i g. So the logits from l_i - i g to
    l_i have no steeper drop among them, and the search jumps over them. These intervals grow, so that few jumps pass
    over a whole vocabulary.
    """
    slope, cliff = steepest_drop(op, tokens.descending)
    if tokens.count <= LONGEST_SORT:
        return cliff
    here = op.Max(op.Gather(tokens.descending, [LONGEST_SORT - 1], axis=1), -LARGEST)
    count = row_count(op, op.GreaterOrEqual(tokens.logits, over_blocks(op, here)))
    for _ in range(JUMPS):
        passed = op.GreaterOrEqual(tokens.logits, over_blocks(op, op.Sub(here, op.Mul(slope, count))))
        count = row_count(op, passed)
        lowest = _lowest(op, passed, tokens.logits)
        following = row_maximum(op, op.Where(passed, -np.inf, tokens.logits))
        is_finite = op.GreaterOrEqual(following, -LARGEST)
        drop = op.Where(is_finite, op.Div(op.Sub(lowest, following), count), 0.0)
        is_steeper = op.Greater(drop, slope)
        slope, cliff = op.Where(is_steeper, drop, slope), op.Where(is_steeper, count, cliff)
        here = op.Where(is_finite, following, lowest)
    return cliff


@scope
def _tokens_up_to_rule_limit(op: Ops, tokens: Tokens, keys: Tensor, rules: RowRules, sums: RowSums) -> Tensor:
    """The tokens that each row's rule keeps, under `LIMIT_RULES` by their order, terms and limit.

    Other rules have an infinite limit, and keep all tokens with a finite key. See `kept_tokens`.
    """
    has_whole_value = op.GreaterOrEqual(rules.v0, 1.0)  # for top_p and top_h: the value 1
    terms, is_upper_limit = tokens.weight, op.Less(rules.v0, rules.v0)  # false everywhere
    counts = rules.uses(op, GREEDY_RULE)
    if rules.carries("min_k"):
        counts = op.Or(counts, rules.uses(op, "min_k"))
    if rules.carries("top_h"):
        uses_top_h = rules.uses(op, "top_h")
        terms = op.Where(over_blocks(op, uses_top_h), _entropy_terms(op, tokens, sums), terms)
        counts = op.Or(counts, op.And(uses_top_h, has_whole_value))  # top_h = 1 keeps the whole pool, of v1 tokens
        is_upper_limit = op.And(uses_top_h, op.Not(has_whole_value))
    terms = op.Where(over_blocks(op, counts), 1.0, terms)
    mass = op.Mul(rules.v0, sums.total)
    limit = rules.choose(
        op,
        np.inf,
        top_k=lambda: rules.v0,
        top_p=lambda: op.Where(has_whole_value, np.inf, mass),
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
    lowest_drop = over_blocks(op, lowest_kept_drop(op, rules, sums, parameters))
    flags = op.And(tokens.is_finite, op.GreaterOrEqual(tokens.drop, lowest_drop))
    keys = tokens.logits
    if rules.carries("typical"):
        closeness = op.Neg(op.Abs(op.Sub(tokens.a, over_blocks(op, sums.mean_log_weight))))
        keys = op.Where(over_blocks(op, rules.uses(op, "typical")), closeness, keys)
    if rules.carries(*LIMIT_RULES):
        keys = op.Where(flags, keys, -np.inf)
        flags = _tokens_up_to_rule_limit(op, tokens, keys, rules, sums)
    else:
        flags = op.And(flags, op.Not(over_blocks(op, rules.uses(op, GREEDY_RULE))))
    # A rule that keeps nothing so far, and a greedy row, keep the lowest id of the largest logits.
    is_empty = op.Equal(row_count(op, flags), 0.0)
    largest = op.And(op.Equal(tokens.drop, 0.0), over_blocks(op, is_empty))
    flags = op.Or(flags, op.And(largest, op.Equal(rank_among(op, largest), 1.0)))
    lowest = _lowest(op, flags, tokens.logits)
    cut = over_blocks(op, lowest)
    kept_at_cut = op.And(flags, op.Equal(tokens.logits, cut))
    last_rank = op.Add(row_count(op, op.Greater(tokens.logits, cut)), row_count(op, kept_at_cut))
    is_proven = None
    if tokens.ids is not None:
        is_proven = _is_proven(op, tokens, rules, sums, _lowest(op, flags, keys), parameters)
    return KeptSet(flags, lowest, op.LessOrEqual(last_rank, float(CANDIDATES)), is_proven)


def _lowest(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    """The lowest value with a true flag: float32 [batch, 1]."""
    return op.Neg(row_maximum(op, op.Where(flags, op.Neg(values), -np.inf)))


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
    last = op.Gather(tokens.descending, [LIST - 1], axis=1)
    last_drop = op.Sub(last, sums.largest)
    is_complete = op.Equal(last, -np.inf)
    last_key, is_proven = last, op.Equal(rules.v0, rules.v0)  # true everywhere
    if rules.carries("typical"):
        uses_typical = rules.uses(op, "typical")
        a = op.Div(last_drop, parameters.selection_temperature)
        last_key = op.Where(uses_typical, op.Sub(a, sums.mean_log_weight), last)
        is_proven = op.Or(op.Not(uses_typical), op.LessOrEqual(last_key, 0.0))
    if rules.carries("top_h"):
        in_list = op.LessOrEqual(rules.v1, float(LIST))
        is_known = op.Or(in_list, op.GreaterOrEqual(rules.v1, sums.finite_count))
        is_proven = op.And(is_proven, op.Or(op.Not(rules.uses(op, "top_h")), is_known))
    if rules.carries("min_k"):
        slope, _ = steepest_drop(op, tokens.descending)
        remaining_span = op.Add(last_drop, sums.span)  # l_last - l_n
        is_steepest = op.Greater(slope, op.Div(remaining_span, float(LIST)))
        is_proven = op.And(is_proven, op.Or(op.Not(rules.uses(op, "min_k")), is_steepest))
    return op.Or(is_complete, op.And(is_proven, op.Greater(lowest_key, last_key)))


@scope
def draw_kept(op: Ops, tokens: Tokens, kept: KeptSet, parameters: RowParameters) -> DrawColumns:
    """Draw from the kept tokens (docs/contract/graph.md, section 5)."""
    logits = op.Where(kept.flags, tokens.logits, -np.inf)
    largest = row_maximum(op, logits)
    drop = op.Sub(logits, over_blocks(op, largest))
    weight = op.Exp(op.Div(drop, over_blocks(op, parameters.temperature)))
    total = row_total(op, weight)
    target = op.Mul(parameters.uniform, total)
    threshold, _ = largest_threshold(op, tokens, logits, weight, target)
    drawn_logit = op.Max(threshold, over_blocks(op, kept.lowest))
    above, equal = op.Greater(logits, drawn_logit), op.Equal(logits, drawn_logit)
    missing = op.Sub(target, row_total(op, op.Where(above, weight, 0.0)))
    rank = op.Add(op.Floor(op.Div(missing, row_maximum(op, op.Where(equal, weight, 0.0)))), 1.0)
    rank = op.Max(op.Min(rank, row_count(op, equal)), 1.0)
    # The position of the token is the number of tokens before it.
    position = op.Cast(row_count(op, op.Less(rank_among(op, equal), over_blocks(op, rank))), to=7)
    token = position if tokens.ids is None else op.GatherElements(tokens.ids, position, axis=1)
    drawn_drop = op.Sub(op.Squeeze(drawn_logit, [2, 3]), largest)
    logprob = op.Sub(op.Div(drawn_drop, parameters.temperature), row_log(op, total))
    return DrawColumns(token, logprob, op.Cast(row_count(op, kept.flags), to=7))


@scope
def crop_mass(op: Ops, tokens: Tokens, kept: KeptSet) -> Tensor:
    """The sum of the kept tokens' weights at Ts: float32 [batch, 1]."""
    return row_total(op, op.Where(kept.flags, tokens.weight, 0.0))
