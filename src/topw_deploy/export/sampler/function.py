"""Build the function `topw::TopWSample` (docs/contract/graph.md, section 8).

The body has up to four branches, one after the other. Each answers rows that earlier ones do not:

1. other rules, from the largest logits; skipped if all rows use Top-W;
2. other rules, from the whole vocabulary; skipped if branch 1 answered all such rows;
3. Top-W, over the pool without distances; skipped if the candidates answered all rows with Top-W;
4. Top-W, over the pool with distances; skipped if branch 3 certified all its rows.

Without branches, all rows take the general way, and `Where` selects their answers. A row's answer depends neither on
the branches nor on other rows. Branches are not nested, and their two sides have outputs of the same shapes: with a
dynamic batch, NVIDIA's builder refuses anything else. So branches 2, 3 and 4 each find the largest logits again, which
is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.sampler.candidates import (
    CandidateLogits,
    CandidatePath,
    DrawColumns,
    candidate_path,
    kept_candidates,
    search_candidates,
)
from topw_deploy.export.sampler.node import (
    DOMAIN,
    LARGEST,
    OP_TYPE,
    PARAMETERS,
    InputLogits,
    RowParameters,
    SamplerSpec,
    all_true,
    all_true_in_row,
    are_in_range,
    padded_width,
    row_parameters,
    sampler_inputs,
    sampler_outputs,
    valid_rows,
    without_padding,
)
from topw_deploy.export.sampler.ops import Ops, Tensor, remove_unused, scope
from topw_deploy.export.sampler.pool import PoolTokens, alternate, base_scan, candidate_pool, draw_member, up_to
from topw_deploy.export.sampler.rules import (
    KeptSet,
    RowRules,
    RowSums,
    crop_mass,
    draw_kept,
    kept_tokens,
    row_rules,
    row_sums,
)
from topw_deploy.export.sampler.thresholds import LIST, Tokens, flatten_blocks, list_tokens, vocabulary_tokens
from topw_deploy.sampling.parameters import GREEDY_BELOW

TOKEN, LOGPROB, KEPT, CERTIFIED, MASS = range(5)
"""The numbers of the columns of `Answer.columns`."""

_NOT_DONE = -2.0
"""The token of a row that a later branch will answer."""


@dataclass(frozen=True)
class Answer:
    """The answer of one branch for all rows.

    columns: float32 [batch, 4 or 5], in one tensor because each output of a branch costs time. `TOKEN` and `KEPT` are
        whole numbers, at most 2^24; `CERTIFIED` is 0 or 1. `MASS`, the sum of the crop's weights at Ts in units of the
        largest, exists only for `with_mass`.
    keep_mask: bool [batch, padded], or None without `with_keep_mask`.
    """

    columns: Tensor
    keep_mask: Tensor | None = None

    def outputs(self) -> list[Tensor]:
        """The tensors, as outputs of a branch; the inverse of `Answer(*outputs)`."""
        return [self.columns, self.keep_mask] if self.keep_mask is not None else [self.columns]

    def column(self, op: Ops, number: int) -> Tensor:
        """The column with this number, float32 [batch, 1]."""
        return op.Gather(self.columns, [number], axis=1)


@dataclass(frozen=True)
class SamplerCall:
    """One call of the function: what all branches share.

    parameters, logits: of the inputs.
    candidates, total: of `search_candidates`.
    path: Top-W's answer from the candidates.
    rule: the code of each row's rule, float32 [batch, 1].
    """

    op: Ops
    spec: SamplerSpec
    inputs: Mapping[str, Tensor]
    parameters: RowParameters
    logits: InputLogits
    candidates: CandidateLogits
    total: Tensor
    path: CandidatePath
    rule: Tensor

    def uses_other_rule(self) -> Tensor:
        """Whether a row uses another rule than Top-W: bool [batch, 1]."""
        return self.op.Cast(self.rule, to=9)

    def rules_and_sums(self) -> tuple[RowRules, RowSums]:
        """The rules of the rows, and the sums over the vocabulary that they need."""
        op, largest = self.op, self.candidates.largest(self.op)
        rules = row_rules(op, self.spec.rules, self.inputs["rule"], self.inputs["rule_values"], self.parameters)
        return rules, row_sums(op, self.vocabulary(), largest)

    def vocabulary(self) -> Tokens:
        """All tokens."""
        largest = self.candidates.largest(self.op)
        return vocabulary_tokens(self.op, self.logits.masked(), largest, self.parameters, self.spec.vocab_size)


def build_function(spec: SamplerSpec) -> ir.Function:
    """Build the ONNX function that maps `sampler_inputs(spec)` to `sampler_outputs(spec)`."""
    op = Ops(spec.branches)
    inputs = {name: ir.Value(name=name) for name in sampler_inputs(spec)}
    outputs = sample(op, spec, inputs)
    for name, value in zip(sampler_outputs(spec), outputs, strict=True):
        value.name = name
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=op.nodes,
        opset_imports={domain: 1 if domain else spec.opset for domain in op.domains},
        name=OP_TYPE,
    )
    remove_unused(graph)
    return ir.Function(DOMAIN, OP_TYPE, graph=graph, attributes=())


def sample(op: Ops, spec: SamplerSpec, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Sample a token for each row. Returns the tensors of `sampler_outputs(spec)`.

    inputs: the tensors of `sampler_inputs(spec)`, by name.
    """
    rule = op.Cast(op.Unsqueeze(inputs["rule"], [1]), to=1)
    parameters = row_parameters(op, [inputs[name] for name in PARAMETERS], None if spec.carries_rules else rule)
    logits = InputLogits(op, spec, inputs)
    candidates, total = search_candidates(op, spec, logits)
    path = candidate_path(op, spec, candidates, total, parameters)
    top_probability = _top_probability(op, logits, candidates, parameters) if spec.with_mass else None
    call = SamplerCall(op, spec, inputs, parameters, logits, candidates, total, path, rule)
    # The candidates' answer for Top-W is right in rows that are done, which it certifies.
    mass = op.GatherElements(path.scan.mass, path.scan.last, axis=1) if spec.with_mass else None
    kept = kept_candidates(op, path.candidates, path.scan.last) if spec.with_keep_mask else None
    answer = _new_answer(op, spec, path.draw, path.is_done, mass, path.candidates.ids, kept)
    if spec.carries_rules:
        answer = _answer_rules(call, answer)
    return _node_outputs(op, spec, _answer_from_pool(call, answer), top_probability)


