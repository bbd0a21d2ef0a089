"""The tail put together: one ONNX function in one of three forms (docs/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.tail.alternate import Distances, alternate
from topw_deploy.export.tail.candidates import (
    CANDIDATES,
    Blocks,
    Candidates,
    ShortScan,
    block_candidates,
    certificate,
    largest_blocks,
    short_scan,
)
from topw_deploy.export.tail.draw import Drawn, draw_candidate, draw_member, kept_candidates
from topw_deploy.export.tail.dynamic import places_of, put_rows, settled_or_moved, take_rows
from topw_deploy.export.tail.edits import BLOCK, apply_edits, padded_width, without_padding
from topw_deploy.export.tail.geometry import (
    Metric,
    closeness,
    distance_to_set,
    embedding_rows,
    features,
    recompute_nearest,
)
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor, step
from topw_deploy.export.tail.pool import Pool, candidate_pool, certified, up_to, warm_start
from topw_deploy.export.tail.rows import LARGEST, PARAMETERS, Bounded, Rows, all_true, row_parameters, within
from topw_deploy.export.tail.spec import DOMAIN, OP_TYPE, TailSpec, tail_inputs, tail_outputs
from topw_deploy.sampling.parameters import GREEDY_BELOW


@dataclass(frozen=True)
class Answer:
    """What one path says about each row: columns [batch, 1], `keep_mask` bool [batch, padded] or None."""

    drawn: Drawn
    certified: Tensor  # bool
    crop_mass: Tensor  # float32, weight of the kept tokens at Ts, the largest logit's being 1
    keep_mask: Tensor | None


def build_tail(spec: TailSpec) -> ir.Function:
    """The function `topw::TopWSample` for `spec`: inputs `tail_inputs(spec)`, outputs `tail_outputs(spec)`.

    It uses standard operators of `spec.opset` and the embedding node's operator, holds all its constants and names
    every node once. Attributes for the node that calls it: `tail_attributes(spec)`.
    """
    recorder = Recorder()
    inputs = {name: ir.Value(name=name) for name in tail_inputs(spec)}
    outputs = sample(recorder, spec, inputs)
    for name, value in zip(tail_outputs(spec), outputs, strict=True):
        value.name = name
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=recorder.nodes,
        opset_imports={domain: 1 if domain else spec.opset for domain in recorder.domains},
        name=OP_TYPE,
    )
    return ir.Function(DOMAIN, OP_TYPE, graph=graph, attributes=())


def sample(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The whole sampler over `inputs` named as in `tail_inputs(spec)`; returns the outputs of `tail_outputs(spec)`.

    Rows that the certified path settles get its answer in every form and in any company; the rest get the literal
    algorithm's.
    """
    rows = row_parameters(op, [inputs[name] for name in PARAMETERS])
    direct = edited_logits(op, spec, inputs) if not skips_edits(spec) else None
    blocks = search(op, spec, inputs) if direct is None else largest_blocks(op, direct, padded_width(spec.vocab_size))
    candidates = block_candidates(op, blocks, spec.vocab_size, spec.pool_size)
    largest = op.Gather(candidates.logits, op.constant([0], np.int64), axis=1)
    drop = op.Sub(candidates.logits, largest)
    scan = short_scan(op, drop, candidates.width, rows)
    proof = certificate(op, candidates, drop, scan, rows, spec)
    settled = settled_flags(op, blocks, largest, proof, rows)
    drawn = draw_candidate(op, candidates, drop, scan.last, rows)
    share = top_share(op, direct, candidates, rows) if spec.with_mass else None

    def fast() -> list[Tensor]:
        """Every row is settled, so every row is valid and certified: its uniform number is >= 0."""
        sure = op.GreaterOrEqual(rows.uniform, op.constant(0.0))
        return finish(op, spec, fast_answer(op, spec, candidates, scan, drawn, sure), share)

    def general() -> list[Tensor]:
        logits = edited_logits(op, spec, inputs) if direct is None else direct
        mine = all_true(op, settled, axis=1)
        quick = fast_answer(op, spec, candidates, scan, drawn, mine)
        if spec.form == "onnxruntime":
            index = places_of(op, op.Not(mine))
            others = without_padding(op, op.Gather(logits, index, axis=0), spec.vocab_size)
            slow = compact_answer(op, spec, others, take_rows(op, rows, index), inputs)
            return finish(op, spec, put_answer(op, quick, index, slow), share)
        narrow = without_padding(op, logits, spec.vocab_size)
        slow = literal_answer(op, spec, narrow, rows, inputs)
        return finish(op, spec, merge(op, mine, quick, invalidate(op, slow, valid_rows(op, narrow, rows))), share)

    if spec.form == "static":
        return general()
    return op.branch(all_true(op, settled), fast, general)


