"""Build the function `topw::TopWSample` in each of its forms (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.tail.answer import (
    CERTIFIED,
    Answer,
    answer_from_outputs,
    branch_outputs,
    node_outputs,
    put_answer,
    select_answer,
    settled_answer,
    settled_outputs,
)
from topw_deploy.export.tail.candidates import CandidatePath, CandidateSearch, candidate_path
from topw_deploy.export.tail.dynamic import indices_of_true, take_parameters
from topw_deploy.export.tail.inputs import (
    PARAMETERS,
    RowParameters,
    all_true,
    row_parameters,
    without_padding,
)
from topw_deploy.export.tail.literal import alternated_answer, base_scan_answer, literal_answer, pruned_answer
from topw_deploy.export.tail.logits import InputLogits
from topw_deploy.export.tail.ops import Ops, Recorder, Tensor, remove_unused
from topw_deploy.export.tail.rules.answer import (
    candidate_answer,
    is_pending,
    list_answer,
    list_length,
    mark_pending,
    rules_and_statistics,
    vocabulary_answer,
)
from topw_deploy.export.tail.rules.inputs import RowRules, all_use_top_w, row_rules, take_rules
from topw_deploy.export.tail.rules.statistics import RuleStatistics, row_statistics, take_statistics
from topw_deploy.export.tail.spec import DOMAIN, OP_TYPE, TailSpec, tail_inputs, tail_outputs


def build_tail(spec: TailSpec) -> ir.Function:
    """Build the ONNX function that maps `tail_inputs(spec)` to `tail_outputs(spec)`."""
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
    """Sample a token for each row. Returns the tensors of `tail_outputs(spec)`.

    A row's answer depends neither on `spec.form` nor on other rows.

    inputs: the tensors of `tail_inputs(spec)`, by name.
    """
    only_rule = None if spec.carries_rules else inputs["rule"]
    parameters = row_parameters(op, [inputs[name] for name in PARAMETERS], only_rule)
    logits = InputLogits(op, spec, inputs)
    search = logits.search_candidates()
    path = candidate_path(op, spec, search, parameters)
    top_probability = logits.top_probability(path.candidates, parameters) if spec.with_mass else None
    call = SamplerCall(op, spec, inputs, parameters, logits, search, path)
    if spec.form == "static":
        return node_outputs(op, spec, _answer_without_branches(call), top_probability)
    if spec.form == "portable":
        return node_outputs(op, spec, _answer_in_consecutive_branches(call), top_probability)
    return op.branch(
        call.all_settled(),
        lambda: settled_outputs(op, spec, path, top_probability),
        lambda: node_outputs(op, spec, _answer_in_nested_branches(call), top_probability),
    )


@dataclass(frozen=True)
class SamplerCall:
    """One call of the function: what all forms compute first, and the steps that they combine.

    parameters, logits: of the inputs.
    search: the candidates.
    path: Top-W's answer from the candidates.
    """

    op: Ops
    spec: TailSpec
    inputs: Mapping[str, Tensor]
    parameters: RowParameters
    logits: InputLogits
    search: CandidateSearch
    path: CandidatePath

    def settled_answer(self) -> Answer:
        """The candidates' answer under Top-W, final in settled rows."""
        return settled_answer(self.op, self.spec, self.path, self.search)

    def all_use_top_w(self) -> Tensor:
        """Whether all rows use Top-W, bool scalar."""
        return all_use_top_w(self.op, self.inputs["rule"])

    def all_settled(self) -> Tensor:
        """Whether all rows use Top-W and are settled, bool scalar."""
        settled = all_true(self.op, self.path.is_settled)
        return self.op.And(self.all_use_top_w(), settled) if self.spec.carries_rules else settled

    def needs_no_pool(self) -> Tensor:
        """Whether a row is settled or has another rule than Top-W: bool [batch, 1]."""
        op = self.op
        settled = op.Cast(self.path.is_settled, to=9)
        return op.Or(self.has_other_rule(), settled) if self.spec.carries_rules else settled

    def has_other_rule(self) -> Tensor:
        """Whether a row has another rule than Top-W: bool [batch, 1]."""
        return self.op.Cast(self.op.Unsqueeze(self.inputs["rule"], self.op.constant([1], np.int64)), to=9)

    def rules(self) -> RowRules:
        """The rules of the rows."""
        return row_rules(self.op, self.spec.rules, self.inputs["rule"], self.inputs["rule_values"], self.parameters)

    def answer_rules_from_candidates(self, before: Answer) -> Answer:
        """Answer the rows with other rules from the candidates; those that these do not prove become pending."""
        op, rules = self.op, self.rules()
        largest = self.search.candidates.largest
        statistics = row_statistics(op, self.logits.masked_logits(), largest(op), rules, self.parameters)
        answer = candidate_answer(op, self.spec, self.search, rules, statistics, self.parameters)
        return select_answer(op, self.has_other_rule(), answer, before)

    def answer_rules_from_list(self, before: Answer) -> Answer:
        """Answer the pending rows that are invalid or that the longer list proves."""
        op = self.op
        rules, statistics = rules_and_statistics(op, self.spec, before.columns)
        answer, is_final = list_answer(
            op, self.spec, self.logits.masked_logits(), list_length(self.spec), rules, statistics, self.parameters
        )
        return select_answer(op, op.And(is_pending(op, before), is_final), answer, before)

    def answer_rules_from_vocabulary(self, before: Answer) -> Answer:
        """Answer all pending rows."""
        op = self.op
        rules, statistics = rules_and_statistics(op, self.spec, before.columns)
        answer = vocabulary_answer(op, self.spec, self.logits.masked_logits(), rules, statistics, self.parameters)
        return select_answer(op, is_pending(op, before), answer, before)

    def answer_top_w_by_base_scan(self, before: Answer) -> tuple[Answer, Tensor]:
        """Answer the rows that need the pool without distances.

        Also returns which rows have their final answer, bool [batch, 1].
        """
        op, needs_no_pool = self.op, self.needs_no_pool()
        answer, is_final = base_scan_answer(op, self.spec, self.logits.unpadded_logits(), self.parameters)
        return select_answer(op, needs_no_pool, before, answer), op.Or(needs_no_pool, is_final)

    def answer_top_w_literally(self, before: Answer) -> Answer:
        """Answer the rows that need the pool by the literal algorithm, without control flow."""
        answer = literal_answer(self.op, self.spec, self.logits.unpadded_logits(), self.parameters, self.inputs)
        return select_answer(self.op, self.needs_no_pool(), before, answer)