def _answer_rules(call: SamplerCall, before: Answer) -> Answer:
    """Branches 1 and 2: answer the rows with other rules."""
    op, spec = call.op, call.spec
    all_use_top_w = op.Equal(op.ReduceL1(call.rule, keepdims=0), 0.0)

    def answer_from_list() -> list[Tensor]:
        rules, sums = call.rules_and_sums()
        tokens = list_tokens(op, call.logits.masked(), sums.largest, call.parameters)
        kept = kept_tokens(op, tokens, rules, sums, call.parameters)
        bounds = [(sums.largest, -LARGEST, LARGEST), (call.total, -np.inf, LARGEST)]
        is_valid = op.Cast(all_true_in_row(op, are_in_range(op, call.parameters, bounds)), to=9)
        is_done = op.And(op.And(is_valid, rules.is_valid), kept.is_proven)
        answer = _mark_rest(op, spec, _rule_answer(call, tokens, kept), is_done)
        answer = _select(op, call.uses_other_rule(), answer, before)
        return [_all_done(op, answer), *answer.outputs()]

    def answer_from_vocabulary() -> list[Tensor]:
        rules, sums = call.rules_and_sums()
        tokens = call.vocabulary()
        answer = _rule_answer(call, tokens, kept_tokens(op, tokens, rules, sums, call.parameters))
        is_valid = op.And(rules.is_valid, valid_rows(op, call.logits.masked(), call.parameters))
        answer = _invalidate(op, spec, answer, is_valid)
        return _select(op, _is_left(op, answered), answer, answered).outputs()

    if spec.branches and spec.vocab_size > LIST:
        all_done, *outputs = op.branch(all_use_top_w, lambda: [all_use_top_w, *before.outputs()], answer_from_list)
        answered = Answer(*outputs)
    else:
        all_done, answered = all_use_top_w, _mark_rest(op, spec, before, op.Not(call.uses_other_rule()))
    return Answer(*op.branch(all_done, answered.outputs, answer_from_vocabulary))


