"""The kept set from a list of the largest logits, and its proof from that list (docs/contract/rules.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, Candidates, Drawn, first_position, kept_candidates, token_at
from topw_deploy.export.tail.inputs import Rows, all_true, without_padding
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RuleRows
from topw_deploy.export.tail.rules.statistics import LEAST, Statistics

LONGEST = 3840
"""The most tokens that TensorRT's TopK can sort."""


@dataclass(frozen=True)
class List:
    """The largest logits, descending, [batch, width].

    logits: float32.
    ids: int64.
    candidates: logits and ids, if equal logits are not in order of their ids; else None.
    double: whether sums are in double precision.
    long: whether there may be more than `LONGEST` tokens.
    count, final: int64 [1], number of tokens and that minus 1.
    positions: 0 to width - 1, int64 [width].
    finite: bool.
    drop: l - l_max.
    a: drop / Ts, at least LEAST.
    weight: exp(a).
    size: number of finite logits in the list, int64 [batch, 1].
    last: the last logit; no token outside the list has a larger one.
    complete: bool [batch, 1], whether no token outside the list is finite.
    """

    logits: Tensor
    ids: Tensor
    candidates: Candidates | None
    double: bool
    long: bool
    count: Tensor
    final: Tensor
    positions: Tensor
    finite: Tensor
    drop: Tensor
    a: Tensor
    weight: Tensor
    size: Tensor
    last: Tensor
    complete: Tensor

    @property
    def dtype(self) -> int:
        """The type of sums, as ONNX's number."""
        return 11 if self.double else 1

    def sums(self, op: Ops, values: Tensor) -> Tensor:
        """Inclusive prefix sums."""
        return op.CumSum(self.exact(op, values), op.constant(1, np.int64))

    def exact(self, op: Ops, values: Tensor) -> Tensor:
        """float32 values, in the type of the sums."""
        return op.Cast(values, to=self.dtype) if self.double else values


@dataclass(frozen=True)
class RulePath:
    """A list's answer for rows with rules other than Top-W.

    drawn, crop_mass: columns.
    kept: bool [batch, width], the kept tokens at the positions of `List.ids`.
    certified: bool [batch, 1], whether the kept tokens are among the `CANDIDATES` largest.
    proven: bool [batch, 1], whether no token outside the list can be kept.
    """

    drawn: Drawn
    crop_mass: Tensor
    kept: Tensor
    certified: Tensor
    proven: Tensor


@scope
def sorted_list(
    op: Ops, logits: Tensor, found: Statistics, rows: Rows, vocab: int, length: int | Tensor, by_id: bool = True
) -> List:
    """The `length` largest of the logits [batch, padded], with sums in double precision.

    length: an int, or a tensor int64 [1] in the form for onnxruntime.
    by_id: rely on ONNX's TopK, which orders equal logits by index. If false, `length` must be an int and need no
        padding.
    """
    narrow = without_padding(op, logits, vocab)
    count = op.constant([length], np.int64) if isinstance(length, int) else length
    values, ids = op.TopK(narrow, count, axis=1)
    candidates = None if by_id else Candidates(values, ids, length)
    return _list(op, values, ids, length, length, candidates, found, rows, vocab)


@scope
def as_list(op: Ops, candidates: Candidates, found: Statistics, rows: Rows, vocab: int) -> List:
    width, count = candidates.width, candidates.count
    return _list(op, candidates.logits, candidates.ids, width, count, candidates, found, rows, vocab, double=False)


