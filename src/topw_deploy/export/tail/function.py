"""The function `topw::TopWSample` (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.export.tail.answer import (
    Answer,
    answer_of,
    fast_answer,
    finish,
    parts_of,
    put_answer,
)
from topw_deploy.export.tail.candidates import Blocks, ShortPath, short_path
from topw_deploy.export.tail.dynamic import places_of, take_candidates, take_rows
from topw_deploy.export.tail.inputs import (
    PARAMETERS,
    Rows,
    all_true,
    row_parameters,
    without_padding,
)
from topw_deploy.export.tail.literal import compact_answer, literal_answer, moved_answer, pool_answer
from topw_deploy.export.tail.logits import Logits
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor
from topw_deploy.export.tail.rules.answer import candidate_answer, is_pending, join, pending, ruled_rows, vocabulary_answer
from topw_deploy.export.tail.rules.inputs import only_top_w, take_rules
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
    blocks = logits.blocks()
    path = short_path(op, spec, blocks, rows)
    share = logits.top_share(path.candidates, rows) if spec.with_mass else None
    call = Call(op, spec, inputs, rows, logits, blocks, path)
    if spec.form == "static":
        return finish(op, spec, call.everything(), share)
    top_w = only_top_w(op, inputs["rule"])
    if spec.form == "portable":
        return _branches(call, top_w, share)
    settled = op.And(top_w, all_true(op, path.settled))
    return op.branch(
        settled, lambda: finish(op, spec, call.fast(), share), lambda: finish(op, spec, call.nested(top_w), share)
    )


@dataclass(frozen=True)
class Call:
    """One call of the function, with the parts of its answer that branches choose from."""

    op: Ops
    spec: TailSpec
    inputs: Mapping[str, Tensor]
    rows: Rows
    logits: Logits
    blocks: Blocks
    path: ShortPath

    def fast(self) -> Answer:
        """The candidates' answer if all rows are settled: then all uniform numbers are >= 0."""
        return fast_answer(self.op, self.spec, self.path, self._always())

    def settled(self) -> Tensor:
        """Whether the candidates settle a row of Top-W: bool [batch, 1]."""
        return all_true(self.op, self.path.settled, axis=1)

    def by_candidates(self) -> Answer:
        """The candidates' answer for rows of all rules; other rows are pending."""
        op = self.op
        ruled = ruled_rows(op, self.inputs, self.rows)
        found, proven = candidate_answer(
            op, self.spec, self.logits.masked(), self.blocks, self.path, ruled, self.rows
        )
        done = op.Or(op.And(ruled.other, proven), op.And(op.Not(ruled.other), self.settled()))
        return pending(op, join(op, ruled.other, found, self.fast()), done)

    def by_vocabulary(self, answer: Answer) -> Answer:
        """Answer the pending rows of other rules."""
        op = self.op
        ruled = ruled_rows(op, self.inputs, self.rows)
        found = vocabulary_answer(op, self.spec, self.logits.masked(), self.path.candidates, ruled, self.rows)
        return join(op, op.And(ruled.other, is_pending(op, answer)), found, answer)

    def pooled(self, answer: Answer) -> tuple[Answer, Tensor]:
        """Answer the pending rows of Top-W without distances. Also returns the final rows, bool [batch, 1]."""
        op = self.op
        found, final = pool_answer(op, self.spec, self.logits.narrow(), self.rows)
        waiting = is_pending(op, answer)
        return join(op, waiting, found, answer), op.Or(op.Not(waiting), final)

    def literal(self, answer: Answer) -> Answer:
        """Answer the pending rows of Top-W, without control flow."""
        found = literal_answer(self.op, self.spec, self.logits.narrow(), self.rows, self.inputs)
        return join(self.op, is_pending(self.op, answer), found, answer)

    def everything(self) -> Answer:
        return self.literal(self.by_vocabulary(self.by_candidates()))

    def nested(self, top_w: Tensor) -> Answer:
        """Everything, with branches inside branches that skip rows."""
        op, spec = self.op, self.spec

        def settled() -> list[Tensor]:
            return parts_of(pending(op, self.fast(), self.settled()))

        parts = op.branch(top_w, settled, lambda: self._other_rules())
        answer = answer_of(spec, parts)

        def by_pool() -> list[Tensor]:
            index = places_of(op, is_pending(op, answer))
            others = without_padding(op, op.Gather(self.logits.masked(), index, axis=0), spec.vocab_size)
            rows = take_rows(op, self.rows, index)
            found = compact_answer(op, spec, others, rows, self.inputs)
            return parts_of(put_answer(op, answer, index, found))

        return answer_of(spec, op.branch(_none(op, is_pending(op, answer)), lambda: parts_of(answer), by_pool))

    def _other_rules(self) -> list[Tensor]:
        op, answer = self.op, self.by_candidates()
        ruled = ruled_rows(op, self.inputs, self.rows)
        waiting = op.And(ruled.other, is_pending(op, answer))

        def by_vocabulary() -> list[Tensor]:
            index = places_of(op, waiting)
            rows = take_rows(op, self.rows, index)
            candidates = take_candidates(op, self.path.candidates, index)
            logits = op.Gather(self.logits.masked(), index, axis=0)
            found = vocabulary_answer(op, self.spec, logits, candidates, take_rules(op, ruled, index), rows)
            return parts_of(put_answer(op, answer, index, found))

        return op.branch(_none(op, waiting), lambda: parts_of(answer), by_vocabulary)

    def _always(self) -> Tensor:
        return self.op.GreaterOrEqual(self.rows.uniform, self.op.constant(0.0))


