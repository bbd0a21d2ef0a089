"""The tail put together: one ONNX function in one of three forms (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.tail.answer import Answer, finish, merge, put_answer, scattered
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
from topw_deploy.export.tail.draw import Drawn, draw_candidate, kept_candidates
from topw_deploy.export.tail.dynamic import places_of, take_rows
from topw_deploy.export.tail.edits import BLOCK, apply_edits, padded_width, without_padding
from topw_deploy.export.tail.literal import compact_answer, literal_answer, moved_answer, pool_answer
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor, step
from topw_deploy.export.tail.rows import LARGEST, PARAMETERS, Bounded, Rows, all_true, row_parameters, within
from topw_deploy.export.tail.spec import DOMAIN, OP_TYPE, TailSpec, tail_inputs, tail_outputs
from topw_deploy.export.tail.stages import Stages, in_stages
from topw_deploy.sampling.parameters import GREEDY_BELOW


@dataclass(frozen=True)
class Short:
    """What the candidates say: the crop and draw of the rows whose flags `settled`, bool [batch, n], are all true."""

    candidates: Candidates
    scan: ShortScan
    drawn: Drawn
    settled: Tensor


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
    short = short_path(op, spec, blocks, rows)
    share = top_share(op, direct, short.candidates, rows) if spec.with_mass else None

    def edited() -> Tensor:
        return edited_logits(op, spec, inputs) if direct is None else direct

    def narrow() -> Tensor:
        return without_padding(op, edited(), spec.vocab_size)

    def fast() -> Answer:
        """Every row is settled, so every row is valid and certified: its uniform number is >= 0."""
        return fast_answer(op, spec, short, op.GreaterOrEqual(rows.uniform, op.constant(0.0)))

    def pooled() -> tuple[Answer, Tensor]:
        """Settled rows keep their answer; also which rows have their final one now."""
        mine = all_true(op, short.settled, axis=1)
        answer, final = pool_answer(op, spec, narrow(), rows)
        return merge(op, mine, fast_answer(op, spec, short, mine), answer), op.Or(mine, final)

    def moved(sure: Tensor) -> Answer:
        return moved_answer(op, spec, narrow(), rows, inputs, sure)

    def everything() -> Answer:
        mine = all_true(op, short.settled, axis=1)
        quick = fast_answer(op, spec, short, mine)
        if spec.form != "onnxruntime":
            return merge(op, mine, quick, literal_answer(op, spec, narrow(), rows, inputs))
        index = places_of(op, op.Not(mine))
        others = without_padding(op, op.Gather(edited(), index, axis=0), spec.vocab_size)
        return put_answer(op, quick, index, compact_answer(op, spec, others, take_rows(op, rows, index), inputs))

    if spec.form == "static":
        return finish(op, spec, everything(), share)
    settled = all_true(op, short.settled)
    if spec.form == "portable" and spec.has_geometry:
        return in_stages(op, spec, settled, Stages(fast, pooled, moved), share)
    return op.branch(settled, lambda: finish(op, spec, fast(), share), lambda: finish(op, spec, everything(), share))


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
def short_path(op: Ops, spec: TailSpec, blocks: Blocks, rows: Rows) -> Short:
    """What the candidates say about each row."""
    candidates = block_candidates(op, blocks, spec.vocab_size, spec.pool_size)
    largest = op.Gather(candidates.logits, op.constant([0], np.int64), axis=1)
    drop = op.Sub(candidates.logits, largest)
    scan = short_scan(op, drop, candidates.width, rows)
    proof = certificate(op, candidates, drop, scan, rows, spec)
    settled = settled_flags(op, blocks, largest, proof, rows)
    return Short(candidates, scan, draw_candidate(op, candidates, drop, scan.last, rows), settled)


@step
def settled_flags(op: Ops, blocks: Blocks, largest: Tensor, proof: Sequence[Bounded], rows: Rows) -> Tensor:
    """bool [batch, conditions]: a row whose flags are all true is valid and, by `proof`, certified.

    A sum that is NaN or +inf betrays a logit that is. It may also overflow for absurdly large logits; such a row is
    then judged by `valid_rows`.
    """
    finite = [(largest, -LARGEST, LARGEST), (blocks.total, -np.inf, LARGEST)]
    return within(op, rows, [*finite, *proof])


@step
def fast_answer(op: Ops, spec: TailSpec, short: Short, sure: Tensor) -> Answer:
    """The answer of the candidates, for the rows that are `sure`, bool [batch, 1]."""
    candidates, scan = short.candidates, short.scan
    mask = None
    if spec.with_keep_mask:
        mask = scattered(op, spec, candidates.ids, kept_candidates(op, candidates, scan.last))
    crop_mass = op.GatherElements(scan.mass, scan.last, axis=1) if spec.with_mass else None
    return Answer(short.drawn, sure, crop_mass, mask)


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
