"""The kept set from a list of the largest logits, and the proof that no other token belongs to it.

See docs/contract/rules.md, section 3. The list consists of the candidates, of more logits, or of the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import (
    CANDIDATES,
    CandidateLogits,
    DrawColumns,
    first_position,
    kept_candidates,
    token_at,
)
from topw_deploy.export.tail.inputs import RowParameters, all_true, without_padding
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RowRules
from topw_deploy.export.tail.rules.statistics import LEAST_LOG_WEIGHT, RuleStatistics

LONGEST_SORT = 3840
"""The largest number of values that TensorRT's TopK can sort."""

_NUMPY_TYPES = {1: np.float32, 11: np.float64}  # by ONNX's number of the type


@dataclass(frozen=True)
class SortedList:
    """The largest logits of each row, descending; [batch, width] unless stated otherwise.

    logits: float32.
    ids: int64.
    candidates: logits and ids again, if equal logits may be in any order; None if they are in the order of their ids.
    is_double: whether sums are computed in double precision.
    is_long: whether there may be more than `LONGEST_SORT` tokens.
    count: the number of tokens without padding, int64 [1].
    last_position: count - 1, int64 [1].
    positions: 0 to width - 1, int64 [width].
    is_finite: bool.
    drop: l - l_max, float32.
    a: the log weight drop / Ts, at least LEAST_LOG_WEIGHT, float32.
    weight: exp(a), float32.
    finite_count: the number of finite logits in the list, int64 [batch, 1].
    last: the last logit, float32 [batch, 1]. No token outside the list has a larger one.
    is_complete: whether no token outside the list is finite, bool [batch, 1].
    """

    logits: Tensor
    ids: Tensor
    candidates: CandidateLogits | None
    is_double: bool
    is_long: bool
    count: Tensor
    last_position: Tensor
    positions: Tensor
    is_finite: Tensor
    drop: Tensor
    a: Tensor
    weight: Tensor
    finite_count: Tensor
    last: Tensor
    is_complete: Tensor

    @property
    def sum_type(self) -> int:
        """ONNX's number of the type in which sums are computed."""
        return 11 if self.is_double else 1

    def prefix_sums(self, op: Ops, values: Tensor) -> Tensor:
        """The inclusive prefix sums of float32 values [batch, width]."""
        return op.CumSum(self.cast_for_sums(op, values), op.constant(1, np.int64))

    def cast_for_sums(self, op: Ops, values: Tensor) -> Tensor:
        """Cast float32 values to the type of the sums."""
        return op.Cast(values, to=self.sum_type) if self.is_double else values


@dataclass(frozen=True)
class ListCrop:
    """The crop and the draw of each row under its rule other than Top-W, from a list.

    draw: see `DrawColumns`.
    crop_mass: the sum of the crop's weights, float32 [batch, 1].
    kept: which tokens of the list are kept, bool [batch, width], in the order of `SortedList.ids`.
    is_certified: whether all kept tokens are among the `CANDIDATES` largest, bool [batch, 1].
    is_proven: whether no token outside the list can be kept, bool [batch, 1].
    """

    draw: DrawColumns
    crop_mass: Tensor
    kept: Tensor
    is_certified: Tensor
    is_proven: Tensor


@scope
def sorted_list(
    op: Ops,
    logits: Tensor,
    statistics: RuleStatistics,
    parameters: RowParameters,
    vocab: int,
    length: int | Tensor,
    by_id: bool = True,
) -> SortedList:
    """List the `length` largest of the logits [batch, padded]. Sums are in double precision.

    length: an int, or a tensor int64 [1] in the form `onnxruntime`.
    by_id: rely on ONNX's TopK, which orders equal logits by index. If false, `length` must be an int that needs no
        padding; see `unpadded_count`.
    """
    unpadded = without_padding(op, logits, vocab)
    count = op.constant([length], np.int64) if isinstance(length, int) else length
    values, ids = op.TopK(unpadded, count, axis=1)
    candidates = None if by_id else CandidateLogits(values, ids, length)
    return _new_list(op, values, ids, length, length, candidates, statistics, parameters, vocab)


@scope
def candidate_list(
    op: Ops, candidates: CandidateLogits, statistics: RuleStatistics, parameters: RowParameters, vocab: int
) -> SortedList:
    """List the candidates. Sums are in float32."""
    logits, ids, width, count = candidates.logits, candidates.ids, candidates.width, candidates.count
    return _new_list(op, logits, ids, width, count, candidates, statistics, parameters, vocab, is_double=False)


