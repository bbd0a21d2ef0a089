"""The certified path: a few candidates, one short scan, and the proof that they settle the row.

Where the certificate of docs/contract/graph.md, section 4 (T2) holds, the crop is the top K tokens of the probability
order and no distance matters. These steps find K among the `CANDIDATES` largest logits and prove, without the pool,
that nothing outside them could change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.edits import BLOCK, padded_width
from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.export.tail.rows import LARGEST, SMALLEST, Bounded, Rows
from topw_deploy.export.tail.spec import TailSpec

CANDIDATES = 64
"""Largest logits looked at. As many blocks are searched: that many surely hold them all."""

_LANES = 16
"""Rows of candidates are filled up to a multiple of this with -inf. onnxruntime's logarithm rounds differently in a
vector of full width and in a remainder, so a row's bits would depend on where in the batch it stands."""

_SLACK = 8e-6  # of J, in units of beta: several times the rounding of a float32 scan over CANDIDATES terms
_WARM_SLACK = 1e-5  # relative, of the warm start's mass


@dataclass(frozen=True)
class Candidates:
    """The largest logits of each row in descending order, float32 [batch, n], with their token ids int64 [batch, n].

    The first `count` are candidates, the rest fill the row up to `width` = n with -inf.
    """

    logits: Tensor
    ids: Tensor
    count: int

    @property
    def width(self) -> int:
        return -(-self.count // _LANES) * _LANES


@dataclass(frozen=True)
class ShortScan:
    """Prefix objective over the candidates, all float32 [batch, n] but `last`.

    Weights are relative to the largest logit, so the first is 1: `weight` w = exp(a), `score` lam * a, `mass` Gamma,
    `gain` Phi, `objective` J, and its maximum `best` [batch, 1]. `last` int64 [batch, 1]: position of the first
    maximiser, K - 1.
    """

    weight: Tensor
    score: Tensor
    mass: Tensor
    gain: Tensor
    objective: Tensor
    best: Tensor
    last: Tensor


@dataclass(frozen=True)
class Blocks:
    """What one pass over the row leaves: the blocks with the largest maxima, in no order, and the row's sum.

    logits float32 [batch, n, BLOCK]; index int64 [batch, n]; total float32 [batch, 1]: -inf or a number, but NaN
    where a logit is NaN or +inf beside an -inf, +inf where one is +inf.
    """

    logits: Tensor
    index: Tensor
    total: Tensor


@step
def largest_blocks(op: Ops, logits: Tensor, width: int) -> Blocks:
    """The blocks of each row [batch, width], width a multiple of BLOCK, that hold its `CANDIDATES` largest logits.

    A token among the n largest lies in a block whose maximum is among the n largest, up to ties with the n-th.
    """
    blocks = width // BLOCK
    grid = op.Reshape(logits, op.constant([-1, blocks, BLOCK], np.int64))
    maxima = op.ReduceMax(grid, op.constant([2], np.int64), keepdims=0)
    _, index = op.TopK(maxima, op.constant([min(CANDIDATES, blocks)], np.int64), axis=1, sorted=0)
    chosen = op.GatherND(grid, op.Unsqueeze(index, op.constant([2], np.int64)), batch_dims=1)
    return Blocks(chosen, index, op.ReduceSum(logits, op.constant([1], np.int64), keepdims=1))


@step
def block_candidates(op: Ops, blocks: Blocks, vocab_size: int, top_m: int) -> Candidates:
    """The largest logits of each row."""
    searched = min(CANDIDATES, padded_width(vocab_size) // BLOCK)
    count = min(CANDIDATES, vocab_size, top_m)
    flat = op.Reshape(blocks.logits, op.constant([-1, searched * BLOCK], np.int64))
    values, place = op.TopK(flat, op.constant([-(-count // _LANES) * _LANES], np.int64), axis=1)
    size = op.constant(BLOCK, np.int64)
    offset = op.Mul(op.Sub(blocks.index, op.constant(np.arange(searched), np.int64)), size)
    ids = op.Add(place, op.GatherElements(offset, op.Div(place, size), axis=1))
    found = Candidates(values, ids, count)
    if count == vocab_size or count == found.width:
        return found  # what fills the row up, if anything, is padding
    inside = op.constant(np.arange(found.width) < count, np.bool_)
    return Candidates(op.Where(inside, values, op.constant(-np.inf)), ids, count)


@step
def first_position(op: Ops, flags: Tensor, positions: Tensor, otherwise: Tensor) -> Tensor:
    """int64 [batch, 1]: the first true position of `flags` [batch, n], at most `otherwise`; `positions` is 0..n-1.

    By a minimum of positions: ArgMax's choice among equals is not the same everywhere.
    """
    return op.ReduceMin(op.Where(flags, positions, otherwise), op.constant([1], np.int64), keepdims=1)


@step
def short_scan(op: Ops, drop: Tensor, width: int, rows: Rows) -> ShortScan:
    """J over the prefixes of the candidates (docs/contract/graph.md, section 3, step 4 with f = 0).

    drop: logits minus the largest, float32 [batch, width]. Logs come from logits, never from probabilities; -inf
    becomes a finite score with weight 0.
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


@step
def certificate(
    op: Ops, candidates: Candidates, drop: Tensor, scan: ShortScan, rows: Rows, spec: TailSpec
) -> list[Bounded]:
    """What must hold for the top K tokens to be the crop: (column [batch, 1], lowest, highest) each.

    - Warm start: the mass before token K is below init_top_p times the candidates' mass, hence below that share of
      the pool's, hence K <= k0. It implies init_top_p > 0.
    - Block stop: as if each of the pool's other tokens had the last candidate's score, which is the most they can
      weigh; if that lowers J, no longer prefix is the first maximiser, and token K does not tie with one outside
      (a run of equal scores has its best J at an end). For reward <= 0 the first prefix is the best by itself.
    - The largest logit is above the last candidate's: a single kept token does not tie with one outside either.
    - geom_scale >= 0 (0 stands there for greedy rows).
    """
    final = op.constant([candidates.count - 1], np.int64)
    outside = spec.pool_size - candidates.count

    target = op.Mul(op.Gather(scan.mass, final, axis=1), op.Mul(rows.warm_mass, op.constant(1 - _WARM_SLACK)))
    room = op.Sub(target, op.Sub(scan.mass, scan.weight))
    if outside == 0 and candidates.count < spec.vocab_size:
        # The candidates are the whole pool: a tie across its cut is left to the literal path.
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