def _answer_without_branches(call: SamplerCall) -> Answer:
    """The form `static`: computes everything, and answers other rules always from the whole vocabulary."""
    op, answer = call.op, call.settled_answer()
    if call.spec.carries_rules:
        logits = call.logits.masked_logits()
        largest = op.ReduceMax(logits, op.constant([1], np.int64), keepdims=1)
        rules = call.rules()
        statistics = row_statistics(op, logits, largest, rules, call.parameters)
        other = vocabulary_answer(op, call.spec, logits, rules, statistics, call.parameters)
        answer = select_answer(op, call.has_other_rule(), other, answer)
    return call.answer_top_w_literally(answer)


def _answer_in_nested_branches(call: SamplerCall) -> Answer:
    """The form `onnxruntime`: branches inside branches, which compute only the rows that need them."""
    op, spec = call.op, call.spec
    logits = call.logits.masked_logits()  # recorded outside the branches, which then share it
    answer = call.settled_answer()
    if spec.carries_rules:
        settled = answer
        answer = answer_from_outputs(
            op.branch(
                call.all_use_top_w(),
                lambda: branch_outputs(settled),
                lambda: _answer_rules_in_nested_branches(call, logits, settled),
            )
        )
    needs_no_pool = call.needs_no_pool()

    def answer_from_pool() -> list[Tensor]:
        index = indices_of_true(op, op.Not(needs_no_pool))
        rows = without_padding(op, op.Gather(logits, index, axis=0), spec.vocab_size)
        part = pruned_answer(op, spec, rows, take_parameters(op, call.parameters, index), call.inputs)
        return branch_outputs(put_answer(op, answer, index, part))

    return answer_from_outputs(op.branch(all_true(op, needs_no_pool), lambda: branch_outputs(answer), answer_from_pool))


def _answer_rules_in_nested_branches(call: SamplerCall, logits: Tensor, before: Answer) -> list[Tensor]:
    """Answer the rows with other rules: from the candidates, then from longer lists. Returns `branch_outputs`."""
    op, spec, parameters, rules = call.op, call.spec, call.parameters, call.rules()
    statistics = row_statistics(op, logits, call.search.candidates.largest(op), rules, parameters)
    answer = candidate_answer(op, spec, call.search, rules, statistics, parameters)
    answer = select_answer(op, call.has_other_rule(), answer, before)
    return op.branch(
        _none_pending(op, answer),
        lambda: branch_outputs(answer),
        lambda: branch_outputs(_answer_pending_rows(op, spec, logits, rules, statistics, parameters, answer)),
    )


def _none_pending(op: Ops, answer: Answer) -> Tensor:
    """Whether no row is pending, bool scalar."""
    return all_true(op, op.Not(is_pending(op, answer)))


