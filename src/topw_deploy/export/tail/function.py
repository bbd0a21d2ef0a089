"""The function `topw::TopWSample` (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.tail.answer import (
    CERTIFIED,
    Answer,
    answer_of,
    fast_answer,
    finish,
    finish_fast,
    merge,
    parts_of,
    put_answer,
)
from topw_deploy.export.tail.candidates import Search, ShortPath, short_path
from topw_deploy.export.tail.dynamic import places_of, take_rows
from topw_deploy.export.tail.inputs import (
    PARAMETERS,
    Rows,
    all_true,
    row_parameters,
    without_padding,
)
from topw_deploy.export.tail.literal import compact_answer, literal_answer, moved_answer, pool_answer
from topw_deploy.export.tail.logits import Logits
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor, remove_unused
from topw_deploy.export.tail.rules.answer import (
    candidate_answer,
    from_columns,
    is_pending,
    list_answer,
    list_length,
    pending,
    vocabulary_answer,
)
from topw_deploy.export.tail.rules.inputs import RuleRows, only_top_w, rule_rows, take_rules
from topw_deploy.export.tail.rules.statistics import Statistics, row_statistics, take_statistics
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
    remove_unused(graph)
    return ir.Function(DOMAIN, OP_TYPE, graph=graph, attributes=())


def sample(op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Sample: `tail_inputs(spec)` -> `tail_outputs(spec)`.

    A row's answer depends neither on `spec.form` nor on other rows.
    """
    rows = row_parameters(op, [inputs[name] for name in PARAMETERS], None if spec.carries_rules else inputs["rule"])
    logits = Logits(op, spec, inputs)
    found = logits.search()
    path = short_path(op, spec, found, rows)
    share = logits.top_share(path.candidates, rows) if spec.with_mass else None
    call = Call(op, spec, inputs, rows, logits, found, path)
    if spec.form == "static":
        return finish(op, spec, call.everything(), share)
    if spec.form == "portable":
        return finish(op, spec, _branches(call), share)
    return op.branch(
        call.all_settled(),
        lambda: finish_fast(op, spec, path, share),
        lambda: finish(op, spec, call.nested(), share),
    )