def _new_list(
    op: Ops, logits: Tensor, ids: Tensor, width: int | Tensor, length: int | Tensor, candidates: CandidateLogits | None,
    statistics: RuleStatistics, parameters: RowParameters, vocab: int, *, is_double: bool = True,
) -> SortedList:  # fmt: skip
    """Compute the fields of a list. width, length: the number of columns with and without padding."""
    if isinstance(length, int):
        count, last_position = (op.constant([value], np.int64) for value in (length, length - 1))
        has_all_tokens = op.constant(length == vocab, np.bool_)
    else:
        count, last_position = length, op.Sub(length, op.constant([1], np.int64))
        has_all_tokens = op.Equal(length, op.constant([vocab], np.int64))
    is_finite = op.Greater(logits, op.constant(-np.inf))
    drop = op.Sub(logits, statistics.largest)
    a = op.Max(op.Div(drop, parameters.selection_temperature), op.constant(LEAST_LOG_WEIGHT))
    last = op.Gather(logits, last_position, axis=1)
    return SortedList(
        logits=logits,
        ids=ids,
        candidates=candidates,
        is_double=is_double,
        is_long=not isinstance(length, int) or length > LONGEST_SORT,
        count=count,
        last_position=last_position,
        positions=_positions(op, width),
        is_finite=is_finite,
        drop=drop,
        a=a,
        weight=op.Exp(a),
        finite_count=_true_count(op, is_finite),
        last=last,
        is_complete=op.Or(has_all_tokens, op.Equal(last, op.constant(-np.inf))),
    )


@scope
def list_crop(
    op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics, parameters: RowParameters
) -> ListCrop:
    """Compute each row's crop and draw by its rule, as if the list were the whole vocabulary."""
    one = op.constant(1, np.int64)
    length, is_proven = _kept_prefix(op, tokens, rules, statistics)
    # `chosen` has the first positions. Where equal logits may be in any order, `kept` has the lowest of their ids.
    chosen = op.Less(tokens.positions, length)
    kept = chosen if tokens.candidates is None else kept_candidates(op, tokens.candidates, op.Sub(length, one))
    if rules.carries("typical"):
        uses_typical = rules.uses(op, "typical")
        typical_set, is_typical_proven = _typical_set_if_used(op, tokens, rules, statistics, uses_typical)

        def select(of_typical: Tensor, of_others: Tensor) -> Tensor:
            return op.Or(op.And(uses_typical, of_typical), op.And(op.Not(uses_typical), of_others))

        chosen, kept = select(typical_set, chosen), select(typical_set, kept)
        is_proven = select(is_typical_proven, is_proven)
    weight = tokens.cast_for_sums(op, op.Where(chosen, tokens.weight, op.constant(0.0)))
    chosen_positions = op.Where(chosen, tokens.positions, op.constant(0, np.int64))
    last = op.ReduceMax(chosen_positions, op.constant([1], np.int64), keepdims=1)
    return ListCrop(
        draw=_draw_from_list(op, tokens, chosen, last, parameters),
        crop_mass=op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1),
        kept=kept,
        is_certified=op.Less(last, op.constant(CANDIDATES, np.int64)),
        is_proven=is_proven,
    )


def _positions(op: Ops, count: int | Tensor) -> Tensor:
    """The numbers 0 to count - 1, int64 [count]; a constant, unless they are many or the count is a tensor.

    Only lists in the form `onnxruntime`, which may use the operator Range, are as long.
    """
    if isinstance(count, int) and count <= LONGEST_SORT:
        return op.constant(np.arange(count), np.int64)
    end = op.constant(count, np.int64) if isinstance(count, int) else op.Squeeze(count)
    return op.Range(op.constant(0, np.int64), end, op.constant(1, np.int64))


def _true_count(op: Ops, flags: Tensor) -> Tensor:
    """Count the true flags of [batch, width]: int64 [batch, 1]."""
    return op.ReduceSum(op.Cast(flags, to=7), op.constant([1], np.int64), keepdims=1)


