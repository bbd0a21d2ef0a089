"""The tokens of a row in blocks: their sums, counts and logarithms, and thresholds for their values.

Rules keep the tokens whose key is largest, up to a sum of terms, so a kept set is a threshold for keys; a draw is one
for kept logits. `largest_threshold` finds both, by a sort of at most `LONGEST_SORT` tokens, or by a search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.export.sampler.candidates import first_position
from topw_deploy.export.sampler.node import BLOCK, LARGEST, RowParameters
from topw_deploy.export.sampler.ops import Ops, Tensor, scope

LONGEST_SORT = 3840
"""The largest number of values that TensorRT's TopK can sort."""

LIST = 1024
"""The number of largest logits that are tried before the whole vocabulary."""

_LEAST_LOG_WEIGHT = -1e4  # makes log weights of -inf finite; the weight is 0 long before
_SERIES_BELOW = 0.01  # below this x, three terms of the series of ln(1 + x) have float32 precision
_VECTOR = 16  # columns that onnxruntime's logarithm rounds alike
_PER_ROUND = 3  # thresholds per round of the search; with more there are fewer rounds, which together take longer
_BELOW_ONE = 1 - 2.0**-24  # turns the condition sum > limit of a threshold into sum >= limit

# Of normal float32 numbers.
_MANTISSA_BITS = 23
_EXPONENTS = range(-126, 128)


@dataclass(frozen=True)
class Tokens:
    """The tokens of the whole vocabulary, or of a list, in blocks [batch, 1, blocks, BLOCK], in the order of their ids.

    The second axis is for thresholds.

    logits: float32; -inf for banned tokens and in the padding.
    drop: l - l_max, float32.
    is_finite: bool.
    a: the log weight, see `rules.RowSums`, at least -1e4; float32.
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


@scope
def block_sums(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, n, blocks, BLOCK] to [batch, n, 1, 1]: first in blocks, as long float32 sums lose digits."""
    return op.ReduceSum(op.ReduceSum(values, [3], keepdims=1), [2], keepdims=1)


@scope
def row_total(op: Ops, values: Tensor) -> Tensor:
    """Sum values [batch, 1, blocks, BLOCK] to [batch, 1].

    onnxruntime sums a single row in another order than several, so each row is summed twice.
    """
    inner = op.ReduceSum(values, [3], keepdims=0)
    totals = op.ReduceSum(op.Concat(inner, inner, axis=1), [2], keepdims=0)
    return op.Gather(totals, [0], axis=1)


@scope
def row_count(op: Ops, flags: Tensor) -> Tensor:
    """Count the true flags of [batch, 1, blocks, BLOCK]: float32 [batch, 1]."""
    return op.Squeeze(block_sums(op, op.Cast(flags, to=1)), [2, 3])


@scope
def row_maximum(op: Ops, values: Tensor) -> Tensor:
    """The maximum of each row of [batch, 1, blocks, BLOCK]: [batch, 1]."""
    return op.ReduceMax(values, [2, 3], keepdims=0)


def over_blocks(op: Ops, column: Tensor) -> Tensor:
    """Reshape a column [batch, 1] to [batch, 1, 1, 1], which broadcasts against blocks."""
    return op.Unsqueeze(column, [2, 3])


def flatten_blocks(op: Ops, values: Tensor) -> Tensor:
    """Reshape [batch, 1, blocks, BLOCK] to [batch, blocks * BLOCK]."""
    return op.Reshape(values, [0, -1])


@scope
def list_tokens(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters) -> Tokens:
    """The `LIST` largest tokens of each row. Does not depend on how TopK orders equal logits.

    logits: edited and masked, float32 [batch, padded].
    largest: the largest logit of each row, float32 [batch, 1].
    """
    descending, ids = op.TopK(logits, [LIST], axis=1)
    ids, order = op.TopK(ids, [LIST], axis=1, largest=0)
    return _new_tokens(op, op.GatherElements(descending, order, axis=1), largest, parameters, LIST, ids, descending)


@scope
def vocabulary_tokens(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters, count: int) -> Tokens:
    """All `count` tokens; see `list_tokens`."""
    descending, _ = op.TopK(logits, [min(max(count, 2), LONGEST_SORT)], axis=1)
    return _new_tokens(op, logits, largest, parameters, count, None, descending)


def _new_tokens(op: Ops, logits: Tensor, largest: Tensor, parameters: RowParameters, *rest: Any) -> Tokens:
    grid = op.Reshape(logits, [0, 1, -1, BLOCK])
    drop = op.Sub(grid, over_blocks(op, largest))
    a = op.Max(op.Div(drop, over_blocks(op, parameters.selection_temperature)), _LEAST_LOG_WEIGHT)
    return Tokens(grid, drop, op.Greater(grid, -np.inf), a, op.Exp(a), *rest)


@scope
def row_log(op: Ops, column: Tensor) -> Tensor:
    """The logarithm of a column [batch, 1], whose bits do not depend on a row's position in the batch.

    onnxruntime rounds full vectors and remainders differently, so each row becomes a full vector.
    """
    return op.Gather(op.Log(op.Expand(column, [1, _VECTOR])), [0], axis=1)


