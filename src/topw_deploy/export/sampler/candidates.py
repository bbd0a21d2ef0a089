"""Top-W's crop and draw from the candidates, the largest logits, and the proof that they suffice.

A certified crop consists of the K most probable tokens (docs/contract/graph.md, section 4, T2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from topw_deploy.export.sampler.node import (
    BLOCK,
    CANDIDATES,
    LARGEST,
    SMALLEST,
    BoundedColumn,
    InputLogits,
    RowParameters,
    SamplerSpec,
    all_true_in_row,
    are_in_range,
    padded_width,
)
from topw_deploy.export.sampler.ops import Input, Ops, Tensor, scope

_VECTOR = 16
"""The number of columns of the candidates is a multiple of this; the padding is -inf.

onnxruntime's logarithm rounds full vectors and remainders differently. Without padding, a row's bits would depend on
its position in the batch.
"""

_OBJECTIVE_SLACK = 8e-6  # times beta, for J: several times the rounding of a float32 scan
_WARM_SLACK = 1e-5  # relative to the warm start's mass


def padded_count(count: int) -> int:
    """The number of columns that hold `count` tokens and their padding."""
    return -(-count // _VECTOR) * _VECTOR


@dataclass(frozen=True)
class CandidateLogits:
    """The largest logits of each row, descending. Equal logits are in any order.

    logits: float32 [batch, width], -inf in the padding.
    ids: int64 [batch, width].
    count: the number of columns before the padding.
    """

    logits: Tensor
    ids: Tensor
    count: int

    @property
    def width(self) -> int:
        return padded_count(self.count)

    def largest(self, op: Ops) -> Tensor:
        """The largest logit of each row, float32 [batch, 1]."""
        return op.Gather(self.logits, [0], axis=1)


@dataclass(frozen=True)
class CandidateScan:
    """Top-W's objective J for each prefix of the candidates; float32 [batch, width] unless stated otherwise.

    weight: w = exp(a), with a = (logit - largest logit) / Ts.
    score: lam * a.
    mass: Gamma, the sum of weights of the prefix.
    gain: Phi, the sum of weight * score of the prefix.
    best: the maximum of J, [batch, 1].
    last: K - 1, the first position with the maximum, int64 [batch, 1].
    """

    weight: Tensor
    score: Tensor
    mass: Tensor
    gain: Tensor
    best: Tensor
    last: Tensor


@dataclass(frozen=True)
class DrawColumns:
    """The draw of each row, as columns [batch, 1].

    token: the drawn id, int64.
    logprob: the log of its probability in the crop at T, float32.
    kept: the number of tokens of the crop, int64.
    """

    token: Tensor
    logprob: Tensor
    kept: Tensor


@dataclass(frozen=True)
class CandidatePath:
    """Top-W's crop and draw, computed from the candidates alone.

    is_done: 1 in rows for which they are proven, else 0; float32 [batch, 1].
    """

    candidates: CandidateLogits
    scan: CandidateScan
    draw: DrawColumns
    is_done: Tensor


def search_candidates(op: Ops, spec: SamplerSpec, logits: InputLogits) -> tuple[CandidateLogits, Tensor]:
    """Find the candidates of the edited and masked logits: the `CANDIDATES` largest, or all of a smaller vocabulary.

    Returns also the sum of each row's logits, float32 [batch, 1]. It is NaN or +inf if a logit is.

    Has up to two branches, one after the other: on whether there are edits, then on whether there are masks. With
    masks, the first search is wasted; it is cheap.
    """

    def search(values: Tensor, width: int = padded_width(spec.vocab_size)) -> list[Tensor]:
        found = block_candidates(op, values, width, spec.vocab_size)
        return [found.logits, found.ids, op.ReduceSum(values, [1], keepdims=1)]

    if logits.can_read_in_place:
        unmasked = op.branch(
            logits.is_empty("edit_ids"),
            lambda: search(logits.inputs["logits"], spec.vocab_size),
            lambda: search(logits.edited()),
        )
    else:
        unmasked = search(logits.edited())
    values, ids, total = op.branch(logits.is_empty("allowed"), lambda: unmasked, lambda: search(logits.masked()))
    return CandidateLogits(values, ids, min(CANDIDATES, spec.vocab_size)), total


@scope
def block_candidates(op: Ops, logits: Tensor, width: int, vocab_size: int) -> CandidateLogits:
    """The candidates of logits [batch, width], padded or not: they lie in the blocks with the largest maxima."""
    count, block_count = min(CANDIDATES, vocab_size), min(CANDIDATES, width // BLOCK)
    grid = op.Reshape(logits, [0, width // BLOCK, BLOCK])
    maxima = op.ReduceMax(grid, [2], keepdims=0)
    _, index = op.TopK(maxima, [block_count], axis=1, sorted=0)
    blocks = op.GatherND(grid, op.Unsqueeze(index, [2]), batch_dims=1)
    flat = op.Reshape(blocks, [0, block_count * BLOCK])
    values, position = op.TopK(flat, [padded_count(count)], axis=1)
    # Added to a position in `flat`, the offset of its block gives the token's id.
    offset = op.Mul(op.Sub(index, np.arange(block_count)), BLOCK)
    ids = op.Add(position, op.GatherElements(offset, op.Div(position, BLOCK), axis=1))
    candidates = CandidateLogits(values, ids, count)
    # For a small vocabulary, the columns after `count` hold the padding of the logits, which is -inf already.
    return candidates if count == vocab_size else _mask_padding(op, candidates)


def _mask_padding(op: Ops, candidates: CandidateLogits) -> CandidateLogits:
    """Set the logits of the columns after `count` to -inf."""
    if candidates.count == candidates.width:
        return candidates
    inside = np.arange(candidates.width) < candidates.count
    return replace(candidates, logits=op.Where(inside, candidates.logits, -np.inf))


@scope
def first_candidates(op: Ops, candidates: CandidateLogits, count: int) -> CandidateLogits:
    """The first `count` candidates; all of them if there are fewer."""
    if count >= candidates.count:
        return candidates
    logits, ids = (op.Slice(values, [0], [padded_count(count)], [1]) for values in (candidates.logits, candidates.ids))
    return _mask_padding(op, CandidateLogits(logits, ids, count))


@scope
def first_position(op: Ops, flags: Tensor, size: int, otherwise: Input) -> Tensor:
    """The first position of a true flag, or `otherwise` if that is lower or no flag is true: int64 [batch, 1].

    Does not use ArgMax: runtimes break its ties differently.

    flags: bool [batch, size].
    """
    return op.ReduceMin(op.Where(flags, np.arange(size), otherwise), [1], keepdims=1)


@scope
def scan_candidates(op: Ops, drop: Tensor, width: int, parameters: RowParameters) -> CandidateScan:
    """Compute J of every prefix of the candidates (docs/contract/graph.md, section 3, step 4).

    drop: logits minus the largest of the row, [batch, width]; a drop of -inf gets weight 0.
    """
    a = op.Max(op.Div(drop, parameters.selection_temperature), -1e4)
    weight = op.Exp(a)
    score = op.Mul(a, parameters.lam)
    mass, gain = op.CumSum(weight, 1), op.CumSum(op.Mul(weight, score), 1)
    objective = op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), parameters.reward))
    best = op.ReduceMax(objective, [1], keepdims=1)
    last = first_position(op, op.GreaterOrEqual(objective, best), width, width - 1)
    return CandidateScan(weight, score, mass, gain, best, last)


@scope
def certificate_bounds(
    op: Ops,
    candidates: CandidateLogits,
    drop: Tensor,
    scan: CandidateScan,
    parameters: RowParameters,
    spec: SamplerSpec,
) -> list[BoundedColumn]:
    """Columns that certify the crop of a row if each lies in its interval: the crop is then the top K tokens.

    - Warm start: the mass before token K is below init_top_p times the mass of all candidates. So K <= k0, also in the
      pool, which has at least this mass.
    - geom_scale >= 0.
    - Block stop, if the pool has more tokens: J of the whole pool would be lower than the best J even if all other
      tokens had the last candidate's score, which bounds theirs from above. So no longer prefix is best, and no other
      token ties with token K, because the best prefix never ends among equal scores.
    - The last candidate's logit is below the largest. So no other token ties with a single kept one.
    """
    final, outside = [candidates.count - 1], spec.pool_size - candidates.count
    target = op.Mul(op.Gather(scan.mass, final, axis=1), op.Mul(parameters.init_top_p, 1 - _WARM_SLACK))
    margin = op.Sub(target, op.Sub(scan.mass, scan.weight))
    if outside == 0 and candidates.count < spec.vocab_size:
        # If token K ties with the pool's last token, the literal path decides which of the equal logits are kept.
        margin = op.Min(margin, op.Sub(candidates.logits, op.Gather(candidates.logits, final, axis=1)))
    bounds = [(op.GatherElements(margin, scan.last, axis=1), SMALLEST, np.inf), (parameters.geom_scale, 0.0, LARGEST)]
    if outside == 0:
        return bounds

    outside_mass = op.Mul(scan.weight, float(outside))
    pool_mass = op.Add(scan.mass, outside_mass)
    pool_gain = op.Add(scan.gain, op.Mul(scan.score, outside_mass))
    pool_objective = op.Add(op.Div(pool_gain, pool_mass), op.Mul(op.Log(pool_mass), parameters.reward))
    slack = op.Min(op.Mul(parameters.beta, _OBJECTIVE_SLACK), parameters.reward)
    block_stop = op.Sub(op.Sub(scan.best, op.Gather(pool_objective, final, axis=1)), slack)
    return [*bounds, (block_stop, 0.0, np.inf), (op.Gather(drop, final, axis=1), -np.inf, -SMALLEST)]


@scope
def candidate_path(
    op: Ops, spec: SamplerSpec, candidates: CandidateLogits, total: Tensor, parameters: RowParameters
) -> CandidatePath:
    """Top-W's crop and draw from the results of `search_candidates`, for all rows.

    A row is done if it is valid and certified. Its sum is NaN or +inf if one of its logits is. The sum of a valid row
    can overflow too: such a row is not done here, and `valid_rows` finds it valid later.
    """
    candidates = first_candidates(op, candidates, spec.pool_size)
    largest = candidates.largest(op)
    drop = op.Sub(candidates.logits, largest)
    scan = scan_candidates(op, drop, candidates.width, parameters)
    bounds = [(largest, -LARGEST, LARGEST), (total, -np.inf, LARGEST)]
    bounds += certificate_bounds(op, candidates, drop, scan, parameters, spec)
    is_done = all_true_in_row(op, are_in_range(op, parameters, bounds))
    return CandidatePath(candidates, scan, draw_candidate(op, candidates, drop, scan.last, parameters), is_done)


@scope
def draw_candidate(
    op: Ops, candidates: CandidateLogits, drop: Tensor, last: Tensor, parameters: RowParameters
) -> DrawColumns:
    """Draw from the candidates up to position `last` [batch, 1]."""
    log_weight = op.Div(drop, parameters.temperature)
    mass = op.CumSum(op.Exp(log_weight), 1)
    total = op.GatherElements(mass, last, axis=1)
    reached = op.Greater(mass, op.Mul(parameters.uniform, total))
    position = first_position(op, reached, candidates.width, last)
    token = token_at(op, candidates, position)
    # The logarithms of whole rows, gathered afterwards, do not depend on a row's position in the batch: see _VECTOR.
    logprob = op.Sub(op.GatherElements(log_weight, position, axis=1), op.GatherElements(op.Log(mass), last, axis=1))
    return DrawColumns(token, logprob, op.Add(last, 1))


@scope
def token_at(op: Ops, candidates: CandidateLogits, position: Tensor) -> Tensor:
    """The id at `position`, int64 [batch, 1], in the order (logit descending, id ascending).

    Runtimes order equal values of TopK differently, so this function sorts the ids of equal logits.
    """
    logit = op.GatherElements(candidates.logits, position, axis=1)
    equal = op.Equal(candidates.logits, logit)
    ids = op.Where(equal, candidates.ids, np.iinfo(np.int64).max // 2)
    ids, _ = op.TopK(ids, [candidates.width], axis=1, largest=0)
    start = first_position(op, equal, candidates.width, position)
    return op.GatherElements(ids, op.Sub(position, start), axis=1)


@scope
def kept_candidates(op: Ops, candidates: CandidateLogits, last: Tensor) -> Tensor:
    """The candidates up to position `last` in the order (logit descending, id ascending): bool [batch, width]."""
    logit = op.GatherElements(candidates.logits, last, axis=1)
    tied = op.And(op.Equal(candidates.logits, logit), op.LessOrEqual(candidates.ids, token_at(op, candidates, last)))
    return op.Or(op.Greater(candidates.logits, logit), tied)
