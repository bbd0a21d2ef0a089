"""The certified path: crop and draw from the largest logits only.

A certified crop is proven to be the K most probable tokens (docs/contract/graph.md, section 4, T2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from topw_deploy.export.tail.inputs import BLOCK, LARGEST, SMALLEST, Bounded, Rows, all_numbers, padded_width, within
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec

CANDIDATES = 64
"""Number of largest logits examined. They lie in at most as many blocks, so that many blocks are searched."""

_VECTOR = 16
"""Candidates are padded with -inf to a multiple of this: onnxruntime's logarithm rounds full vectors and remainders
differently, so a row's bits would depend on its place in the batch.
"""

_SLACK = 8e-6  # of J, in units of beta: several times a float32 scan's rounding
_WARM_SLACK = 1e-5  # relative, of the warm start's mass


@dataclass(frozen=True)
class Blocks:
    """The blocks of consecutive logits with the largest maxima.

    logits: float32 [batch, n, BLOCK].
    index: int64 [batch, n].
    """

    logits: Tensor
    index: Tensor


def padded_count(count: int) -> int:
    return -(-count // _VECTOR) * _VECTOR


def unpadded_count(count: int) -> int:
    """The most tokens up to `count` that need no padding."""
    return count // _VECTOR * _VECTOR


def candidates_width(vocab_size: int) -> int:
    """The width of all candidates of a vocabulary."""
    return padded_count(min(CANDIDATES, vocab_size))


@dataclass(frozen=True)
class Candidates:
    """The largest logits, descending.

    logits, ids: float32 and int64 [batch, width], padded with -inf.
    count: without padding.
    """

    logits: Tensor
    ids: Tensor
    count: int

    @property
    def width(self) -> int:
        return padded_count(self.count)

    def largest(self, op: Ops) -> Tensor:
        """float32 [batch, 1]"""
        return op.Gather(self.logits, op.constant([0], np.int64), axis=1)


@dataclass(frozen=True)
class Search:
    """What is found in whole rows.

    candidates: up to `CANDIDATES` largest logits.
    total: float32 [batch, 1], the sum, which is NaN or +inf if a logit is.
    """

    candidates: Candidates
    total: Tensor


@dataclass(frozen=True)
class ShortScan:
    """The objective of each prefix of the candidates, float32 [batch, width].

    weight, score: w = exp(a), lam * a.
    mass, gain, objective: Gamma, Phi and J of the prefix.
    best: [batch, 1], maximum J.
    last: int64 [batch, 1], its first position, K - 1.
    """

    weight: Tensor
    score: Tensor
    mass: Tensor
    gain: Tensor
    objective: Tensor
    best: Tensor
    last: Tensor


@dataclass(frozen=True)
class Drawn:
    """token int64, logprob float32, kept int64: [batch, 1]."""

    token: Tensor
    logprob: Tensor
    kept: Tensor


@dataclass(frozen=True)
class ShortPath:
    """Crop and draw of the candidate path; final in rows where `settled`, float32 [batch, 1], is 1 and not 0."""

    candidates: Candidates
    scan: ShortScan
    drawn: Drawn
    settled: Tensor


@scope
def largest_blocks(op: Ops, logits: Tensor, width: int) -> Blocks:
    """Blocks of logits [batch, width] with the `CANDIDATES` largest."""
    blocks = width // BLOCK
    grid = op.Reshape(logits, op.constant([0, blocks, BLOCK], np.int64))
    maxima = op.ReduceMax(grid, op.constant([2], np.int64), keepdims=0)
    _, index = op.TopK(maxima, op.constant([min(CANDIDATES, blocks)], np.int64), axis=1, sorted=0)
    chosen = op.GatherND(grid, op.Unsqueeze(index, op.constant([2], np.int64)), batch_dims=1)
    return Blocks(chosen, index)


@scope
def search(op: Ops, logits: Tensor, width: int, vocab_size: int) -> Search:
    """logits: [batch, width], padded or not."""
    candidates = block_candidates(op, largest_blocks(op, logits, width), vocab_size, vocab_size)
    return Search(candidates, op.ReduceSum(logits, op.constant([1], np.int64), keepdims=1))


@scope
def block_candidates(op: Ops, blocks: Blocks, vocab_size: int, top_m: int) -> Candidates:
    searched = min(CANDIDATES, padded_width(vocab_size) // BLOCK)
    count = min(CANDIDATES, vocab_size, top_m)
    flat = op.Reshape(blocks.logits, op.constant([0, searched * BLOCK], np.int64))
    values, place = op.TopK(flat, op.constant([padded_count(count)], np.int64), axis=1)
    size = op.constant(BLOCK, np.int64)
    offset = op.Mul(op.Sub(blocks.index, op.constant(np.arange(searched), np.int64)), size)
    ids = op.Add(place, op.GatherElements(offset, op.Div(place, size), axis=1))
    found = Candidates(values, ids, count)
    return found if count == vocab_size else _padded(op, found)  # other columns are the logits' own padding


def _padded(op: Ops, found: Candidates) -> Candidates:
    """The candidates, with -inf in the columns behind them."""
    if found.count == found.width:
        return found
    inside = op.constant(np.arange(found.width) < found.count, np.bool_)
    return replace(found, logits=op.Where(inside, found.logits, op.constant(-np.inf)))


@scope
def first_candidates(op: Ops, candidates: Candidates, count: int) -> Candidates:
    """The first `count` candidates, at most all."""
    if count >= candidates.count:
        return candidates
    start, end, axis = (op.constant([place], np.int64) for place in (0, padded_count(count), 1))
    logits, ids = (op.Slice(values, start, end, axis) for values in (candidates.logits, candidates.ids))
    return _padded(op, Candidates(logits, ids, count))


@scope
def first_position(op: Ops, flags: Tensor, positions: Tensor, otherwise: Tensor) -> Tensor:
    """First true position of `flags`, at most `otherwise`: int64 [batch, 1].

    Not ArgMax, whose ties differ between runtimes.
    """
    return op.ReduceMin(op.Where(flags, positions, otherwise), op.constant([1], np.int64), keepdims=1)


@scope
def short_scan(op: Ops, drop: Tensor, width: int, rows: Rows) -> ShortScan:
    """J of every prefix (docs/contract/graph.md, section 3, step 4).

    drop: logits minus the largest; -inf gets weight 0.
    """
    axis = op.constant(1, np.int64)
    a = op.Max(op.Div(drop, rows.selection), op.constant(-1e4))
    weight = op.Exp(a)
    score = op.Mul(a, rows.lam)
    mass = op.CumSum(weight, axis)
    gain = op.CumSum(op.Mul(weight, score), axis)
    objective = op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), rows.reward))
    best = op.ReduceMax(objective, op.constant([1], np.int64), keepdims=1)
    positions = op.constant(np.arange(width), np.int64)
    last = first_position(op, op.GreaterOrEqual(objective, best), positions, op.constant(width - 1, np.int64))
    return ShortScan(weight, score, mass, gain, objective, best, last)


@scope
def certificate(
    op: Ops, candidates: Candidates, drop: Tensor, scan: ShortScan, rows: Rows, spec: TailSpec
) -> list[Bounded]:
    """Conditions for the crop to be the top K tokens: (column [batch, 1], lowest, highest).

    - Warm start: the mass before token K is below init_top_p times the candidates', so K <= k0 in the pool too.
    - Block stop: J falls even if all other pool tokens get the last candidate's score, their upper bound. So no longer
      prefix is best, and no outsider ties with token K (J is best at an end of equal scores).
    - The last logit is below the largest, so no outsider ties with a single kept token.
    - geom_scale >= 0.
    """
    final = op.constant([candidates.count - 1], np.int64)
    outside = spec.pool_size - candidates.count

    target = op.Mul(op.Gather(scan.mass, final, axis=1), op.Mul(rows.warm_mass, op.constant(1 - _WARM_SLACK)))
    room = op.Sub(target, op.Sub(scan.mass, scan.weight))
    if outside == 0 and candidates.count < spec.vocab_size:
        # Leave ties across the pool's cut to the literal path.
        room = op.Min(room, op.Sub(candidates.logits, op.Gather(candidates.logits, final, axis=1)))
    bounds = [(op.GatherElements(room, scan.last, axis=1), SMALLEST, np.inf), (rows.scale, 0.0, LARGEST)]
    if outside == 0:
        return bounds

    tail_mass = op.Mul(scan.weight, op.constant(float(outside)))
    whole = op.Add(scan.mass, tail_mass)
    tail_gain = op.Add(scan.gain, op.Mul(scan.score, tail_mass))
    longest = op.Add(op.Div(tail_gain, whole), op.Mul(op.Log(whole), rows.reward))
    slack = op.Min(op.Mul(rows.beta, op.constant(_SLACK)), rows.reward)
    margin = op.Sub(op.Sub(scan.best, op.Gather(longest, final, axis=1)), slack)
    return [*bounds, (margin, 0.0, np.inf), (op.Gather(drop, final, axis=1), -np.inf, -SMALLEST)]


@scope
def short_path(op: Ops, spec: TailSpec, search: Search, rows: Rows) -> ShortPath:
    candidates = first_candidates(op, search.candidates, spec.pool_size)
    largest = candidates.largest(op)
    drop = op.Sub(candidates.logits, largest)
    scan = short_scan(op, drop, candidates.width, rows)
    proof = certificate(op, candidates, drop, scan, rows, spec)
    settled = all_numbers(op, settled_flags(op, search, largest, proof, rows))
    return ShortPath(candidates, scan, draw_candidate(op, candidates, drop, scan.last, rows), settled)


@scope
def settled_flags(op: Ops, search: Search, largest: Tensor, proof: Sequence[Bounded], rows: Rows) -> Tensor:
    """Whether rows are valid and, by `proof`, certified: bool [batch, n].

    Row sums reveal NaN and +inf, but a valid row's sum may overflow; then `valid_rows` decides.
    """
    finite = [(largest, -LARGEST, LARGEST), (search.total, -np.inf, LARGEST)]
    return within(op, rows, [*finite, *proof])


@scope
def draw_candidate(op: Ops, candidates: Candidates, drop: Tensor, last: Tensor, rows: Rows) -> Drawn:
    """Draw from the candidates up to position `last` [batch, 1]."""
    log_weight = op.Div(drop, rows.temperature)
    mass = op.CumSum(op.Exp(log_weight), op.constant(1, np.int64))
    total = op.GatherElements(mass, last, axis=1)
    reached = op.Greater(mass, op.Mul(rows.uniform, total))
    position = first_position(op, reached, op.constant(np.arange(candidates.width), np.int64), last)
    token = token_at(op, candidates, position)
    # Logarithms are taken of whole rows, before the gather: see _VECTOR.
    logprob = op.Sub(op.GatherElements(log_weight, position, axis=1), op.GatherElements(op.Log(mass), last, axis=1))
    return Drawn(token, logprob, op.Add(last, op.constant(1, np.int64)))


@scope
def token_at(op: Ops, candidates: Candidates, position: Tensor) -> Tensor:
    """The token at `position` by (logit descending, token id ascending).

    Runtimes order TopK's ties differently, so equal logits are sorted by id here.
    """
    logit = op.GatherElements(candidates.logits, position, axis=1)
    equal = op.Equal(candidates.logits, logit)
    largest = op.constant(np.iinfo(np.int64).max // 2, np.int64)
    count = op.constant([candidates.width], np.int64)
    ids, _ = op.TopK(op.Where(equal, candidates.ids, largest), count, axis=1, largest=0)
    start = first_position(op, equal, op.constant(np.arange(candidates.width), np.int64), position)
    return op.GatherElements(ids, op.Sub(position, start), axis=1)


@scope
def kept_candidates(op: Ops, candidates: Candidates, last: Tensor) -> Tensor:
    """Candidates up to `last`: bool [batch, n]."""
    logit = op.GatherElements(candidates.logits, last, axis=1)
    tied = op.And(op.Equal(candidates.logits, logit), op.LessOrEqual(candidates.ids, token_at(op, candidates, last)))
    return op.Or(op.Greater(candidates.logits, logit), tied)