def _answer_from_pool(call: SamplerCall, before: Answer) -> Answer:
    """Branches 3 and 4: answer the rows with Top-W that the candidates did not."""
    op, spec, parameters = call.op, call.spec, call.parameters
    # Positive for rows that the candidates answered and those with another rule, else 0.
    needs_no_pool = op.Max(call.path.is_done, op.Abs(call.rule)) if spec.carries_rules else call.path.is_done
    none_needs_pool = op.Greater(op.ReduceMin(needs_no_pool, keepdims=0), 0.0)

    def answer_without_distances() -> list[Tensor]:
        logits = call.logits.unpadded()
        pool = candidate_pool(op, logits, parameters, spec.pool_size)
        last, is_certified = base_scan(op, pool, parameters)
        is_valid = valid_rows(op, logits, parameters)
        answer = _member_answer(call, pool, up_to(op, last, pool.size), op.Cast(is_certified, to=1))
        answer = _invalidate(op, spec, answer, is_valid)
        answer = _mark_rest(op, spec, answer, op.Or(is_certified, op.Not(is_valid)))
        answer = _select(op, op.Greater(needs_no_pool, 0.0), before, answer)
        return [_all_done(op, answer), *answer.outputs()]

    all_done, *outputs = op.branch(
        none_needs_pool, lambda: [none_needs_pool, *before.outputs()], answer_without_distances
    )
    answered = Answer(*outputs)

    def answer_with_distances() -> list[Tensor]:
        pool = candidate_pool(op, call.logits.unpadded(), parameters, spec.pool_size)
        members = alternate(op, spec, pool, parameters, call.inputs)
        answer = _member_answer(call, pool, members, answered.column(op, CERTIFIED))
        return _select(op, _is_left(op, answered), answer, answered).outputs()

    return Answer(*op.branch(all_done, answered.outputs, answer_with_distances))


def _rule_answer(call: SamplerCall, tokens: Tokens, kept: KeptSet) -> Answer:
    """The answer of a rule other than Top-W."""
    op, spec = call.op, call.spec
    mass = crop_mass(op, tokens, kept) if spec.with_mass else None
    flags = flatten_blocks(op, kept.flags) if spec.with_keep_mask else None
    draw, certified = draw_kept(op, tokens, kept, call.parameters), op.Cast(kept.is_certified, to=1)
    return _new_answer(op, spec, draw, certified, mass, tokens.ids, flags)


def _member_answer(call: SamplerCall, pool: PoolTokens, members: Tensor, certified: Tensor) -> Answer:
    """The answer with this kept set of pool tokens, bool [batch, top_m]. certified: float32 [batch, 1]."""
    op, spec, mass = call.op, call.spec, None
    if spec.with_mass:
        weight = op.Where(members, pool.weight, np.float64(0.0))
        mass = op.Cast(op.ReduceSum(weight, [1], keepdims=1), to=1)
    draw = draw_member(op, pool, members, call.parameters)
    return _new_answer(op, spec, draw, certified, mass, pool.ids, members)


@scope
def _new_answer(
    op: Ops,
    spec: SamplerSpec,
    draw: DrawColumns,
    certified: Tensor,
    mass: Tensor | None,
    ids: Tensor | None,
    kept: Tensor | None,
) -> Answer:
    """Put an answer together.

    certified: 0 or 1, float32 [batch, 1].
    mass: the column `MASS`, None without `with_mass`.
    ids, kept: which tokens are kept, int64 and bool [batch, n]. Without ids, `kept` has a flag for each id.
    """
    columns = [op.Cast(draw.token, to=1), draw.logprob, op.Cast(draw.kept, to=1), certified]
    columns = op.Concat(*columns, *([] if mass is None else [mass]), axis=1)
    if not spec.with_keep_mask:
        return Answer(columns)
    if ids is None:
        return Answer(columns, kept)
    shape = op.Concat(op.Shape(ids, start=0, end=1), [padded_width(spec.vocab_size)], axis=0)
    all_false = op.Expand(False, shape)
    return Answer(columns, op.ScatterElements(all_false, ids, kept, axis=1))


