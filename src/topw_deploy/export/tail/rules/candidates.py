"""The kept set from the largest logits, where they prove it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import Candidates, Drawn, first_position, kept_candidates, token_at
from topw_deploy.export.tail.inputs import Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RuleRows
from topw_deploy.export.tail.rules.statistics import LEAST, Statistics, lowest_drop


@dataclass(frozen=True)
class RulePath:
    """The candidates' answer for rows of other rules.

    drawn, crop_mass: columns.
    kept: bool [batch, width], which candidates are kept.
    proven: bool [batch, 1], whether no other token can be.
    """

    drawn: Drawn
    crop_mass: Tensor
    kept: Tensor
    proven: Tensor


@dataclass(frozen=True)
class _Row:
    """The candidates as rules read them, [batch, width].

    positions: int64 [width].
    finite: bool.
    drop, weight, mass: l - l_max, w, sums of w.
    size: finite candidates, int64 [batch, 1].
    last: logit of the last candidate, the largest that another token can have.
    complete: bool, whether there are no other finite tokens.
    """

    candidates: Candidates
    positions: Tensor
    finite: Tensor
    drop: Tensor
    a: Tensor
    weight: Tensor
    mass: Tensor
    size: Tensor
    last: Tensor
    complete: Tensor


@scope
def rule_path(op: Ops, candidates: Candidates, ruled: RuleRows, found: Statistics, rows: Rows, vocab: int) -> RulePath:
    row = _row(op, candidates, found, rows, vocab)
    size, proven = _prefix(op, row, ruled, found, rows)
    in_prefix = kept_candidates(op, candidates, op.Sub(size, op.constant(1, np.int64)))
    near, near_proven = _typical(op, row, ruled, found)
    typical = ruled.has(op, "typical")
    kept = op.Or(op.And(typical, near), op.And(op.Not(typical), in_prefix))
    chosen = op.Or(op.And(typical, near), op.And(op.Not(typical), op.Less(row.positions, size)))
    weight = op.Where(chosen, row.weight, op.constant(0.0))
    return RulePath(
        drawn=_draw(op, row, chosen, rows),
        crop_mass=op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1),
        kept=kept,
        proven=op.Or(op.And(typical, near_proven), op.And(op.Not(typical), proven)),
    )


def _row(op: Ops, candidates: Candidates, found: Statistics, rows: Rows, vocab: int) -> _Row:
    axis, width = op.constant([1], np.int64), candidates.width
    finite = op.Greater(candidates.logits, op.constant(-np.inf))
    drop = op.Sub(candidates.logits, found.largest)
    a = op.Max(op.Div(drop, rows.selection), op.constant(LEAST))
    weight = op.Exp(a)
    last = op.Gather(candidates.logits, op.constant([candidates.count - 1], np.int64), axis=1)
    whole = op.constant(candidates.count == vocab, np.bool_)
    return _Row(
        candidates=candidates,
        positions=op.constant(np.arange(width), np.int64),
        finite=finite,
        drop=drop,
        a=a,
        weight=weight,
        mass=op.CumSum(weight, op.constant(1, np.int64)),
        size=op.ReduceSum(op.Cast(finite, to=7), axis, keepdims=1),
        last=last,
        complete=op.Or(whole, op.Equal(last, op.constant(-np.inf))),
    )


def _number(op: Ops, flags: Tensor) -> Tensor:
    return op.ReduceSum(op.Cast(flags, to=7), op.constant([1], np.int64), keepdims=1)


@scope
def _prefix(op: Ops, row: _Row, ruled: RuleRows, found: Statistics, rows: Rows) -> tuple[Tensor, Tensor]:
    """Tokens of the prefix, int64 [batch, 1] in 1..width, and whether it is proven."""
    kept = op.And(row.finite, op.GreaterOrEqual(row.drop, lowest_drop(op, ruled, found, rows)))
    by_mass, reached = _nucleus(op, row, ruled, found)
    by_entropy, sure_entropy = _top_h(op, row, ruled, found)
    cliff, sure_cliff = _min_k(op, row, ruled, found)
    count = op.Cast(ruled.v0, to=7)
    asked = ruled.choose(
        op,
        _number(op, kept),
        top_k=lambda: count,
        top_p=lambda: by_mass,
        top_h=lambda: by_entropy,
        min_k=lambda: cliff,
    )
    size = op.Max(op.Min(asked, row.size), op.constant(1, np.int64))
    final = op.GatherElements(row.candidates.logits, op.Sub(size, op.constant(1, np.int64)), axis=1)
    apart = op.Greater(final, row.last)
    unsure = op.Or(
        op.Or(
            op.And(ruled.has(op, "top_p"), op.Not(reached)),
            op.And(ruled.has(op, "top_h"), op.Not(sure_entropy)),
        ),
        op.And(ruled.has(op, "min_k"), op.Not(sure_cliff)),
    )
    return size, op.Or(row.complete, op.And(apart, op.Not(unsure)))


@scope
def _nucleus(op: Ops, row: _Row, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """The shortest prefix with the mass v0, and whether the candidates reach it; everything for v0 = 1."""
    all_of_it = op.GreaterOrEqual(ruled.v0, op.constant(1.0))
    target = op.Where(all_of_it, op.constant(np.inf), op.Mul(ruled.v0, found.total))
    enough = op.GreaterOrEqual(row.mass, target)
    first = first_position(op, enough, row.positions, op.Sub(row.size, op.constant(1, np.int64)))
    reached = op.Greater(_number(op, enough), op.constant(0, np.int64))
    return op.Add(first, op.constant(1, np.int64)), reached


@scope
def _top_h(op: Ops, row: _Row, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """Top-H's prefix, and whether it is the same whatever the pool's other tokens are.

    Their terms -w ln p are at most the last candidate's, as p < 1 / 64 there.
    """
    one, axis = op.constant(1, np.int64), op.constant(1, np.int64)
    pool = op.Min(op.Cast(ruled.v1, to=7), op.Cast(found.finite, to=7))
    terms = op.Mul(row.weight, op.Sub(found.log_total, row.a))
    terms = op.Where(op.Less(row.positions, pool), terms, op.constant(0.0))
    sums = op.CumSum(terms, axis)
    count = row.candidates.count
    known = op.Gather(sums, op.constant([count - 1], np.int64), axis=1)
    last = op.Gather(terms, op.constant([count - 1], np.int64), axis=1)
    missing = op.Cast(op.Max(op.Sub(pool, op.constant(count, np.int64)), op.constant(0, np.int64)), to=1)
    most = op.Add(known, op.Mul(last, missing))

    def size(entropy: Tensor) -> Tensor:
        limit = op.Mul(ruled.v0, entropy)
        some = op.Greater(limit, op.constant(0.0))
        fitting = _number(op, op.And(op.LessOrEqual(sums, limit), some))
        return op.Max(op.Min(fitting, pool), one)

    least = size(known)
    below_end = op.Or(op.Equal(missing, op.constant(0.0)), op.Less(least, op.constant(count, np.int64)))
    return least, op.And(op.Equal(least, size(most)), below_end)


@scope
def _min_k(op: Ops, row: _Row, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """Min-k's prefix, and whether no steeper drop can follow the candidates'."""
    best, cliff = steepest(op, row.candidates)
    count = row.candidates.count
    room = op.Div(op.Sub(op.Sub(row.last, found.largest), op.Neg(found.span)), op.constant(float(count)))
    return op.Max(cliff, flat_size(op, ruled, found)), op.Greater(best, room)


@scope
def steepest(op: Ops, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """The largest (l_i - l_(i+1)) / i of the candidates, and its first i: [batch, 1]."""
    width = candidates.width
    axis = op.constant([1], np.int64)
    start, end = op.constant([0], np.int64), op.constant([width - 1], np.int64)
    here = op.Slice(candidates.logits, start, end, axis)
    following = op.Slice(candidates.logits, axis, op.constant([width], np.int64), axis)
    both = op.Greater(following, op.constant(-np.inf))
    decay = op.Div(op.Sub(here, following), op.constant(np.arange(1.0, width)))
    decay = op.Where(both, decay, op.constant(-1.0))
    best = op.ReduceMax(decay, axis, keepdims=1)
    first = first_position(
        op,
        op.GreaterOrEqual(decay, best),
        op.constant(np.arange(width - 1), np.int64),
        op.constant(width - 1, np.int64),
    )
    return best, op.Add(first, op.constant(1, np.int64))


@scope
def flat_size(op: Ops, ruled: RuleRows, found: Statistics) -> Tensor:
    """floor(tau / span), cut to the finite tokens: int64 [batch, 1]; of equal logits all for tau > 0, else none."""
    zero = op.constant(0.0)
    span = op.Where(op.Greater(found.span, zero), found.span, op.constant(1.0))
    size = op.Floor(op.Min(op.Div(ruled.v0, span), found.finite))
    everything = op.Where(op.Greater(ruled.v0, zero), found.finite, zero)
    return op.Cast(op.Where(op.Greater(found.span, zero), size, everything), to=7)


@scope
def _typical(op: Ops, row: _Row, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """The tokens nearest to the mean of a with the mass v0, bool [batch, width], and whether they are proven.

    Other tokens have a at most the last candidate's. The cut must not separate equal distances.
    """
    axis, width = op.constant(1, np.int64), op.constant([row.candidates.width], np.int64)
    apart = op.Abs(op.Sub(row.a, found.mean))
    distance = op.Where(row.finite, apart, op.constant(np.inf))
    ordered, place = op.TopK(distance, width, axis=1, largest=0)
    mass = op.CumSum(op.Where(op.Less(ordered, op.constant(np.inf)), op.GatherElements(row.weight, place, axis=1),
                              op.constant(0.0)), axis)  # fmt: skip
    enough = op.GreaterOrEqual(mass, op.Mul(ruled.v0, found.total))
    first = first_position(op, enough, row.positions, op.Sub(row.size, op.constant(1, np.int64)))
    cut = op.GatherElements(ordered, first, axis=1)
    kept = op.LessOrEqual(distance, cut)
    whole = op.Equal(_number(op, kept), op.Add(first, op.constant(1, np.int64)))
    end = op.constant([row.candidates.count - 1], np.int64)
    last = op.Gather(row.a, end, axis=1)
    reached = op.Greater(_number(op, enough), op.constant(0, np.int64))
    outside = op.And(reached, op.Greater(op.Sub(found.mean, last), cut))
    return kept, op.And(whole, op.Or(row.complete, outside))


@scope
def _draw(op: Ops, row: _Row, chosen: Tensor, rows: Rows) -> Drawn:
    """Draw from the candidates at positions `chosen`, bool [batch, width]."""
    axis = op.constant([1], np.int64)
    logits = op.Where(chosen, row.candidates.logits, op.constant(-np.inf))
    drop = op.Div(op.Sub(logits, op.ReduceMax(logits, axis, keepdims=1)), rows.temperature)
    mass = op.CumSum(op.Exp(drop), op.constant(1, np.int64))
    final = op.ReduceMax(op.Where(chosen, row.positions, op.constant(0, np.int64)), axis, keepdims=1)
    total = op.GatherElements(mass, final, axis=1)
    position = first_position(op, op.Greater(mass, op.Mul(rows.uniform, total)), row.positions, final)
    token = token_at(op, row.candidates, position)
    # Logarithms are taken of whole rows, before the gather, so that a row's bits do not depend on its place.
    logprob = op.Sub(op.GatherElements(drop, position, axis=1), op.GatherElements(op.Log(mass), final, axis=1))
    return Drawn(token, logprob, _number(op, chosen))