def _list(
    op: Ops, logits: Tensor, ids: Tensor, width: int | Tensor, length: int | Tensor, candidates: Candidates | None,
    found: Statistics, rows: Rows, vocab: int, *, double: bool = True,
) -> List:  # fmt: skip
    if isinstance(length, int):
        count, final = (op.constant([value], np.int64) for value in (length, length - 1))
        everything = op.constant(length == vocab, np.bool_)
    else:
        count, final = length, op.Sub(length, op.constant([1], np.int64))
        everything = op.Equal(length, op.constant([vocab], np.int64))
    finite = op.Greater(logits, op.constant(-np.inf))
    drop = op.Sub(logits, found.largest)
    a = op.Max(op.Div(drop, rows.selection), op.constant(LEAST))
    last = op.Gather(logits, final, axis=1)
    return List(
        logits=logits,
        ids=ids,
        candidates=candidates,
        double=double,
        long=not isinstance(length, int) or length > LONGEST,
        count=count,
        final=final,
        positions=_numbers(op, width),
        finite=finite,
        drop=drop,
        a=a,
        weight=op.Exp(a),
        size=_number(op, finite),
        last=last,
        complete=op.Or(everything, op.Equal(last, op.constant(-np.inf))),
    )


@scope
def rule_path(op: Ops, best: List, ruled: RuleRows, found: Statistics, rows: Rows) -> RulePath:
    one = op.constant(1, np.int64)
    size, proven = _prefix(op, best, ruled, found, rows)
    chosen = op.Less(best.positions, size)
    kept = chosen if best.candidates is None else kept_candidates(op, best.candidates, op.Sub(size, one))
    if ruled.carries("typical"):
        typical = ruled.has(op, "typical")
        near, near_proven = _typical_if_any(op, best, ruled, found, typical)

        def either(of_typical: Tensor, of_others: Tensor) -> Tensor:
            return op.Or(op.And(typical, of_typical), op.And(op.Not(typical), of_others))

        chosen, kept, proven = either(near, chosen), either(near, kept), either(near_proven, proven)
    weight = best.exact(op, op.Where(chosen, best.weight, op.constant(0.0)))
    last = op.ReduceMax(_places(op, best, chosen), op.constant([1], np.int64), keepdims=1)
    return RulePath(
        drawn=_draw(op, best, chosen, last, rows),
        crop_mass=op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1),
        kept=kept,
        certified=op.Less(last, op.constant(CANDIDATES, np.int64)),
        proven=proven,
    )


def _numbers(op: Ops, count: int | Tensor) -> Tensor:
    """0 to count - 1, int64. Only lists in the form for onnxruntime can be too long for a constant."""
    if isinstance(count, int) and count <= LONGEST:
        return op.constant(np.arange(count), np.int64)
    end = op.constant(count, np.int64) if isinstance(count, int) else op.Squeeze(count)
    return op.Range(op.constant(0, np.int64), end, op.constant(1, np.int64))


def _number(op: Ops, flags: Tensor) -> Tensor:
    return op.ReduceSum(op.Cast(flags, to=7), op.constant([1], np.int64), keepdims=1)


def _places(op: Ops, best: List, chosen: Tensor) -> Tensor:
    """The position of each chosen token; 0 for the others."""
    return op.Where(chosen, best.positions, op.constant(0, np.int64))


@scope
def _prefix(op: Ops, best: List, ruled: RuleRows, found: Statistics, rows: Rows) -> tuple[Tensor, Tensor]:
    """(Length of the kept prefix, at least 1, int64 [batch, 1]; whether it is proven)."""
    one = op.constant(1, np.int64)
    kept = op.And(best.finite, op.GreaterOrEqual(best.drop, found.lowest))
    asked = ruled.choose(op, _number(op, kept), top_k=lambda: op.Cast(ruled.v0, to=7))
    unsure = []
    for name, prefix in (("top_p", _nucleus), ("top_h", _top_h), ("min_k", _min_k)):
        if ruled.carries(name):
            own, (length, sure) = ruled.has(op, name), prefix(op, best, ruled, found)
            asked = op.Where(own, length, asked)
            unsure.append(op.And(own, op.Not(sure)))
    size = op.Max(op.Min(asked, best.size), one)
    proven = op.Greater(op.GatherElements(best.logits, op.Sub(size, one), axis=1), best.last)
    for flags in unsure:
        proven = op.And(proven, op.Not(flags))
    return size, op.Or(best.complete, proven)


