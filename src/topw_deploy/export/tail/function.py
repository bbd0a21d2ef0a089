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
    apply_mask,
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
    direct = masked_logits(op, spec, inputs) if reads_all_at_once(spec) else None
    blocks = search(op, spec, inputs) if direct is None else largest_blocks(op, direct, padded_width(spec.vocab_size))
    path = short_path(op, spec, blocks, rows)
    share = top_share(op, direct, path.candidates, rows) if spec.with_mass else None

    def masked() -> Tensor:
        return masked_logits(op, spec, inputs) if direct is None else direct

    def narrow() -> Tensor:
        return without_padding(op, masked(), spec.vocab_size)

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
        others = without_padding(op, op.Gather(masked(), index, axis=0), spec.vocab_size)
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


def reads_all_at_once(spec: TailSpec) -> bool:
    """Whether edited and masked logits are made for all rows, without a branch for rows that need neither."""
    return spec.form == "static" or spec.with_mass


def reads_in_place(spec: TailSpec) -> bool:
    """Whether unedited logits can be searched in place: whole blocks, and more than are searched."""
    return spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES


def edited_logits(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    edits = (inputs["edit_ids"], inputs["edit_penalty"], inputs["edit_bias"])
    return apply_edits(op, inputs["logits"], *edits, vocab_size=spec.vocab_size)


def masked_logits(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    return apply_mask(op, edited_logits(op, spec, inputs), inputs["allowed"], spec.vocab_size)


@scope
def search(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> Blocks:
    """The largest blocks. Skips the mask where there is none and, if blocks are whole, the edits.

    Nested branches are for onnxruntime only, so the other form reads edited rows as if they had a mask.
    """
    words, nothing = inputs["allowed"], op.constant(0, np.int64)

    def parts(logits: Tensor, width: int = padded_width(spec.vocab_size)) -> list[Tensor]:
        blocks = largest_blocks(op, logits, width)
        return [blocks.logits, blocks.index, blocks.total]

    def edited() -> list[Tensor]:
        wide, unmasked = edited_logits(op, spec, inputs), op.Equal(op.Size(words), nothing)
        return op.branch(unmasked, lambda: parts(wide), lambda: parts(apply_mask(op, wide, words, spec.vocab_size)))

    if not reads_in_place(spec):
        return Blocks(*edited())
    plain, vocab = inputs["logits"], spec.vocab_size
    nested = edited if spec.form == "onnxruntime" else lambda: parts(masked_logits(op, spec, inputs))
    unchanged = op.Equal(op.Add(op.Size(inputs["edit_ids"]), op.Size(words)), nothing)
    return Blocks(*op.branch(unchanged, lambda: parts(plain, vocab), nested))


@scope
def top_share(op: Ops, logits: Tensor, candidates: Candidates, rows: Rows) -> Tensor:
    """Softmax of the largest logit at Ts: float32 [batch, 1]; NaN for greedy rows."""
    temperature, selection, *_ = rows.given
    asked = op.Where(op.Equal(selection, op.constant(0.0)), temperature, selection)
    frozen = op.Less(asked, op.constant(GREEDY_BELOW))
    logs = op.LogSoftmax(op.Div(logits, op.Where(frozen, op.constant(1.0), asked)), axis=1)
    top = op.GatherElements(logs, op.Gather(candidates.ids, op.constant([0], np.int64), axis=1), axis=1)
    return op.Where(frozen, op.constant(np.nan), op.Exp(top))
