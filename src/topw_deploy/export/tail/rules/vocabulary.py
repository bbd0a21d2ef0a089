"""The kept set and the draw over a vocabulary that is too large to sort, with static shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, Drawn
from topw_deploy.export.tail.inputs import Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import LONGEST, List, entropy_of_pool, flat_size, sorted_list
from topw_deploy.export.tail.rules.cliff import cliff
from topw_deploy.export.tail.rules.inputs import GREEDY, RuleRows
from topw_deploy.export.tail.rules.search import largest_threshold
from topw_deploy.export.tail.rules.statistics import (
    THRESHOLD_RULES,
    Statistics,
    Vocabulary,
    count_of,
    largest_of,
    lowest_drop,
    over_blocks,
    sums_of,
    total_of,
)
from topw_deploy.export.tail.spec import TailSpec

_ALMOST = 1 - 2.0**-24
_LISTED = ("top_k", "top_p", "top_h", "typical", "min_k")
"""Rules that keep a list of tokens up to a mass or number; the others keep all above a threshold."""


@dataclass(frozen=True)
class Kept:
    """A kept set.

    flags: bool [batch, 1, blocks, BLOCK].
    certified: bool [batch, 1], whether the kept tokens are among the `CANDIDATES` largest.
    """

    flags: Tensor
    certified: Tensor


@scope
def number_among(op: Ops, flags: Tensor) -> Tensor:
    """The inclusive count of true flags in the order of ids, float32 [batch, 1, blocks, BLOCK]."""
    numbers = op.Cast(flags, to=1)
    inner = op.CumSum(numbers, op.constant(3, np.int64))
    totals = op.ReduceSum(numbers, op.constant([3], np.int64), keepdims=1)
    return op.Add(inner, op.Sub(op.CumSum(totals, op.constant(2, np.int64)), totals))


def _where(op: Ops, flags: Tensor, values: Tensor) -> Tensor:
    return op.Where(flags, values, op.constant(0.0))


@scope
def listed(op: Ops, keys: Tensor, terms: Tensor, limit: Tensor, beyond: Tensor) -> Tensor:
    """The shortest list of tokens, by descending key, whose terms sum to at least `limit`.

    keys, terms: float32 [batch, 1, blocks, BLOCK]; a token with the key -inf is in no list.
    limit: float32 [batch, 1].
    beyond: bool [batch, 1], rows that instead need the longest list with a sum of at most `limit` (Top-H).

    Returns bool [batch, 1, blocks, BLOCK]; all tokens if no list reaches `limit`. Ids break ties.
    """
    least = over_blocks(op, op.Where(beyond, limit, op.Mul(limit, op.constant(_ALMOST))))

    def sums(thresholds: Tensor) -> Tensor:
        return sums_of(op, _where(op, op.GreaterOrEqual(keys, thresholds), terms))

    cut = largest_threshold(op, sums, least)
    above, equal = op.Greater(keys, cut), op.Equal(keys, cut)
    one = op.constant(1.0)
    each = op.Max(largest_of(op, _where(op, equal, terms)), op.constant(float(np.finfo(np.float32).tiny)))
    missing = op.Div(op.Sub(limit, total_of(op, _where(op, above, terms))), each)
    room = op.Where(beyond, op.Floor(missing), op.Max(op.Ceil(missing), one))
    tied = op.And(equal, op.LessOrEqual(number_among(op, equal), over_blocks(op, room)))
    everything = op.And(op.Greater(keys, op.constant(-np.inf)), op.Not(op.Greater(sums(cut), least)))
    some = op.Or(op.Not(beyond), op.Greater(limit, op.constant(0.0)))
    return op.And(op.Or(op.Or(above, tied), everything), over_blocks(op, some))


@scope
def _listed_tokens(
    op: Ops, spec: TailSpec, words: Vocabulary, pool: Tensor, ruled: RuleRows, found: Statistics, rows: Rows
) -> Tensor:
    """The tokens of `pool`, bool [batch, 1, blocks, BLOCK], that are in the row's list; without one, all of them."""
    whole = op.GreaterOrEqual(ruled.v0, op.constant(1.0))
    keys, terms, beyond = words.logits, words.weight, op.Less(ruled.v0, ruled.v0)  # beyond: false
    counted = ruled.has(op, *(name for name in (GREEDY, "min_k") if name == GREEDY or ruled.carries(name)))
    if ruled.carries("typical"):
        distance = op.Neg(op.Abs(op.Sub(words.a, over_blocks(op, found.mean))))
        keys = op.Where(over_blocks(op, ruled.has(op, "typical")), distance, keys)
    if ruled.carries("top_h"):
        top_h = ruled.has(op, "top_h")
        entropy = op.Mul(words.weight, op.Sub(over_blocks(op, found.log_total), words.a))
        terms = op.Where(over_blocks(op, top_h), entropy, terms)
        counted, beyond = op.Or(counted, op.And(top_h, whole)), op.And(top_h, op.Not(whole))
    terms = op.Where(over_blocks(op, counted), op.constant(1.0), terms)
    infinite, share = op.constant(np.inf), op.Mul(ruled.v0, found.total)

    def best() -> List:
        return sorted_list(op, flat(op, words.logits), found, rows, spec.vocab_size, LONGEST)

    limit = ruled.choose(
        op,
        infinite,
        top_k=lambda: ruled.v0,
        top_p=lambda: op.Where(whole, infinite, share),
        typical=lambda: share,
        top_h=lambda: op.Where(whole, ruled.v1, op.Mul(ruled.v0, entropy_of_pool(op, best(), ruled, found))),
        min_k=lambda: op.Max(cliff(op, words, best()), op.Cast(flat_size(op, ruled, found), to=1)),
    )
    return listed(op, op.Where(pool, keys, op.constant(-np.inf)), terms, limit, beyond)