@dataclass(frozen=True)
class Call:
    """One call of the function, with the parts of its answer that branches choose from."""

    op: Ops
    spec: TailSpec
    inputs: Mapping[str, Tensor]
    rows: Rows
    logits: Logits
    search: Search
    path: ShortPath

    def fast(self) -> Answer:
        """The candidates' answer, final in rows of Top-W that they settle."""
        return fast_answer(self.op, self.spec, self.path, self.search)

    def only_top_w(self) -> Tensor:
        """Whether all rows use Top-W, bool scalar."""
        return only_top_w(self.op, self.inputs["rule"])

    def all_settled(self) -> Tensor:
        """Whether all rows use Top-W and are settled, bool scalar."""
        settled = all_true(self.op, self.path.settled)
        return self.op.And(self.only_top_w(), settled) if self.spec.carries_rules else settled

    def ruled(self) -> RuleRows:
        return rule_rows(self.op, self.spec.rules, self.inputs["rule"], self.inputs["rule_values"], self.rows)

    def answered(self) -> Tensor:
        """Whether a row is settled or has another rule: bool [batch, 1]."""
        op = self.op
        settled = op.Cast(self.path.settled, to=9)
        return op.Or(self.other(), settled) if self.spec.carries_rules else settled

    def other(self) -> Tensor:
        """Whether a row has another rule than Top-W: bool [batch, 1]."""
        return self.op.Cast(self.op.Unsqueeze(self.inputs["rule"], self.op.constant([1], np.int64)), to=9)

    def by_candidates(self, before: Answer) -> Answer:
        """The candidates' answers for rows with other rules, pending where they are not proven."""
        op, ruled = self.op, self.ruled()
        found = row_statistics(op, self.logits.masked(), self.search.candidates.largest(op), ruled, self.rows)
        answer = candidate_answer(op, self.spec, self.search, ruled, found, self.rows)
        return merge(op, self.other(), answer, before)

    def by_list(self, before: Answer) -> Answer:
        """Answer the pending rows that the longer list proves, and the invalid ones."""
        op = self.op
        ruled, found = from_columns(op, self.spec, before.columns)
        answer, final = list_answer(
            op, self.spec, self.logits.masked(), list_length(self.spec), ruled, found, self.rows
        )
        return merge(op, op.And(is_pending(op, before), final), answer, before)

    def by_vocabulary(self, before: Answer) -> Answer:
        """Answer the pending rows."""
        op = self.op
        ruled, found = from_columns(op, self.spec, before.columns)
        answer = vocabulary_answer(op, self.spec, self.logits.masked(), ruled, found, self.rows)
        return merge(op, is_pending(op, before), answer, before)

    def pooled(self, before: Answer) -> tuple[Answer, Tensor]:
        """Answer the other rows without distances. Also returns the final rows, bool [batch, 1]."""
        op, answered = self.op, self.answered()
        found, final = pool_answer(op, self.spec, self.logits.narrow(), self.rows)
        return merge(op, answered, before, found), op.Or(answered, final)

    def literal(self, before: Answer) -> Answer:
        """Answer the other rows, without control flow."""
        found = literal_answer(self.op, self.spec, self.logits.narrow(), self.rows, self.inputs)
        return merge(self.op, self.answered(), before, found)

    def everything(self) -> Answer:
        """Everything, without control flow: other rules always over the whole vocabulary."""
        op, answer = self.op, self.fast()
        if self.spec.carries_rules:
            logits = self.logits.masked()
            largest = op.ReduceMax(logits, op.constant([1], np.int64), keepdims=1)
            ruled = self.ruled()
            found = row_statistics(op, logits, largest, ruled, self.rows)
            other = vocabulary_answer(op, self.spec, logits, ruled, found, self.rows)
            answer = merge(op, self.other(), other, answer)
        return self.literal(answer)

    def nested(self) -> Answer:
        """Everything, with branches inside branches that skip rows."""
        op, spec = self.op, self.spec
        logits = self.logits.masked()  # recorded before the branches, which then share it
        answer = self.fast()
        if spec.carries_rules:
            fast = answer
            answer = answer_of(
                op.branch(self.only_top_w(), lambda: parts_of(fast), lambda: self._other_rules(logits, fast))
            )
        answered = self.answered()

        def by_pool() -> list[Tensor]:
            index = places_of(op, op.Not(answered))
            others = without_padding(op, op.Gather(logits, index, axis=0), spec.vocab_size)
            found = compact_answer(op, spec, others, take_rows(op, self.rows, index), self.inputs)
            return parts_of(put_answer(op, answer, index, found))

        return answer_of(op.branch(all_true(op, answered), lambda: parts_of(answer), by_pool))

    def _other_rules(self, logits: Tensor, before: Answer) -> list[Tensor]:
        op, spec, rows, ruled = self.op, self.spec, self.rows, self.ruled()
        found = row_statistics(op, logits, self.search.candidates.largest(op), ruled, rows)
        answer = candidate_answer(op, spec, self.search, ruled, found, rows)
        answer = merge(op, self.other(), answer, before)
        proven = all_true(op, op.Not(is_pending(op, answer)))
        return op.branch(
            proven, lambda: parts_of(answer), lambda: parts_of(_by_lists(op, spec, logits, ruled, found, rows, answer))
        )