@scope
def _nucleus(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """(Length of the shortest prefix with the mass v0; whether the list reaches that mass). All tokens for v0 = 1."""
    everything = op.GreaterOrEqual(ruled.v0, op.constant(1.0))
    target = op.Where(everything, op.constant(np.inf), op.Mul(ruled.v0, found.total))
    return _shortest(op, best, best.weight, target)


def _shortest(op: Ops, best: List, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(Length of the shortest prefix with the mass `target`, or of all finite tokens; whether it has that mass)."""
    one = op.constant(1, np.int64)
    enough = op.GreaterOrEqual(best.sums(op, weight), best.exact(op, target))
    first = first_position(op, enough, best.positions, op.Sub(best.size, one))
    return op.Add(first, one), op.Greater(_number(op, enough), op.constant(0, np.int64))


def _pool(op: Ops, ruled: RuleRows, found: Statistics) -> Tensor:
    """Number of tokens in Top-H's pool, int64 [batch, 1]."""
    return op.Cast(op.Min(ruled.v1, found.finite), to=7)


def _terms(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> Tensor:
    """-w ln p for tokens in Top-H's pool; 0 for the others."""
    terms = op.Mul(best.weight, op.Sub(found.log_total, best.a))
    return op.Where(op.Less(best.positions, _pool(op, ruled, found)), terms, op.constant(0.0))


@scope
def entropy_of_pool(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> Tensor:
    """The sum of -w ln p over Top-H's pool, float32 [batch, 1].

    The pool must be in the list or be the whole vocabulary.
    """
    listed = op.ReduceSum(_terms(op, best, ruled, found), op.constant([1], np.int64), keepdims=1)
    every = op.Mul(found.total, op.Sub(found.log_total, found.mean))
    return op.Where(op.GreaterOrEqual(ruled.v1, found.finite), every, listed)


@scope
def _top_h(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """(Length of Top-H's prefix; whether it is the same for every possible rest of the pool).

    The terms of the pool's tokens outside the list are at most that of the last one in it, because -p ln p rises up to
    p = 1 / e.
    """
    one, zero = (op.constant(value, np.int64) for value in (1, 0))
    pool, terms = _pool(op, ruled, found), _terms(op, best, ruled, found)
    sums = best.sums(op, terms)
    known, last = (op.Gather(best.exact(op, part), best.final, axis=1) for part in (sums, terms))
    missing = op.Max(op.Sub(pool, best.count), zero)

    def size(entropy: Tensor) -> Tensor:
        limit = op.Mul(best.exact(op, ruled.v0), entropy)
        some = op.Greater(limit, op.constant(0.0, _NUMPY[best.dtype]))
        return op.Max(op.Min(_number(op, op.And(op.LessOrEqual(sums, limit), some)), pool), one)

    least = size(known)
    most = size(op.Add(known, op.Mul(last, op.Cast(missing, to=best.dtype))))
    ends = op.Or(op.Equal(missing, zero), op.Less(least, best.count))
    return least, op.And(op.Equal(least, most), ends)


_NUMPY = {1: np.float32, 11: np.float64}


@scope
def _min_k(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """(Length of Min-k's prefix; whether no steeper drop can follow the list)."""
    slope, cliff = steepest(op, best.logits)
    behind = op.Add(op.Sub(best.last, found.largest), found.span)  # l_last - l_n
    room = op.Div(behind, op.Cast(best.count, to=1))
    return op.Max(cliff, op.Cast(found.flat, to=7)), op.Greater(slope, room)


@scope
def steepest(op: Ops, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(The largest (l_i - l_(i+1)) / i of descending logits [batch, n]; the first i where it occurs): [batch, 1]."""
    axis, start = op.constant([1], np.int64), op.constant([0], np.int64)
    here = op.Slice(logits, start, op.constant([-1], np.int64), axis)
    following = op.Slice(logits, axis, op.constant([np.iinfo(np.int64).max], np.int64), axis)
    ones = op.Cast(op.GreaterOrEqual(op.Abs(here), op.constant(0.0)), to=1)
    number = op.CumSum(ones, op.constant(1, np.int64))
    finite = op.Greater(following, op.constant(-np.inf))
    decay = op.Where(finite, op.Div(op.Sub(here, following), number), op.constant(-1.0))
    slope = op.ReduceMax(decay, axis, keepdims=1)
    before = op.Where(op.GreaterOrEqual(decay, slope), number, op.constant(np.inf))
    return slope, op.Cast(op.ReduceMin(before, axis, keepdims=1), to=7)


def _typical_if_any(op: Ops, best: List, ruled: RuleRows, found: Statistics, typical: Tensor) -> tuple[Tensor, Tensor]:
    """`_typical`. Sorts a long list, which only the form for onnxruntime has, only if a row uses the rule."""
    if not best.long:
        return _typical(op, best, ruled, found)
    near, proven = op.branch(
        all_true(op, op.Not(typical)), lambda: [best.finite, typical], lambda: _typical(op, best, ruled, found)
    )
    return near, proven


@scope
def _typical(op: Ops, best: List, ruled: RuleRows, found: Statistics) -> tuple[Tensor, Tensor]:
    """(The tokens nearest to the mean of a that have the mass v0, bool [batch, width]; whether they are proven).

    No token outside the list has a larger a than the last one in it. If equal logits are not in order of their ids, the
    cut must not separate equal distances.
    """
    axis, width = op.constant(1, np.int64), op.Shape(best.logits, start=1, end=2)
    distance = op.Where(best.finite, op.Abs(op.Sub(best.a, found.mean)), op.constant(np.inf))
    ordered, place = op.TopK(distance, width, axis=1, largest=0)
    weight = op.GatherElements(op.Where(best.finite, best.weight, op.constant(0.0)), place, axis=1)
    count, reached = _shortest(op, best, weight, op.Mul(ruled.v0, found.total))
    cut = op.GatherElements(ordered, op.Sub(count, op.constant(1, np.int64)), axis=1)
    nearer, equal = op.Less(distance, cut), op.Equal(distance, cut)
    room = op.Sub(count, _number(op, nearer))
    tied = op.And(equal, op.LessOrEqual(op.CumSum(op.Cast(equal, to=7), axis), room))
    last = op.Gather(best.a, best.final, axis=1)
    outside = op.And(reached, op.Greater(op.Sub(found.mean, last), cut))
    proven = op.Or(best.complete, outside)
    if best.candidates is not None:
        proven = op.And(proven, op.Equal(_number(op, equal), room))
    return op.Or(nearer, tied), proven


@scope
def _draw(op: Ops, best: List, chosen: Tensor, final: Tensor, rows: Rows) -> Drawn:
    """Draw from the positions `chosen`, bool [batch, width]; `final` is the last of them."""
    axis = op.constant([1], np.int64)
    logits = op.Where(chosen, best.logits, op.constant(-np.inf))
    drop = op.Div(op.Sub(logits, op.ReduceMax(logits, axis, keepdims=1)), rows.temperature)
    mass = best.sums(op, op.Exp(drop))
    total = op.GatherElements(mass, final, axis=1)
    reached = op.Greater(mass, op.Mul(best.exact(op, rows.uniform), total))
    position = first_position(op, reached, best.positions, final)
    if best.candidates is None:
        token = op.GatherElements(best.ids, position, axis=1)
    else:
        token = token_at(op, best.candidates, position)
    # The logarithm is taken of whole rows, before the gather, so that a row's bits do not depend on its place in the
    # batch.
    log_total = op.Cast(op.GatherElements(op.Log(mass), final, axis=1), to=1)
    return Drawn(token, op.Sub(op.GatherElements(drop, position, axis=1), log_total), _number(op, chosen))
