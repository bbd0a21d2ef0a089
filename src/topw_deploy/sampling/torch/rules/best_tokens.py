"""The best tokens of a batch of rows, and sums over the whole rows."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from topw_deploy.sampling.torch.largest import Largest
from topw_deploy.sampling.torch.rows import working_dtype


class BestTokens:
    """The m best tokens of R rows. Sums over the whole rows are computed on demand.

    Symbols are those of docs/contract/rules.md, section 2; floats are float64 (float32 on MPS).

    logits: [R, m], descending.
    finite: bool [R, m].
    complete: bool [R, 1], whether the list holds every finite token of the row.
    top: l_1, the largest logit, [R, 1].
    y, w: [R, m]; inf and 0 for tokens that are not finite.
    """

    def __init__(self, row_logits: Tensor, found: Largest, selection: Tensor) -> None:
        """Take the list `found` of the rows' largest logits.

        row_logits: the whole rows, float32 [R, V].
        selection: the selection temperature Ts, [R, 1].
        """
        self._rows, self._selection, self._first = row_logits, selection, found.ids[:, :1]
        self.logits = found.logits.to(working_dtype(row_logits.device))
        self.finite = self.logits > -torch.inf
        whole = found.logits.shape[1] == row_logits.shape[1]
        self.complete = torch.full_like(self.finite[:, :1], whole) | ~self.finite[:, -1:]
        self.top = self.logits[:, :1]

    @cached_property
    def y(self) -> Tensor:
        return (self.top - self.logits) / self._selection

    @cached_property
    def w(self) -> Tensor:
        return torch.exp(-self.y)

    @cached_property
    def places(self) -> Tensor:
        """0 to m - 1, int64 [1, m]."""
        return torch.arange(self.logits.shape[1], device=self.logits.device)[None]

    @cached_property
    def n(self) -> Tensor:
        """The number of finite tokens, int64 [R, 1]."""
        return (self._rows > -torch.inf).sum(1, keepdim=True)

    @cached_property
    def smallest_logit(self) -> Tensor:
        """l_n, the smallest finite logit, [R, 1]."""
        finite = torch.where(self._rows > -torch.inf, self._rows, torch.inf)
        return finite.amin(1, keepdim=True).to(self.logits.dtype)

    @cached_property
    def deviation(self) -> Tensor:
        """The standard deviation of the finite logits (divisor n - 1), 0 for one token, [R, 1]."""
        finite = self._rows > -torch.inf
        logits = torch.where(finite, self._rows.to(self.logits.dtype), self.top)
        mean = (logits - self.top).sum(1, keepdim=True) / self.n + self.top
        square = torch.where(finite, (logits - mean).square(), 0.0).sum(1, keepdim=True)
        return (square / (self.n - 1).clamp(min=1)).sqrt()

    @cached_property
    def rest(self) -> Tensor:
        """Z - 1, [R, 1], summed without the first token: in a peaked row, its weight 1 would round away the others."""
        return self._other_weights.sum(1, keepdim=True)

    @cached_property
    def Z(self) -> Tensor:  # noqa: N802 - the symbol in docs/contract/rules.md
        return 1.0 + self.rest

    @cached_property
    def log_Z(self) -> Tensor:  # noqa: N802
        return torch.log1p(self.rest)

    @cached_property
    def S(self) -> Tensor:  # noqa: N802
        return 1.0 + self._other_weights.square().sum(1, keepdim=True)

    @cached_property
    def mean(self) -> Tensor:
        """m = D / Z, [R, 1]."""
        surprise = torch.where(self._other_weights > 0, self._all_y, 0.0)
        return (self._other_weights * surprise).sum(1, keepdim=True) / self.Z

    @cached_property
    def _all_y(self) -> Tensor:
        return (self.top - self._rows.to(self.logits.dtype)) / self._selection

    @cached_property
    def _other_weights(self) -> Tensor:
        """The weights of the whole rows, 0 for the first token, [R, V]."""
        return torch.exp(-self._all_y).scatter_(1, self._first, 0.0)
