"""The kept set and the draw over a vocabulary that is too large to sort, with static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, Drawn
from topw_deploy.export.tail.inputs import LARGEST, Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import LONGEST, List, entropy_of_pool, sorted_list, steepest
from topw_deploy.export.tail.rules.inputs import GREEDY, RuleRows
from topw_deploy.export.tail.rules.statistics import (
    Statistics,
    Vocabulary,
    count_of,
    largest_of,
    over_blocks,
    sums_of,
    total_of,
)
from topw_deploy.export.tail.spec import TailSpec

_MANTISSA = 23
_EXPONENTS = range(-126, 128)
_PER_ROUND = 3
"""Thresholds per round: more need fewer rounds, but more time."""
JUMPS = 3
"""Jumps after the 3840 largest logits. Logits masked by large negative numbers need two."""
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
        min_k=lambda: op.Max(cliff(op, words, best()), found.flat),
    )
    return listed(op, op.Where(pool, keys, op.constant(-np.inf)), terms, limit, beyond)


@scope
def kept_tokens(op: Ops, spec: TailSpec, words: Vocabulary, ruled: RuleRows, found: Statistics, rows: Rows) -> Kept:
    """The kept set of each row."""
    flags = op.And(words.finite, op.GreaterOrEqual(words.drop, over_blocks(op, found.lowest)))
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


@scope
def cliff(op: Ops, words: Vocabulary, best: List) -> Tensor:
    """The number of tokens before min-k's cliff, the steepest drop of the sorted logits: float32 [batch, 1].

    The first one among equals, without a sort. Let g be the steepest (l_i - l_(i+1)) / i so far. A drop after token i
    is steeper only if it exceeds i g, so there is no steeper drop within an interval of that length below token i.
    Each jump passes over such an interval. The intervals grow, so a few jumps pass over a whole vocabulary.
    """
    least, zero = op.constant(-LARGEST), op.constant(0.0)
    slope, size = steepest(op, best.logits)
    slope, size = op.Max(slope, zero), op.Cast(size, to=1)
    here = op.Max(best.last, least)
    length = count_of(op, op.GreaterOrEqual(words.logits, over_blocks(op, here)))
    for _ in range(JUMPS):
        within = op.GreaterOrEqual(words.logits, over_blocks(op, op.Sub(here, op.Mul(slope, length))))
        length = count_of(op, within)
        lowest = op.Neg(largest_of(op, op.Where(within, op.Neg(words.logits), op.constant(-np.inf))))
        following = largest_of(op, op.Where(within, op.constant(-np.inf), words.logits))
        more = op.GreaterOrEqual(following, least)
        drop = op.Where(more, op.Div(op.Sub(lowest, following), length), zero)
        steeper = op.Greater(drop, slope)
        slope, size = op.Where(steeper, drop, slope), op.Where(steeper, length, size)
        here = op.Where(more, following, lowest)
    return size


def _octaves() -> tuple[np.ndarray, np.ndarray]:
    """The first number of each run of equally spaced float32 numbers, ascending, and the run's spacing.

    1024 entries; the last are infinite.
    """
    smallest = 2.0**-149
    negative = [(-(2.0 ** (e + 1)) if e < 127 else -LARGEST, 2.0 ** (e - _MANTISSA)) for e in reversed(_EXPONENTS)]
    tiny = [(-(2.0**-126), smallest), (0.0, smallest)]
    positive = [(2.0**e, 2.0 ** (e - _MANTISSA)) for e in _EXPONENTS]
    runs = [*negative, *tiny, *positive]
    runs += [(np.inf, 1.0)] * (1024 - len(runs))
    first, spacing = np.array(runs, np.float32).T
    return first, spacing


@scope
def largest_threshold(op: Ops, sums: Callable[[Tensor], Tensor], limit: Tensor) -> Tensor:
    """The largest t with sums(t) > limit: float32 [batch, 1, 1, 1].

    TensorRT's TopK takes at most 3840 numbers, and sorting a vocabulary is not faster on a CPU. 17 rounds of three
    thresholds each find the exact threshold of any row: five its exponent, twelve its mantissa.

    sums: thresholds [batch, n, 1, 1] -> sums [batch, n, 1, 1] that do not rise with the threshold.
    limit: float32 [batch, 1, 1, 1].

    Returns -LARGEST, the lowest number, if the sum is not larger than `limit` even there.
    """
    first, spacing = (op.constant(values) for values in _octaves())
    axis, multiples = op.constant([1], np.int64), np.arange(1, 1 + _PER_ROUND).reshape(1, -1, 1, 1)

    def last(candidates: Tensor, thresholds: Tensor, otherwise: Tensor) -> Tensor:
        """The last of the ascending candidates whose threshold meets the condition: [batch, 1, 1, 1]."""
        reached = op.Greater(sums(thresholds), limit)
        return op.ReduceMax(op.Where(reached, candidates, otherwise), axis, keepdims=1)

    run = op.constant(np.zeros((1, 1, 1, 1)), np.int64)
    for bit in range(8, -1, -2):
        candidates = op.Add(run, op.constant(multiples << bit, np.int64))
        run = last(candidates, op.Gather(first, candidates, axis=0), run)
    found, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in range(_MANTISSA - 1, -1, -2):
        candidates = op.Add(found, op.Mul(unit, op.constant(multiples << bit)))
        found = last(candidates, candidates, found)
    return found