def _none(op: Ops, flags: Tensor) -> Tensor:
    """Whether no flag is true."""
    return all_true(op, op.Not(flags))


def _branches(call: Call, top_w: Tensor, share: Tensor | None) -> list[Tensor]:
    """The `portable` form: consecutive branches, of which each answers the rows that are pending before it.

    1. the candidates' answers, without the work for other rules unless a row has one;
    2. other rules over the whole vocabulary;
    3. Top-W over the pool, without distances;
    4. with distances.

    With a dynamic batch NVIDIA's builder refuses nested branches and sides of different shapes. So the last branch
    rebuilds the pool, which is cheap.
    """
    op, spec = call.op, call.spec

    def by_candidates() -> list[Tensor]:
        settled = call.settled()
        return [top_w, all_true(op, settled), *parts_of(pending(op, call.fast(), settled))]

    def by_rules() -> list[Tensor]:
        answer = call.by_candidates()
        waiting = is_pending(op, answer)
        ruled = ruled_rows(op, call.inputs, call.rows)
        return [
            _none(op, op.And(waiting, ruled.other)),
            _none(op, op.And(waiting, op.Not(ruled.other))),
            *parts_of(answer),
        ]

    no_rules, no_pool, *parts = op.branch(top_w, by_candidates, by_rules)
    answer = answer_of(spec, parts)
    answer = answer_of(
        spec, op.branch(no_rules, lambda: parts_of(answer), lambda: parts_of(call.by_vocabulary(answer)))
    )
    if not spec.has_geometry:
        return op.branch(
            no_pool, lambda: finish(op, spec, answer, share), lambda: finish(op, spec, call.literal(answer), share)
        )
    return _with_geometry(call, answer, no_pool, share)


def _with_geometry(call: Call, answer: Answer, no_pool: Tensor, share: Tensor | None) -> list[Tensor]:
    op, spec = call.op, call.spec
    before = answer

    def by_pool() -> list[Tensor]:
        found, final = call.pooled(before)
        return [all_true(op, final), *parts_of(pending(op, found, final))]

    answered, *parts = op.branch(no_pool, lambda: [no_pool, *parts_of(before)], by_pool)
    answer = answer_of(spec, parts)

    def by_distances() -> list[Tensor]:
        waiting = is_pending(op, answer)
        found = moved_answer(op, spec, call.logits.narrow(), call.rows, call.inputs, answer.certified)
        return finish(op, spec, join(op, waiting, found, answer), share)

    return op.branch(answered, lambda: finish(op, spec, answer, share), by_distances)