@scope
def _select(op: Ops, condition: Tensor, chosen: Answer, other: Answer) -> Answer:
    """The rows of `chosen` where the condition, bool [batch, 1], is true, else those of `other`."""
    mask = None
    if chosen.keep_mask is not None:
        mask = op.Or(op.And(condition, chosen.keep_mask), op.And(op.Not(condition), other.keep_mask))
    return Answer(op.Where(condition, chosen.columns, other.columns), mask)


def _where_or_token(op: Ops, spec: SamplerSpec, flags: Tensor, answer: Answer, token: float) -> Tensor:
    """The answer's columns where a flag is true, bool [batch, 1]; elsewhere this token, and zeros in other columns."""
    return op.Where(flags, answer.columns, np.array([token, *[0.0] * (MASS - 1 + spec.with_mass)], np.float32))


@scope
def _invalidate(op: Ops, spec: SamplerSpec, answer: Answer, valid: Tensor) -> Answer:
    """Replace the answers of rows that are not valid by token -1, zeros and an empty mask. valid: bool [batch, 1]."""
    mask = None if answer.keep_mask is None else op.And(valid, answer.keep_mask)
    return Answer(_where_or_token(op, spec, valid, answer, -1.0), mask)


@scope
def _mark_rest(op: Ops, spec: SamplerSpec, answer: Answer, is_done: Tensor) -> Answer:
    """Mark the rows that are not done, with zeros in all other columns. is_done: bool [batch, 1]."""
    return Answer(_where_or_token(op, spec, is_done, answer, _NOT_DONE), answer.keep_mask)


def _is_left(op: Ops, answer: Answer) -> Tensor:
    """Whether a later branch must answer a row: bool [batch, 1]."""
    return op.Equal(answer.column(op, TOKEN), _NOT_DONE)


def _all_done(op: Ops, answer: Answer) -> Tensor:
    """Whether no later branch must answer a row, bool scalar."""
    return all_true(op, op.Not(_is_left(op, answer)))


@scope
def _top_probability(op: Ops, logits: InputLogits, candidates: CandidateLogits, parameters: RowParameters) -> Tensor:
    """The probability of the largest logit at Ts: float32 [batch]; NaN where Ts is below 1e-5."""
    temperature, selection_temperature, *_ = parameters.columns
    chosen = op.Where(op.Equal(selection_temperature, 0.0), temperature, selection_temperature)
    is_tiny = op.Less(chosen, GREEDY_BELOW)
    divisor = op.Where(is_tiny, 1.0, chosen)
    top_id = op.Gather(candidates.ids, [0], axis=1)

    def log_probability(values: Tensor) -> list[Tensor]:
        return [op.GatherElements(op.LogSoftmax(op.Div(values, divisor), axis=1), top_id, axis=1)]

    (top,) = op.branch(
        logits.is_empty("allowed"), lambda: log_probability(logits.edited()), lambda: log_probability(logits.masked())
    )
    return op.Squeeze(op.Where(is_tiny, np.nan, op.Exp(top)), [1])


@scope
def _node_outputs(op: Ops, spec: SamplerSpec, answer: Answer, top_probability: Tensor | None) -> list[Tensor]:
    """The node's outputs, in the order of `sampler_outputs(spec)`.

    `mass` is the sum of weights times `top_probability`. Where Ts is below 1e-5, it is 1, or 0 for an invalid row.
    """
    token, logprob, kept, certified, *mass = (
        op.Gather(answer.columns, number, axis=1) for number in range(MASS + spec.with_mass)
    )
    outputs = [op.Cast(token, to=7), logprob, op.Cast(kept, to=6), op.Cast(certified, to=9)]
    if spec.with_mass:
        greedy_mass = op.Min(mass[0], 1.0)
        outputs.append(op.Where(op.IsNaN(top_probability), greedy_mass, op.Mul(mass[0], top_probability)))
    if spec.with_keep_mask:
        outputs.append(without_padding(op, answer.keep_mask, spec.vocab_size))
    return outputs