@scope
def kept_tokens(op: Ops, spec: TailSpec, words: Vocabulary, ruled: RuleRows, found: Statistics, rows: Rows) -> Kept:
    """The kept set of each row."""
    lowest = lowest_drop(op, ruled, found, rows)
    if ruled.carries(*THRESHOLD_RULES):
        lowest = over_blocks(op, lowest)
    flags = op.And(words.finite, op.GreaterOrEqual(words.drop, lowest))
    if ruled.carries(*_LISTED):
        flags = _listed_tokens(op, spec, words, flags, ruled, found, rows)
    else:
        flags = op.And(flags, op.Not(over_blocks(op, ruled.has(op, GREEDY))))
    none = op.Equal(count_of(op, flags), op.constant(0.0))  # then a rule keeps the first token
    first = op.And(op.Equal(words.drop, op.constant(0.0)), over_blocks(op, none))
    flags = op.Or(flags, op.And(first, op.Equal(number_among(op, first), op.constant(1.0))))
    end = op.Neg(largest_of(op, op.Where(flags, op.Neg(words.logits), op.constant(-np.inf))))
    cut = over_blocks(op, end)
    behind = op.And(flags, op.Equal(words.logits, cut))
    place = op.Add(count_of(op, op.Greater(words.logits, cut)), count_of(op, behind))
    return Kept(flags, op.LessOrEqual(place, op.constant(float(CANDIDATES))))


@scope
def draw_kept(op: Ops, words: Vocabulary, kept: Tensor, rows: Rows) -> Drawn:
    """Draw from `kept`, bool [batch, 1, blocks, BLOCK]."""
    one = op.constant(1.0)
    logits = op.Where(kept, words.logits, op.constant(-np.inf))
    top = largest_of(op, logits)
    weight = op.Exp(op.Div(op.Sub(logits, over_blocks(op, top)), over_blocks(op, rows.temperature)))
    total = total_of(op, weight)
    target = op.Mul(rows.uniform, total)

    def sums(thresholds: Tensor) -> Tensor:
        return sums_of(op, _where(op, op.GreaterOrEqual(logits, thresholds), weight))

    drawn = largest_threshold(op, sums, over_blocks(op, target))
    above, equal = op.Greater(logits, drawn), op.Equal(logits, drawn)
    missing = op.Sub(target, total_of(op, _where(op, above, weight)))
    number = op.Add(op.Floor(op.Div(missing, largest_of(op, _where(op, equal, weight)))), one)
    number = op.Max(op.Min(number, count_of(op, equal)), one)
    token = count_of(op, op.Less(number_among(op, equal), over_blocks(op, number)))
    drop = op.Div(op.Sub(op.Squeeze(drawn, op.constant([2, 3], np.int64)), top), rows.temperature)
    return Drawn(op.Cast(token, to=7), op.Sub(drop, op.Log(total)), op.Cast(count_of(op, kept), to=7))


@scope
def crop_mass(op: Ops, words: Vocabulary, kept: Tensor) -> Tensor:
    return total_of(op, _where(op, kept, words.weight))


@scope
def flat(op: Ops, values: Tensor) -> Tensor:
    """[batch, 1, blocks, BLOCK] -> [batch, padded]"""
    return op.Reshape(values, op.constant([0, -1], np.int64))
