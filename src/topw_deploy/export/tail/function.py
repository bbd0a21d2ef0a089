"""The function `topw::TopWSample` (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.tail.answer import (
    Answer,
    answer_of,
    fast_answer,
    finish,
    merge,
    parts_of,
    put_answer,
)
from topw_deploy.export.tail.candidates import CANDIDATES, Blocks, Candidates, largest_blocks, short_path
from topw_deploy.export.tail.dynamic import places_of, take_rows
from topw_deploy.export.tail.inputs import (
    BLOCK,
    PARAMETERS,
    Rows,
    all_true,
    apply_edits,
    padded_width,
    row_parameters,
    without_padding,
)
from topw_deploy.export.tail.literal import compact_answer, literal_answer, moved_answer, pool_answer
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor, scope
from topw_deploy.export.tail.spec import DOMAIN, OP_TYPE, TailSpec, tail_inputs, tail_outputs
from topw_deploy.sampling.parameters import GREEDY_BELOW


def build_tail(spec: TailSpec) -> ir.Function:
    """The function from `tail_inputs(spec)` to `tail_outputs(spec)`, with its constants."""
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
    """Sample: `tail_inputs(spec)` -> `tail_outputs(spec)`.

    A row's answer depends neither on `spec.form` nor on other rows.
    """
    rows = row_parameters(op, [inputs[name] for name in PARAMETERS])
    direct = edited_logits(op, spec, inputs) if not skips_edits(spec) else None
    blocks = search(op, spec, inputs) if direct is None else largest_blocks(op, direct, padded_width(spec.vocab_size))
    path = short_path(op, spec, blocks, rows)
    share = top_share(op, direct, path.candidates, rows) if spec.with_mass else None

    def edited() -> Tensor:
        return edited_logits(op, spec, inputs) if direct is None else direct

    def narrow() -> Tensor:
        return without_padding(op, edited(), spec.vocab_size)

    def fast() -> Answer:
        # All true: settled rows have uniform numbers >= 0.
        return fast_answer(op, spec, path, op.GreaterOrEqual(rows.uniform, op.constant(0.0)))

    def pooled() -> tuple[Answer, Tensor]:
        mine = all_true(op, path.settled, axis=1)
        answer, final = pool_answer(op, spec, narrow(), rows)
        return merge(op, mine, fast_answer(op, spec, path, mine), answer), op.Or(mine, final)

    def moved(sure: Tensor) -> Answer:
        return moved_answer(op, spec, narrow(), rows, inputs, sure)

    def everything() -> Answer:
        mine = all_true(op, path.settled, axis=1)
        quick = fast_answer(op, spec, path, mine)
        if spec.form != "onnxruntime":
            return merge(op, mine, quick, literal_answer(op, spec, narrow(), rows, inputs))
        index = places_of(op, op.Not(mine))
        others = without_padding(op, op.Gather(edited(), index, axis=0), spec.vocab_size)
        return put_answer(op, quick, index, compact_answer(op, spec, others, take_rows(op, rows, index), inputs))

    if spec.form == "static":
        return finish(op, spec, everything(), share)
    settled = all_true(op, path.settled)
    if spec.form == "portable" and spec.has_geometry:
        return _two_branches(op, spec, settled, share, fast, pooled, moved)
    return op.branch(settled, lambda: finish(op, spec, fast(), share), lambda: finish(op, spec, everything(), share))


def _two_branches(
    op: Ops,
    spec: TailSpec,
    settled: Tensor,
    share: Tensor | None,
    fast: Callable[[], Answer],
    pooled: Callable[[], tuple[Answer, Tensor]],
    moved: Callable[[Tensor], Answer],
) -> list[Tensor]:
    """The `portable` form with geometry: two consecutive branches.

    The first builds the pool unless candidates settle every row, the second computes distances unless every answer is
    final. With a dynamic batch NVIDIA's builder refuses nested branches and sides of different shapes, so the second
    rebuilds the pool, which is cheap.
    """

    def by_candidates() -> list[Tensor]:
        return [op.Identity(settled), *parts_of(fast())]

    def by_pool() -> list[Tensor]:
        answer, final = pooled()
        return [all_true(op, final), *parts_of(answer)]

    answered, *parts = op.branch(settled, by_candidates, by_pool)
    answer = answer_of(spec, parts)

    def by_distances() -> list[Tensor]:
        invalid = op.Less(answer.drawn.token, op.constant(0, np.int64))
        final = op.Or(answer.certified, invalid)
        mixed = merge(op, final, answer, moved(answer.certified))
        return finish(op, spec, replace(mixed, certified=answer.certified), share)

    return op.branch(answered, lambda: finish(op, spec, answer, share), by_distances)


def skips_edits(spec: TailSpec) -> bool:
    """Whether unedited logits are read in place, in a separate branch.

    False if padding or `mass` needs a copy, or the vocabulary is small.
    """
    whole = spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES
    return whole and spec.form != "static" and not spec.with_mass


def edited_logits(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    edits = (inputs["edit_ids"], inputs["edit_penalty"], inputs["edit_bias"])
    return apply_edits(op, inputs["logits"], *edits, vocab_size=spec.vocab_size)


@scope
def search(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Blocks:
    """The largest blocks, read from the input directly if there are no edits."""

    def parts(blocks: Blocks) -> list[Tensor]:
        return [blocks.logits, blocks.index, blocks.total]

    def plain() -> list[Tensor]:
        return parts(largest_blocks(op, inputs["logits"], spec.vocab_size))

    def edited() -> list[Tensor]:
        wide = edited_logits(op, spec, inputs)
        return parts(largest_blocks(op, wide, padded_width(spec.vocab_size)))

    no_edits = op.Equal(op.Size(inputs["edit_ids"]), op.constant(0, np.int64))
    return Blocks(*op.branch(no_edits, plain, edited))


@scope
def top_share(op: Ops, logits: Tensor, candidates: Candidates, rows: Rows) -> Tensor:
    """Softmax of the largest logit at Ts: float32 [batch, 1]; NaN for greedy rows."""
    temperature, selection, *_ = rows.given
    asked = op.Where(op.Equal(selection, op.constant(0.0)), temperature, selection)
    frozen = op.Less(asked, op.constant(GREEDY_BELOW))
    logs = op.LogSoftmax(op.Div(logits, op.Where(frozen, op.constant(1.0), asked)), axis=1)
    top = op.GatherElements(logs, op.Gather(candidates.ids, op.constant([0], np.int64), axis=1), axis=1)
    return op.Where(frozen, op.constant(np.nan), op.Exp(top))