def _answer_pending_rows(
    op: Ops,
    spec: TailSpec,
    logits: Tensor,
    rules: RowRules,
    statistics: RuleStatistics,
    parameters: RowParameters,
    before: Answer,
) -> Answer:
    """Answer the pending rows from a list, if it proves them, else from the whole vocabulary; for `onnxruntime`."""
    vocabulary = op.constant([spec.vocab_size], np.int64)

    def answer_from_list(length: Tensor, *states: Tensor) -> list[Tensor]:
        answer = answer_from_outputs(states)
        index = indices_of_true(op, is_pending(op, answer))
        own_rules, own_statistics = take_rules(op, rules, index), take_statistics(op, statistics, index)
        own_parameters, own_logits = take_parameters(op, parameters, index), op.Gather(logits, index, axis=0)
        part, is_final = list_answer(op, spec, own_logits, length, own_rules, own_statistics, own_parameters)
        answer = put_answer(op, answer, index, mark_pending(op, spec, part, is_final))
        return [op.Not(all_true(op, is_final)), vocabulary, *branch_outputs(answer)]

    length = list_length(spec)
    if length:  # an iteration with the list, then one with the whole vocabulary
        _, *states = op.loop(2, [op.constant([length], np.int64), *branch_outputs(before)], answer_from_list)
    else:
        _, _, *states = answer_from_list(vocabulary, *branch_outputs(before))
    return answer_from_outputs(states)


def _answer_in_consecutive_branches(call: SamplerCall) -> Answer:
    """The form `portable`: up to five branches, one after the other. Each answers rows that earlier ones do not.

    1. From the candidates; the work for other rules is skipped if all rows use Top-W.
    2. Other rules, from a longer list.
    3. Other rules, from the whole vocabulary.
    4. Top-W, over the pool without distances.
    5. Top-W, over the pool with distances.

    Branches are neither nested nor do their two sides have outputs of different shapes: with a dynamic batch, NVIDIA's
    builder refuses both. So branches 2, 4 and 5 each find the largest logits again, which is cheap.
    """
    op, spec = call.op, call.spec
    if spec.carries_rules:
        needs_no_pool, answer = _answer_rules_in_consecutive_branches(call)
    else:
        needs_no_pool, answer = call.all_settled(), call.settled_answer()
    if spec.has_geometry:
        return _answer_from_pool_in_consecutive_branches(call, answer, needs_no_pool)
    return answer_from_outputs(
        op.branch(
            needs_no_pool,
            lambda: branch_outputs(answer),
            lambda: branch_outputs(call.answer_top_w_literally(answer)),
        )
    )


def _answer_rules_in_consecutive_branches(call: SamplerCall) -> tuple[Tensor, Answer]:
    """Branches 1 to 3: whether no row needs the pool, bool scalar, and the answer."""
    op, all_use_top_w = call.op, call.all_use_top_w()
    settled = call.settled_answer()

    def answer_top_w() -> list[Tensor]:
        return [all_use_top_w, all_true(op, call.path.is_settled), *branch_outputs(settled)]

    def answer_rules() -> list[Tensor]:
        answer = call.answer_rules_from_candidates(settled)
        none_pending = _none_pending(op, answer)
        return [none_pending, all_true(op, call.needs_no_pool()), *branch_outputs(answer)]

    none_pending, needs_no_pool, *outputs = op.branch(all_use_top_w, answer_top_w, answer_rules)
    if list_length(call.spec):
        none_pending, *outputs = _answer_rules_in_list_branch(call, none_pending, answer_from_outputs(outputs))
    answer = answer_from_outputs(outputs)
    outputs = op.branch(
        none_pending,
        lambda: branch_outputs(answer),
        lambda: branch_outputs(call.answer_rules_from_vocabulary(answer)),
    )
    return needs_no_pool, answer_from_outputs(outputs)


def _answer_rules_in_list_branch(call: SamplerCall, none_pending: Tensor, before: Answer) -> list[Tensor]:
    """Branch 2: whether no row is pending any more, bool scalar, and the `branch_outputs` of the answer."""
    op = call.op

    def answer_from_list() -> list[Tensor]:
        answer = call.answer_rules_from_list(before)
        return [_none_pending(op, answer), *branch_outputs(answer)]

    return op.branch(none_pending, lambda: [none_pending, *branch_outputs(before)], answer_from_list)


def _answer_from_pool_in_consecutive_branches(call: SamplerCall, before: Answer, needs_no_pool: Tensor) -> Answer:
    """Branches 4 and 5."""
    op, spec = call.op, call.spec

    def answer_by_base_scan() -> list[Tensor]:
        answer, is_final = call.answer_top_w_by_base_scan(before)
        return [all_true(op, is_final), *branch_outputs(mark_pending(op, spec, answer, is_final))]

    all_final, *outputs = op.branch(
        needs_no_pool, lambda: [needs_no_pool, *branch_outputs(before)], answer_by_base_scan
    )
    answer = answer_from_outputs(outputs)

    def answer_with_distances() -> list[Tensor]:
        certified = answer.column(op, CERTIFIED)
        logits = call.logits.unpadded_logits()
        alternated = alternated_answer(op, spec, logits, call.parameters, call.inputs, certified)
        return branch_outputs(select_answer(op, is_pending(op, answer), alternated, answer))

    return answer_from_outputs(op.branch(all_final, lambda: branch_outputs(answer), answer_with_distances))