@scope
def log_one_plus(op: Ops, x: Tensor) -> Tensor:
    """ln(1 + x) for x >= 0, accurate for small x."""
    series = op.Mul(x, op.Sub(1.0, op.Mul(x, op.Sub(0.5, op.Div(x, 3.0)))))
    return op.Where(op.Less(x, _SERIES_BELOW), series, row_log(op, op.Add(x, 1.0)))


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
    descending, order = op.TopK(flatten_blocks(op, keys), [count], axis=1)
    terms = op.GatherElements(flatten_blocks(op, terms), order, axis=1)
    sums = op.CumSum(op.Cast(terms, to=11), 1)
    is_reached = op.And(op.Greater(sums, op.Cast(limit, to=11)), op.Greater(descending, -np.inf))
    first = first_position(op, is_reached, count, count)  # if none is reached, the column of -LARGEST that follows
    thresholds = op.Max(op.Pad(descending, [0, 0, 0, 1], -LARGEST), -LARGEST)
    return over_blocks(op, op.GatherElements(thresholds, first, axis=1)), op.Less(first, count)


@scope
def _search_threshold(op: Ops, keys: Tensor, terms: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `largest_threshold`. Exact for every float32 number, and faster than a sort of a large vocabulary.

    Tries three thresholds in each of 17 rounds: five rounds find the exponent, twelve the mantissa.
    """
    first, spacing = _float32_runs()
    multiples = np.arange(1, 1 + _PER_ROUND).reshape(1, -1, 1, 1)
    limit = over_blocks(op, limit)

    def is_above(thresholds: Tensor) -> Tensor:
        """Whether each of the thresholds [batch, n, 1, 1] has a sum above the limit."""
        return op.Greater(block_sums(op, op.Where(op.GreaterOrEqual(keys, thresholds), terms, 0.0)), limit)

    def last_above(ascending: Tensor, thresholds: Tensor, otherwise: Tensor) -> Tensor:
        """The last of `ascending` whose threshold has a sum above the limit, or `otherwise`: [batch, 1, 1, 1]."""
        return op.ReduceMax(op.Where(is_above(thresholds), ascending, otherwise), [1], keepdims=1)

    run = op.constant(np.zeros((1, 1, 1, 1), np.int64))
    for bit in range(8, -1, -2):
        runs = op.Add(run, multiples << bit)
        run = last_above(runs, op.Gather(first, runs, axis=0), run)
    threshold, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in range(_MANTISSA_BITS - 1, -1, -2):
        thresholds = op.Add(threshold, op.Mul(unit, (multiples << bit).astype(np.float32)))
        threshold = last_above(thresholds, thresholds, threshold)
    # Again with three thresholds, because onnxruntime would sum a single one in another order.
    is_reached = is_above(op.Expand(threshold, [1, _PER_ROUND, 1, 1]))
    return threshold, op.Gather(op.Squeeze(is_reached, [2, 3]), [0], axis=1)


def _float32_runs() -> tuple[np.ndarray, np.ndarray]:
    """The first number of each run of equally spaced float32 numbers, ascending, and the spacing of each run.

    float32 [1024] each; the unused last entries are infinite, with spacing 1.
    """
    smallest = 2.0**-149
    runs = [(-(2.0 ** (e + 1)) if e < 127 else -LARGEST, 2.0 ** (e - _MANTISSA_BITS)) for e in reversed(_EXPONENTS)]
    runs += [(-(2.0**-126), smallest), (0.0, smallest)]
    runs += [(2.0**e, 2.0 ** (e - _MANTISSA_BITS)) for e in _EXPONENTS]
    runs += [(np.inf, 1.0)] * (1024 - len(runs))
    first, spacing = np.array(runs, np.float32).T
    return first, spacing


@scope
def rank_among(op: Ops, flags: Tensor) -> Tensor:
    """The number of true flags up to each id, inclusive: float32 [batch, 1, blocks, BLOCK]."""
    numbers = op.Cast(flags, to=1)
    inner = op.CumSum(numbers, 3)
    totals = op.ReduceSum(numbers, [3], keepdims=1)
    return op.Add(inner, op.Sub(op.CumSum(totals, 2), totals))


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
    least = op.Where(is_upper_limit, limit, op.Mul(limit, _BELOW_ONE))
    cut, is_reached = largest_threshold(op, tokens, keys, terms, least)
    above, equal = op.Greater(keys, cut), op.Equal(keys, cut)
    term = op.Max(row_maximum(op, op.Where(equal, terms, 0.0)), float(np.finfo(np.float32).tiny))
    missing = op.Div(op.Sub(limit, row_total(op, op.Where(above, terms, 0.0))), term)
    equal_count = op.Where(is_upper_limit, op.Floor(missing), op.Max(op.Ceil(missing), 1.0))
    tied = op.And(equal, op.LessOrEqual(rank_among(op, equal), over_blocks(op, equal_count)))
    all_tokens = op.And(op.Greater(keys, -np.inf), over_blocks(op, op.Not(is_reached)))
    may_choose = op.Or(op.Not(is_upper_limit), op.Greater(limit, 0.0))
    return op.And(op.Or(op.Or(above, tied), all_tokens), over_blocks(op, may_choose))