def _by_lists(
    op: Ops, spec: TailSpec, logits: Tensor, ruled: RuleRows, found: Statistics, rows: Rows, before: Answer
) -> Answer:
    """Answer the pending rows, from the list if it proves them, else from the whole vocabulary. For onnxruntime."""
    whole = op.constant([spec.vocab_size], np.int64)

    def by_list(length: Tensor, *parts: Tensor) -> list[Tensor]:
        answer = answer_of(parts)
        index = places_of(op, is_pending(op, answer))
        taken = take_rules(op, ruled, index), take_statistics(op, found, index), take_rows(op, rows, index)
        part, final = list_answer(op, spec, op.Gather(logits, index, axis=0), length, *taken)
        answer = put_answer(op, answer, index, pending(op, spec, part, final))
        return [op.Not(all_true(op, final)), whole, *parts_of(answer)]

    first = list_length(spec)
    if first:
        _, *parts = op.loop(2, [op.constant([first], np.int64), *parts_of(before)], by_list)
    else:
        _, _, *parts = by_list(whole, *parts_of(before))
    return answer_of(parts)


def _branches(call: Call) -> Answer:
    """The `portable` form: consecutive branches; each answers rows that earlier ones do not.

    1. the candidates' answers, without the work for other rules unless a row has one;
    2. other rules from a longer list;
    3. other rules over the whole vocabulary;
    4. Top-W over the pool, without distances;
    5. with distances.

    With a dynamic batch NVIDIA's builder refuses nested branches and sides of different shapes. So branches 2, 4 and 5
    each take the largest logits again, which is cheap.
    """
    op, spec = call.op, call.spec
    if spec.carries_rules:
        no_pool, answer = _rules(call)
    else:
        no_pool, answer = call.all_settled(), call.fast()
    if not spec.has_geometry:
        before = answer
        return answer_of(op.branch(no_pool, lambda: parts_of(before), lambda: parts_of(call.literal(before))))
    return _with_geometry(call, answer, no_pool)


def _rules(call: Call) -> tuple[Tensor, Answer]:
    """(Whether the pool is not needed, bool scalar; the answers of settled rows and rows with other rules)."""
    op, top_w = call.op, call.only_top_w()
    fast = call.fast()

    def by_candidates() -> list[Tensor]:
        return [top_w, all_true(op, call.path.settled), *parts_of(fast)]

    def by_rules() -> list[Tensor]:
        answer = call.by_candidates(fast)
        proven = all_true(op, op.Not(is_pending(op, answer)))
        return [proven, all_true(op, call.answered()), *parts_of(answer)]

    proven, no_pool, *parts = op.branch(top_w, by_candidates, by_rules)
    if list_length(call.spec):
        proven, *parts = _by_list(call, proven, answer_of(parts))
    answer = answer_of(parts)
    parts = op.branch(proven, lambda: parts_of(answer), lambda: parts_of(call.by_vocabulary(answer)))
    return no_pool, answer_of(parts)


def _by_list(call: Call, proven: Tensor, before: Answer) -> list[Tensor]:
    """Branch 2: whether all rows with other rules are answered, bool scalar, and the parts of the answer."""
    op = call.op

    def by_list() -> list[Tensor]:
        answer = call.by_list(before)
        return [all_true(op, op.Not(is_pending(op, answer))), *parts_of(answer)]

    return op.branch(proven, lambda: [proven, *parts_of(before)], by_list)


def _with_geometry(call: Call, before: Answer, no_pool: Tensor) -> Answer:
    """Branches 4 and 5."""
    op, spec = call.op, call.spec

    def by_pool() -> list[Tensor]:
        found, final = call.pooled(before)
        return [all_true(op, final), *parts_of(pending(op, spec, found, final))]

    answered, *parts = op.branch(no_pool, lambda: [no_pool, *parts_of(before)], by_pool)
    answer = answer_of(parts)

    def by_distances() -> list[Tensor]:
        sure = answer.column(op, CERTIFIED)
        found = moved_answer(op, spec, call.logits.narrow(), call.rows, call.inputs, sure)
        return parts_of(merge(op, is_pending(op, answer), found, answer))

    return answer_of(op.branch(answered, lambda: parts_of(answer), by_distances))
