"""The node's input `logits`: as given, edited, or edited and masked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, CandidateLogits, CandidateSearch, search_candidates
from topw_deploy.export.tail.inputs import BLOCK, RowParameters, apply_edits, apply_mask, padded_width, without_padding
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec
from topw_deploy.sampling.parameters import GREEDY_BELOW


def can_read_in_place(spec: TailSpec) -> bool:
    """Whether a separate branch searches the logits without a copy if no row has edits.

    Other functions always copy: for the padding to whole blocks, for `mass`, or because a copy of a small vocabulary
    costs less than a branch. The form `static` has no branches.
    """
    has_whole_blocks = spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES
    return has_whole_blocks and spec.form != "static" and not spec.with_mass


class InputLogits:
    """The logits of one call of the function.

    The edited logits are computed once, before all branches, unless `can_read_in_place`. Otherwise, each branch that
    reads them computes them itself. The masked logits are treated alike, but computed before only in the form `static`.
    """

    def __init__(self, op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> None:
        self._op, self._spec, self._inputs = op, spec, inputs
        self._edited: Tensor | None = None
        self._masked: Tensor | None = None
        if not can_read_in_place(spec):
            self._edited = self.edited_logits()
        if spec.form == "static":
            self._masked = self.masked_logits()

    def edited_logits(self) -> Tensor:
        """The logits with edits, float32 [batch, padded]."""
        if self._edited is not None:
            return self._edited
        ids, penalty, bias = (self._inputs[name] for name in ("edit_ids", "edit_penalty", "edit_bias"))
        return apply_edits(self._op, self._inputs["logits"], ids, penalty, bias, self._spec.vocab_size)

    def masked_logits(self) -> Tensor:
        """The logits with edits and masks, float32 [batch, padded]."""
        if self._masked is not None:
            return self._masked
        words, like = self._inputs["allowed"], self._inputs["rule"]
        return apply_mask(self._op, self._spec, self.edited_logits(), words, like)

    def unpadded_logits(self) -> Tensor:
        """The logits with edits and masks, float32 [batch, vocab]."""
        return without_padding(self._op, self.masked_logits(), self._spec.vocab_size)

    def search_candidates(self) -> CandidateSearch:
        """Find the candidates of the edited and masked logits.

        Has up to two branches, one after the other for the form `portable`: on whether there are edits, then on whether
        there are masks. With masks, the first search is wasted; it is cheap.
        """
        op, spec, inputs = self._op, self._spec, self._inputs
        padded, count = padded_width(spec.vocab_size), min(CANDIDATES, spec.vocab_size)
        if self._masked is not None:
            return search_candidates(op, self._masked, padded, spec.vocab_size)

        def search_outputs(logits: Tensor, width: int = padded) -> list[Tensor]:
            search = search_candidates(op, logits, width, spec.vocab_size)
            return [search.candidates.logits, search.candidates.ids, search.total]

        if self._edited is not None:
            unmasked = search_outputs(self._edited)
        else:
            unmasked = op.branch(
                self._is_empty("edit_ids"),
                lambda: search_outputs(inputs["logits"], spec.vocab_size),
                lambda: search_outputs(self.edited_logits()),
            )
        logits, ids, total = op.branch(
            self._is_empty("allowed"), lambda: unmasked, lambda: search_outputs(self.masked_logits())
        )
        return CandidateSearch(CandidateLogits(logits, ids, count), total)

    def top_probability(self, candidates: CandidateLogits, parameters: RowParameters) -> Tensor:
        """The probability of the largest logit at Ts: float32 [batch, 1]; NaN where Ts is below 1e-5."""
        op = self._op
        if self._masked is not None:
            return top_probability(op, self._masked, candidates, parameters)
        (probability,) = op.branch(
            self._is_empty("allowed"),
            lambda: [top_probability(op, self.edited_logits(), candidates, parameters)],
            lambda: [top_probability(op, self.masked_logits(), candidates, parameters)],
        )
        return probability

    def _is_empty(self, name: str) -> Tensor:
        """Whether the input `name` has no elements, bool scalar."""
        return self._op.Equal(self._op.Size(self._inputs[name]), self._op.constant(0, np.int64))


@scope
def top_probability(op: Ops, logits: Tensor, candidates: CandidateLogits, parameters: RowParameters) -> Tensor:
    """See `InputLogits.top_probability`. logits: [batch, padded]."""
    temperature, selection_temperature, *_ = parameters.columns
    chosen = op.Where(op.Equal(selection_temperature, op.constant(0.0)), temperature, selection_temperature)
    is_tiny = op.Less(chosen, op.constant(GREEDY_BELOW))
    log_probabilities = op.LogSoftmax(op.Div(logits, op.Where(is_tiny, op.constant(1.0), chosen)), axis=1)
    top_id = op.Gather(candidates.ids, op.constant([0], np.int64), axis=1)
    top = op.GatherElements(log_probabilities, top_id, axis=1)
    return op.Where(is_tiny, op.constant(np.nan), op.Exp(top))
