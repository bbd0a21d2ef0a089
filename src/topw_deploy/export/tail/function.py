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
from topw_deploy.export.tail.candidates import short_path
from topw_deploy.export.tail.dynamic import places_of, take_rows
from topw_deploy.export.tail.inputs import (
    PARAMETERS,
    all_true,
    row_parameters,
    without_padding,
)
from topw_deploy.export.tail.literal import compact_answer, literal_answer, moved_answer, pool_answer
from topw_deploy.export.tail.logits import Logits
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor
from topw_deploy.export.tail.spec import DOMAIN, OP_TYPE, TailSpec, tail_inputs, tail_outputs


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
    logits = Logits(op, spec, inputs)
    path = short_path(op, spec, logits.blocks(), rows)
    share = logits.top_share(path.candidates, rows) if spec.with_mass else None

    def fast() -> Answer:
        # All true: settled rows have uniform numbers >= 0.
        return fast_answer(op, spec, path, op.GreaterOrEqual(rows.uniform, op.constant(0.0)))

    def pooled() -> tuple[Answer, Tensor]:
        mine = all_true(op, path.settled, axis=1)
        answer, final = pool_answer(op, spec, logits.narrow(), rows)
        return merge(op, mine, fast_answer(op, spec, path, mine), answer), op.Or(mine, final)

    def moved(sure: Tensor) -> Answer:
        return moved_answer(op, spec, logits.narrow(), rows, inputs, sure)

    def everything() -> Answer:
        mine = all_true(op, path.settled, axis=1)
        quick = fast_answer(op, spec, path, mine)
        if spec.form != "onnxruntime":
            return merge(op, mine, quick, literal_answer(op, spec, logits.narrow(), rows, inputs))
        index = places_of(op, op.Not(mine))
        others = without_padding(op, op.Gather(logits.masked(), index, axis=0), spec.vocab_size)
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