def skips_edits(spec: TailSpec) -> bool:
    """Whether a step without edits reads the logits where they lie, by a branch of its own, instead of a copy.

    Not where there is to be no branch, where the vocabulary must be filled up to whole blocks anyway, where it is too
    small to matter, or where `mass` needs the edited row.
    """
    whole = spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES
    return whole and spec.form != "static" and not spec.with_mass


def edited_logits(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    """float32 [batch, padded]: the logits after their edits."""
    edits = (inputs["edit_ids"], inputs["edit_penalty"], inputs["edit_bias"])
    return apply_edits(op, inputs["logits"], *edits, vocab_size=spec.vocab_size)


@step
def search(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Blocks:
    """The largest blocks of the edited logits; without edits (N = 0) straight from the input, uncopied."""

    def parts(blocks: Blocks) -> list[Tensor]:
        return [blocks.logits, blocks.index, blocks.total]

    def plain() -> list[Tensor]:
        return parts(largest_blocks(op, inputs["logits"], spec.vocab_size))

    def edited() -> list[Tensor]:
        wide = edited_logits(op, spec, inputs)
        return parts(largest_blocks(op, wide, padded_width(spec.vocab_size)))

    no_edits = op.Equal(op.Size(inputs["edit_ids"]), op.constant(0, np.int64))
    return Blocks(*op.branch(no_edits, plain, edited))


@step
def settled_flags(op: Ops, blocks: Blocks, largest: Tensor, proof: Sequence[Bounded], rows: Rows) -> Tensor:
    """bool [batch, conditions]: a row whose flags are all true is valid and, by `proof`, certified.

    A sum that is NaN or +inf betrays a logit that is. It may also overflow for absurdly large logits; such a row is
    then judged by `valid_rows`.
    """
    finite = [(largest, -LARGEST, LARGEST), (blocks.total, -np.inf, LARGEST)]
    return within(op, rows, [*finite, *proof])


@step
def valid_rows(op: Ops, logits: Tensor, rows: Rows) -> Tensor:
    """bool [batch, 1]: parameters in range, a finite logit, and neither NaN nor +inf among the edited logits."""
    axis = op.constant([1], np.int64)
    largest = op.ReduceMax(logits, axis, keepdims=1)
    broken = op.Or(op.IsNaN(logits), op.Equal(logits, op.constant(np.inf)))
    none_broken = op.Less(op.ReduceMax(op.Cast(broken, to=1), axis, keepdims=1), op.constant(0.5))
    in_range = all_true(op, within(op, rows, [(largest, -LARGEST, LARGEST)]), axis=1)
    return op.And(none_broken, in_range)


@step
def fast_answer(op: Ops, spec: TailSpec, candidates: Candidates, scan: ShortScan, drawn: Drawn, sure: Tensor) -> Answer:
    """The answer of the certified path."""
    mask = None
    if spec.with_keep_mask:
        mask = _scattered(op, spec, candidates.ids, kept_candidates(op, candidates, scan.last))
    crop_mass = op.GatherElements(scan.mass, scan.last, axis=1) if spec.with_mass else None
    return Answer(drawn, sure, crop_mass, mask)


@step
def literal_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """The answer of the literal algorithm over the pool; rows it certifies skip the alternation's result."""
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    moved = alternate(op, pool, start.warm, rows, _distances(op, spec, pool, inputs), spec.options.alt_iters)
    settled = up_to(op, start.base, pool.positions)
    members = op.Or(op.And(sure, settled), op.And(op.Not(sure), moved))
    return member_answer(op, spec, pool, members, sure, rows)


@step
def compact_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """As `literal_answer`, with the work of dynamic.py, for rows that the certified path left; already invalidated."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    members = settled_or_moved(op, spec, pool, start, sure, valid, rows, inputs)
    return invalidate(op, member_answer(op, spec, pool, members, sure, rows), valid)


@step
def member_answer(op: Ops, spec: TailSpec, pool: Pool, members: Tensor, sure: Tensor, rows: Rows) -> Answer:
    """The answer for the pool's `members`, bool [batch, top_m]."""
    crop_mass = None
    if spec.with_mass:
        weight = op.Where(members, pool.weight, op.constant(0.0, np.float64))
        crop_mass = op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1)
    mask = _scattered(op, spec, pool.ids, members) if spec.with_keep_mask else None
    return Answer(draw_member(op, pool, members, rows), sure, crop_mass, mask)


def _distances(op: Ops, spec: TailSpec, pool: Pool, inputs: Mapping[str, Tensor]) -> Distances:
    if not spec.has_geometry or spec.embedding is None:
        return lambda op, members: op.constant(1.0, np.float64)
    metric = Metric(spec.options.metric, spec.options.neighbours, spec.pool_size)
    tables = [inputs[name] for name in tail_inputs(spec) if name.startswith("embedding_")]
    tokens = embedding_rows(op, spec.embedding, tables, pool.ids)
    whitened = features(op, tokens, inputs["mean"], inputs["inverse_std"], metric)
    near = recompute_nearest(op, closeness(op, whitened, whitened, metric), whitened, metric)
    return lambda op, members: distance_to_set(op, near, members, metric)


def _scattered(op: Ops, spec: TailSpec, ids: Tensor, flags: Tensor) -> Tensor:
    """bool [batch, padded]: `flags` [batch, n] at the places `ids`, false elsewhere."""
    batch = op.Shape(ids, start=0, end=1)
    shape = op.Concat(batch, op.constant([padded_width(spec.vocab_size)], np.int64), axis=0)
    nothing = op.Expand(op.constant(False, np.bool_), shape)
    return op.ScatterElements(nothing, ids, flags, axis=1)


@step
def top_share(op: Ops, logits: Tensor, candidates: Candidates, rows: Rows) -> Tensor:
    """float32 [batch, 1]: probability of the largest logit under the softmax over the vocabulary at Ts.

    NaN where Ts is below the greedy bound: all mass is on the kept token then.
    """
    temperature, selection, *_ = rows.given
    asked = op.Where(op.Equal(selection, op.constant(0.0)), temperature, selection)
    frozen = op.Less(asked, op.constant(GREEDY_BELOW))
    logs = op.LogSoftmax(op.Div(logits, op.Where(frozen, op.constant(1.0), asked)), axis=1)
    top = op.GatherElements(logs, op.Gather(candidates.ids, op.constant([0], np.int64), axis=1), axis=1)
    return op.Where(frozen, op.constant(np.nan), op.Exp(top))


@step
def merge(op: Ops, first: Tensor, one: Answer, other: Answer) -> Answer:
    """Row by row the answer of `one` where `first`, bool [batch, 1], else of `other`."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return op.Where(first, a, b)

    drawn = Drawn(*(choose(getattr(one.drawn, f), getattr(other.drawn, f)) for f in ("token", "logprob", "kept")))
    mask = None
    if one.keep_mask is not None:
        mask = op.Or(op.And(first, one.keep_mask), op.And(op.Not(first), other.keep_mask))
    crop_mass = None if one.crop_mass is None else choose(one.crop_mass, other.crop_mass)
    return Answer(drawn, op.Or(first, other.certified), crop_mass, mask)


@step
def put_answer(op: Ops, answer: Answer, index: Tensor, part: Answer) -> Answer:
    """`answer` with the rows `index` int64 [n] replaced by those of `part`."""

    def put(whole: Tensor | None, rows: Tensor | None) -> Tensor | None:
        return None if whole is None else put_rows(op, whole, index, rows)

    drawn = Drawn(*(put(getattr(answer.drawn, f), getattr(part.drawn, f)) for f in ("token", "logprob", "kept")))
    certified = put_rows(op, answer.certified, index, part.certified)
    return Answer(drawn, certified, put(answer.crop_mass, part.crop_mass), put(answer.keep_mask, part.keep_mask))


@step
def invalidate(op: Ops, answer: Answer, valid: Tensor) -> Answer:
    """Rows that are not valid answer token -1, kept 0, not certified, logprob and mass 0, nothing in the mask."""
    nothing = op.constant(0, np.int64)
    drawn = Drawn(
        op.Where(valid, answer.drawn.token, op.constant(-1, np.int64)),
        op.Where(valid, answer.drawn.logprob, op.constant(0.0)),
        op.Where(valid, answer.drawn.kept, nothing),
    )
    mask = None if answer.keep_mask is None else op.And(valid, answer.keep_mask)
    crop_mass = None if answer.crop_mass is None else op.Where(valid, answer.crop_mass, op.constant(0.0))
    return Answer(drawn, op.And(valid, answer.certified), crop_mass, mask)


@step
def finish(op: Ops, spec: TailSpec, answer: Answer, share: Tensor | None) -> list[Tensor]:
    """The node's outputs from columns: [batch], and keep_mask [batch, vocab]."""
    axis = op.constant([1], np.int64)
    outputs = [
        op.Squeeze(answer.drawn.token, axis),
        op.Squeeze(answer.drawn.logprob, axis),
        op.Cast(op.Squeeze(answer.drawn.kept, axis), to=6),
        op.Squeeze(answer.certified, axis),
    ]
    if share is not None:
        product = op.Mul(answer.crop_mass, share)
        greedy_share = op.Min(answer.crop_mass, op.constant(1.0))
        outputs.append(op.Squeeze(op.Where(op.IsNaN(share), greedy_share, product), axis))
    if answer.keep_mask is not None:
        start, end = op.constant([0], np.int64), op.constant([spec.vocab_size], np.int64)
        outputs.append(op.Slice(answer.keep_mask, start, end, axis))
    return outputs
