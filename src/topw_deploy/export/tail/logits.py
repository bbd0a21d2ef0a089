"""The logits: as given, edited, or edited and masked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.export.tail.candidates import CANDIDATES, Candidates, Search, search
from topw_deploy.export.tail.inputs import BLOCK, Rows, apply_edits, apply_mask, padded_width, without_padding
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec
from topw_deploy.sampling.parameters import GREEDY_BELOW


def reads_in_place(spec: TailSpec) -> bool:
    """Whether rows without edits and masks are read in place, in a separate branch.

    False if padding or `mass` needs a copy, or the vocabulary is small.
    """
    whole = spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES
    return whole and spec.form != "static" and not spec.with_mass


class Logits:
    """One call's logits. Each branch computes the edited or masked logits that it reads, unless they were computed
    before.
    """

    def __init__(self, op: Ops, spec: TailSpec, inputs: Mapping[str, Tensor]) -> None:
        self._op, self._spec, self._inputs = op, spec, inputs
        self._edited: Tensor | None = None
        self._masked: Tensor | None = None
        if not reads_in_place(spec):
            self._edited = self.edited()
        if spec.form == "static":
            self._masked = self.masked()

    def edited(self) -> Tensor:
        """[batch, padded]"""
        if self._edited is not None:
            return self._edited
        ids, penalty, bias = (self._inputs[name] for name in ("edit_ids", "edit_penalty", "edit_bias"))
        return apply_edits(self._op, self._inputs["logits"], ids, penalty, bias, self._spec.vocab_size)

    def masked(self) -> Tensor:
        """Edited and masked: [batch, padded]."""
        if self._masked is not None:
            return self._masked
        words, like = self._inputs["allowed"], self._inputs["rule"]
        return apply_mask(self._op, self._spec, self.edited(), words, like)

    def narrow(self) -> Tensor:
        """Edited and masked: [batch, vocab]."""
        return without_padding(self._op, self.masked(), self._spec.vocab_size)

    def search(self) -> Search:
        """The candidates, from the input itself if there are neither edits nor masks.

        The two branches are consecutive, as in `function.py`. The first is cheap, and wasted on masked rows.
        """
        op, spec, inputs = self._op, self._spec, self._inputs
        wide, count = padded_width(spec.vocab_size), min(CANDIDATES, spec.vocab_size)
        if self._masked is not None:
            return search(op, self._masked, wide, spec.vocab_size)

        def parts(logits: Tensor, width: int = wide) -> list[Tensor]:
            found = search(op, logits, width, spec.vocab_size)
            return [found.candidates.logits, found.candidates.ids, found.total]

        if self._edited is not None:
            found = parts(self._edited)
        else:
            found = op.branch(
                self._has_no("edit_ids"),
                lambda: parts(inputs["logits"], spec.vocab_size),
                lambda: parts(self.edited()),
            )
        logits, ids, total = op.branch(self._has_no("allowed"), lambda: found, lambda: parts(self.masked()))
        return Search(Candidates(logits, ids, count), total)

    def top_share(self, candidates: Candidates, rows: Rows) -> Tensor:
        """Softmax of the largest logit at Ts: float32 [batch, 1]; NaN for greedy rows."""
        op = self._op
        if self._masked is not None:
            return top_share(op, self._masked, candidates, rows)
        (share,) = op.branch(
            self._has_no("allowed"),
            lambda: [top_share(op, self.edited(), candidates, rows)],
            lambda: [top_share(op, self.masked(), candidates, rows)],
        )
        return share

    def _has_no(self, name: str) -> Tensor:
        return self._op.Equal(self._op.Size(self._inputs[name]), self._op.constant(0, np.int64))


@scope
def top_share(op: Ops, logits: Tensor, candidates: Candidates, rows: Rows) -> Tensor:
    temperature, selection, *_ = rows.given
    asked = op.Where(op.Equal(selection, op.constant(0.0)), temperature, selection)
    frozen = op.Less(asked, op.constant(GREEDY_BELOW))
    logs = op.LogSoftmax(op.Div(logits, op.Where(frozen, op.constant(1.0), asked)), axis=1)
    top = op.GatherElements(logs, op.Gather(candidates.ids, op.constant([0], np.int64), axis=1), axis=1)
    return op.Where(frozen, op.constant(np.nan), op.Exp(top))