@scope
def _kept_prefix(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> tuple[Tensor, Tensor]:
    """The length of the kept prefix for all rules but typical, at least 1, int64 [batch, 1]; and whether it is proven.

    It is proven if the list holds all finite logits. Otherwise the rule's function must prove it, and the last kept
    logit must be larger than the list's last one, with which tokens outside may tie.
    """
    one = op.constant(1, np.int64)
    reaches_threshold = op.And(tokens.is_finite, op.GreaterOrEqual(tokens.drop, statistics.lowest_kept_drop))
    length = rules.choose(op, _true_count(op, reaches_threshold), top_k=lambda: op.Cast(rules.v0, to=7))
    is_unproven = []
    for name, prefix in (("top_p", _top_p_prefix), ("top_h", _top_h_prefix), ("min_k", _min_k_prefix)):
        if rules.carries(name):
            uses_rule, (rule_length, is_rule_proven) = rules.uses(op, name), prefix(op, tokens, rules, statistics)
            length = op.Where(uses_rule, rule_length, length)
            is_unproven.append(op.And(uses_rule, op.Not(is_rule_proven)))
    length = op.Max(op.Min(length, tokens.finite_count), one)
    is_proven = op.Greater(op.GatherElements(tokens.logits, op.Sub(length, one), axis=1), tokens.last)
    for flags in is_unproven:
        is_proven = op.And(is_proven, op.Not(flags))
    return length, op.Or(tokens.is_complete, is_proven)


@scope
def _top_p_prefix(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> tuple[Tensor, Tensor]:
    """The length of the shortest prefix with the mass v0, or of all tokens if v0 = 1; and whether it has this mass."""
    keeps_all = op.GreaterOrEqual(rules.v0, op.constant(1.0))
    target = op.Where(keeps_all, op.constant(np.inf), op.Mul(rules.v0, statistics.total))
    return _shortest_prefix(op, tokens, tokens.weight, target)


def _shortest_prefix(op: Ops, tokens: SortedList, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The length of the shortest prefix with the mass `target`, and whether there is one; else all finite tokens.

    weight: the weights to add up, float32 [batch, width].
    target: float32 [batch, 1].
    """
    one = op.constant(1, np.int64)
    reaches_target = op.GreaterOrEqual(tokens.prefix_sums(op, weight), tokens.cast_for_sums(op, target))
    first = first_position(op, reaches_target, tokens.positions, op.Sub(tokens.finite_count, one))
    return op.Add(first, one), op.Greater(_true_count(op, reaches_target), op.constant(0, np.int64))


def _top_h_pool_size(op: Ops, rules: RowRules, statistics: RuleStatistics) -> Tensor:
    """The number of tokens in Top-H's pool, int64 [batch, 1]."""
    return op.Cast(op.Min(rules.v1, statistics.finite_count), to=7)


def _top_h_entropy_terms(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> Tensor:
    """-w ln p of each token in Top-H's pool, 0 of other tokens: float32 [batch, width]."""
    terms = op.Mul(tokens.weight, op.Sub(statistics.log_total, tokens.a))
    return op.Where(op.Less(tokens.positions, _top_h_pool_size(op, rules, statistics)), terms, op.constant(0.0))


@scope
def top_h_pool_entropy(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> Tensor:
    """The sum of -w ln p over Top-H's pool, float32 [batch, 1].

    The pool must lie in the list or be the whole vocabulary.
    """
    terms = _top_h_entropy_terms(op, tokens, rules, statistics)
    of_list = op.ReduceSum(terms, op.constant([1], np.int64), keepdims=1)
    of_vocabulary = op.Mul(statistics.total, op.Sub(statistics.log_total, statistics.mean_log_weight))
    return op.Where(op.GreaterOrEqual(rules.v1, statistics.finite_count), of_vocabulary, of_list)


@scope
def _top_h_prefix(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> tuple[Tensor, Tensor]:
    """The length of Top-H's prefix, and whether it is proven.

    If the pool has tokens outside the list, each adds between 0 and the list's last term to the pool's entropy, because
    -p ln p rises up to p = 1 / e. The length is proven if both extremes give the same one, and it ends in the list.
    """
    one, zero = (op.constant(value, np.int64) for value in (1, 0))
    pool_size, terms = _top_h_pool_size(op, rules, statistics), _top_h_entropy_terms(op, tokens, rules, statistics)
    sums = tokens.prefix_sums(op, terms)
    listed_entropy, last_term = (
        op.Gather(tokens.cast_for_sums(op, values), tokens.last_position, axis=1) for values in (sums, terms)
    )
    missing = op.Max(op.Sub(pool_size, tokens.count), zero)

    def prefix_length(entropy: Tensor) -> Tensor:
        limit = op.Mul(tokens.cast_for_sums(op, rules.v0), entropy)
        is_positive = op.Greater(limit, op.constant(0.0, _NUMPY_TYPES[tokens.sum_type]))
        count = _true_count(op, op.And(op.LessOrEqual(sums, limit), is_positive))
        return op.Max(op.Min(count, pool_size), one)

    least = prefix_length(listed_entropy)
    most = prefix_length(op.Add(listed_entropy, op.Mul(last_term, op.Cast(missing, to=tokens.sum_type))))
    ends_in_list = op.Or(op.Equal(missing, zero), op.Less(least, tokens.count))
    return least, op.And(op.Equal(least, most), ends_in_list)


@scope
def _min_k_prefix(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> tuple[Tensor, Tensor]:
    """The length of Min-k's prefix, and whether no steeper drop can follow the list."""
    slope, cliff = steepest_drop(op, tokens.logits)
    remaining_span = op.Add(op.Sub(tokens.last, statistics.largest), statistics.span)  # l_last - l_n
    largest_later_slope = op.Div(remaining_span, op.Cast(tokens.count, to=1))
    return op.Max(cliff, op.Cast(statistics.flat_size, to=7)), op.Greater(slope, largest_later_slope)


@scope
def steepest_drop(op: Ops, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest (l_i - l_(i+1)) / i of descending logits [batch, n], float32, and its first i, int64: [batch, 1]."""
    axis, start = op.constant([1], np.int64), op.constant([0], np.int64)
    here = op.Slice(logits, start, op.constant([-1], np.int64), axis)
    following = op.Slice(logits, axis, op.constant([np.iinfo(np.int64).max], np.int64), axis)
    ones = op.Cast(op.GreaterOrEqual(op.Abs(here), op.constant(0.0)), to=1)
    number = op.CumSum(ones, op.constant(1, np.int64))
    is_finite = op.Greater(following, op.constant(-np.inf))
    decay = op.Where(is_finite, op.Div(op.Sub(here, following), number), op.constant(-1.0))
    slope = op.ReduceMax(decay, axis, keepdims=1)
    steepest_numbers = op.Where(op.GreaterOrEqual(decay, slope), number, op.constant(np.inf))
    return slope, op.Cast(op.ReduceMin(steepest_numbers, axis, keepdims=1), to=7)


def _typical_set_if_used(
    op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics, uses_typical: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of `_typical_set`. For a long list it is computed only if a row uses the rule; else it is arbitrary.

    Only the form `onnxruntime` has long lists.
    """
    if not tokens.is_long:
        return _typical_set(op, tokens, rules, statistics)
    typical_set, is_proven = op.branch(
        all_true(op, op.Not(uses_typical)),
        lambda: [tokens.is_finite, uses_typical],
        lambda: _typical_set(op, tokens, rules, statistics),
    )
    return typical_set, is_proven


@scope
def _typical_set(op: Ops, tokens: SortedList, rules: RowRules, statistics: RuleStatistics) -> tuple[Tensor, Tensor]:
    """The tokens with a nearest to its mean and together the mass v0, bool [batch, width]; and whether they are proven.

    They are proven if all tokens outside the list, whose a is at most the list's last one, are farther from the mean.
    If equal logits may be in any order, the cut must also not separate tokens of equal distance.
    """
    axis, width = op.constant(1, np.int64), op.Shape(tokens.logits, start=1, end=2)
    distance = op.Where(tokens.is_finite, op.Abs(op.Sub(tokens.a, statistics.mean_log_weight)), op.constant(np.inf))
    sorted_distance, position = op.TopK(distance, width, axis=1, largest=0)
    weight = op.GatherElements(op.Where(tokens.is_finite, tokens.weight, op.constant(0.0)), position, axis=1)
    count, reaches_mass = _shortest_prefix(op, tokens, weight, op.Mul(rules.v0, statistics.total))
    cut = op.GatherElements(sorted_distance, op.Sub(count, op.constant(1, np.int64)), axis=1)
    nearer, equal = op.Less(distance, cut), op.Equal(distance, cut)
    kept_equal = op.Sub(count, _true_count(op, nearer))
    tied = op.And(equal, op.LessOrEqual(op.CumSum(op.Cast(equal, to=7), axis), kept_equal))
    last = op.Gather(tokens.a, tokens.last_position, axis=1)
    others_are_farther = op.And(reaches_mass, op.Greater(op.Sub(statistics.mean_log_weight, last), cut))
    is_proven = op.Or(tokens.is_complete, others_are_farther)
    if tokens.candidates is not None:
        is_proven = op.And(is_proven, op.Equal(_true_count(op, equal), kept_equal))
    return op.Or(nearer, tied), is_proven


@scope
def _draw_from_list(
    op: Ops, tokens: SortedList, chosen: Tensor, last_chosen: Tensor, parameters: RowParameters
) -> DrawColumns:
    """Draw from the chosen positions, bool [batch, width]. last_chosen: the last of them, int64 [batch, 1]."""
    axis = op.constant([1], np.int64)
    logits = op.Where(chosen, tokens.logits, op.constant(-np.inf))
    drop = op.Div(op.Sub(logits, op.ReduceMax(logits, axis, keepdims=1)), parameters.temperature)
    mass = tokens.prefix_sums(op, op.Exp(drop))
    total = op.GatherElements(mass, last_chosen, axis=1)
    reached = op.Greater(mass, op.Mul(tokens.cast_for_sums(op, parameters.uniform), total))
    position = first_position(op, reached, tokens.positions, last_chosen)
    if tokens.candidates is None:
        token = op.GatherElements(tokens.ids, position, axis=1)
    else:
        token = token_at(op, tokens.candidates, position)
    # The logarithms of whole rows, gathered afterwards, do not depend on a row's position in the batch.
    log_total = op.Cast(op.GatherElements(op.Log(mass), last_chosen, axis=1), to=1)
    return DrawColumns(token, op.Sub(op.GatherElements(drop, position, axis=1), log_total), _true_count(op, chosen))
