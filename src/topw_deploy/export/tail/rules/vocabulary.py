"""The kept set and the draw over the whole vocabulary, with static shapes and without a sort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, Candidates, Drawn
from topw_deploy.export.tail.inputs import LARGEST, Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import flat_size
from topw_deploy.export.tail.rules.cliff import cliff
from topw_deploy.export.tail.rules.inputs import RuleRows
from topw_deploy.export.tail.rules.search import largest_threshold
from topw_deploy.export.tail.rules.statistics import (
    Statistics,
    Vocabulary,
    count_of,
    largest_of,
    lowest_drop,
    over_blocks,
    total_of,
)


@dataclass(frozen=True)
class Kept:
    """A kept set.

    flags: bool [batch, blocks, BLOCK].
    certified: bool [batch, 1], whether it lies among the `CANDIDATES` largest logits.
    """

    flags: Tensor
    certified: Tensor


@scope
def earlier(op: Ops, flags: Tensor) -> Tensor:
    """The number of true flags up to each token in the order of ids, [batch, blocks, BLOCK] float32."""
    numbers = op.Cast(flags, to=1)
    inner = op.CumSum(numbers, op.constant(2, np.int64))
    totals = op.ReduceSum(numbers, op.constant([2], np.int64), keepdims=0)
    before = op.Sub(op.CumSum(totals, op.constant(1, np.int64)), totals)
    return op.Add(inner, op.Unsqueeze(before, op.constant([2], np.int64)))


def _sum_where(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    return total_of(op, op.Where(flags, values, op.constant(0.0)))


def _or_banned(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    return op.Where(flags, values, op.constant(-np.inf))


@scope
def first_tokens(op: Ops, words: Vocabulary, count: Tensor) -> Tensor:
    """The first `count` tokens, float32 [batch, 1]; all if there are fewer. bool [batch, blocks, BLOCK]"""

    def enough(t: Tensor) -> Tensor:
        return op.GreaterOrEqual(count_of(op, op.GreaterOrEqual(words.logits, over_blocks(op, t))), count)

    cut = over_blocks(op, largest_threshold(op, enough, count))
    above, equal = op.Greater(words.logits, cut), op.Equal(words.logits, cut)
    room = op.Sub(count, count_of(op, above))
    tied = op.And(equal, op.LessOrEqual(earlier(op, equal), over_blocks(op, room)))
    some = op.Greater(count_of(op, words.finite), count)
    return op.And(words.finite, op.Or(op.Or(above, tied), op.Not(over_blocks(op, some))))


@scope
def by_mass(op: Ops, keys: Tensor, terms: Tensor, limit: Tensor, beyond: Tensor) -> Tensor:
    """The shortest list of tokens, by descending key, whose terms sum to at least `limit`.

    keys, terms: float32 [batch, blocks, BLOCK].
    beyond: bool [batch, 1], rows that want the longest list with a sum of at most `limit` (Top-H), one token at least.

    Returns all tokens with a finite key if no list is as long; bool [batch, blocks, BLOCK]. Ids break ties.
    """

    def reaches(t: Tensor) -> Tensor:
        total = _sum_where(op, op.GreaterOrEqual(keys, over_blocks(op, t)), terms)
        more, enough = op.Greater(total, limit), op.GreaterOrEqual(total, limit)
        return op.Or(more, op.And(enough, op.Not(beyond)))

    lowest = largest_threshold(op, reaches, limit)
    cut = over_blocks(op, lowest)
    above, equal = op.Greater(keys, cut), op.Equal(keys, cut)
    one, zero = op.constant(1.0), op.constant(0.0)
    each = op.Max(largest_of(op, op.Where(equal, terms, zero)), op.constant(float(np.finfo(np.float32).tiny)))
    missing = op.Div(op.Sub(limit, _sum_where(op, above, terms)), each)
    least = op.Where(op.Greater(count_of(op, above), zero), zero, one)
    room = op.Where(beyond, op.Max(op.Floor(missing), least), op.Max(op.Ceil(missing), one))
    tied = op.And(equal, op.LessOrEqual(earlier(op, equal), over_blocks(op, room)))
    listed = op.Or(above, tied)
    everything = op.And(op.Greater(keys, op.constant(-np.inf)), op.Not(over_blocks(op, reaches(lowest))))
    return op.Or(listed, everything)


@scope
def kept_tokens(
    op: Ops, words: Vocabulary, candidates: Candidates, ruled: RuleRows, found: Statistics, rows: Rows
) -> Kept:
    count = ruled.choose(
        op,
        op.constant(LARGEST),
        top_k=lambda: ruled.v0,
        top_h=lambda: ruled.v1,
        min_k=lambda: op.Max(cliff(op, words, candidates), op.Cast(flat_size(op, ruled, found), to=1)),
    )
    pool = op.And(
        first_tokens(op, words, count),
        op.GreaterOrEqual(words.drop, over_blocks(op, lowest_drop(op, ruled, found, rows))),
    )
    typical, top_h = over_blocks(op, ruled.has(op, "typical")), ruled.has(op, "top_h")
    distance = op.Neg(op.Abs(op.Sub(words.a, over_blocks(op, found.mean))))
    entropy = op.Mul(words.weight, op.Sub(over_blocks(op, found.log_total), words.a))
    terms = op.Where(over_blocks(op, top_h), entropy, words.weight)
    infinite = op.constant(np.inf)
    share = op.Mul(ruled.v0, found.total)
    limit = ruled.choose(
        op,
        infinite,
        top_p=lambda: op.Where(op.Less(ruled.v0, op.constant(1.0)), share, infinite),
        typical=lambda: share,
        top_h=lambda: op.Mul(ruled.v0, _sum_where(op, pool, entropy)),
    )
    single = op.And(top_h, op.LessOrEqual(limit, op.constant(0.0)))  # other weights round to 0
    least = op.Where(single, op.constant(0.0), op.constant(-LARGEST))
    pool = op.And(pool, op.GreaterOrEqual(words.drop, over_blocks(op, least)))
    keys = _or_banned(op, pool, op.Where(typical, distance, words.logits))
    flags = by_mass(op, keys, terms, limit, top_h)
    lowest = op.Neg(largest_of(op, op.Neg(op.Where(flags, words.logits, op.constant(np.inf)))))
    cut = over_blocks(op, lowest)
    place = op.Add(
        count_of(op, op.Greater(words.logits, cut)), count_of(op, op.And(flags, op.Equal(words.logits, cut)))
    )
    return Kept(flags, op.LessOrEqual(place, op.constant(float(CANDIDATES))))


@scope
def draw_kept(op: Ops, words: Vocabulary, kept: Tensor, rows: Rows) -> Drawn:
    """Draw from `kept`, bool [batch, blocks, BLOCK]."""
    zero, one = op.constant(0.0), op.constant(1.0)
    logits = _or_banned(op, kept, words.logits)
    top = over_blocks(op, largest_of(op, logits))
    weight = op.Exp(op.Div(op.Sub(logits, top), over_blocks(op, rows.temperature)))
    total = total_of(op, weight)
    target = op.Mul(rows.uniform, total)

    def passes(t: Tensor) -> Tensor:
        return op.Greater(_sum_where(op, op.GreaterOrEqual(logits, over_blocks(op, t)), weight), target)

    drawn = over_blocks(op, largest_threshold(op, passes, target))
    above, equal = op.Greater(logits, drawn), op.Equal(logits, drawn)
    each = largest_of(op, op.Where(equal, weight, zero))
    number = op.Add(op.Floor(op.Div(op.Sub(target, _sum_where(op, above, weight)), each)), one)
    number = op.Max(op.Min(number, count_of(op, equal)), one)
    token = count_of(op, op.Less(earlier(op, equal), over_blocks(op, number)))
    drop = op.Div(op.Sub(op.Squeeze(drawn, op.constant([2], np.int64)), op.Squeeze(top, op.constant([2], np.int64))),
                  rows.temperature)  # fmt: skip
    logprob = op.Sub(drop, op.Log(total))
    return Drawn(op.Cast(token, to=7), logprob, op.Cast(count_of(op, kept), to=7))


@scope
def crop_mass(op: Ops, words: Vocabulary, kept: Tensor) -> Tensor:
    return _sum_where(op, kept, words.weight)


@scope
def flat_mask(op: Ops, kept: Tensor) -> Tensor:
    """bool [batch, blocks, BLOCK] -> [batch, padded]"""
    return op.Reshape(kept, op.constant([0, -1], np.int64))

