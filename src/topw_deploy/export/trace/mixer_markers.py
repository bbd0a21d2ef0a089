"""Markers: placeholder nodes for convolutions, histories and recurrences in a trace.

Convolution(x [B, C, S], weight [C, 1, K], bias [C] or none) -> [B, C, S]
    attributes layer, state, activation ("" or "silu").
    y_t = activation(sum_j weight_j x_(t-K+1+j) + bias), per channel. State: the last K-1 columns, [B, C, K-1].

History(x [B, C, S]) -> [B, C, N + S]
    attributes layer, state, columns (N).
    x behind the N columns before it, which are zero before a row's first token. State: the last N columns, [B, C, N].

Recurrence(q [B, S, Hq, Dk], k [B, S, Hk, Dk], v [B, S, H, Dv], decay or none, beta or none) -> [B, S, max(Hq, H), Dv]
    attributes layer, state, scale, rule.
    decay: log space, at most 0, [B, S, H] or [B, S, H, Dk]; beta: [B, S, H].
    State S: [B, H, Dk, Dv], float32; o_t = scale S_t^T q_t, and by rule
        linear       S_t = S_(t-1) + k_t v_t^T
        gated        S_t = exp(decay_t) S_(t-1) + k_t v_t^T
        delta        S_t = S_(t-1) + k_t beta_t (v_t - S_(t-1)^T k_t)^T
        gated_delta  delta on exp(decay_t) S_(t-1)
    Hk divides H, and Hq divides H or H divides Hq: consecutive heads share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.marker import MARKER_DOMAIN

CONVOLUTION = "Convolution"
HISTORY = "History"
RECURRENCE = "Recurrence"


class MixerCache(Protocol):
    """What markers read of a model's cache: (layer, number of the state in it) of a mixer's last request."""

    convolution: tuple[int, int] | None
    recurrence: tuple[int, int] | None


class MixerMarkers(ABC):
    """The convolutions, histories and recurrences of one call of a model; see the module for shapes.

    Numbers the states of each layer from 0: recurrences apart from the others.
    layer: None for the layer that last requested a state from the cache.
    """

    def __init__(self, cache: MixerCache) -> None:
        self._cache = cache
        self._counts: dict[tuple[str, int], int] = {}

    def convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str = "",
        layer: int | None = None,
    ) -> torch.Tensor:
        return self._numbered(CONVOLUTION, (x, weight, bias), x.dtype, x.shape, layer, {"activation": activation})

    def history(self, x: torch.Tensor, columns: int, *, layer: int | None = None) -> torch.Tensor:
        shape = (*x.shape[:2], columns + x.shape[2])
        return self._numbered(HISTORY, (x,), x.dtype, shape, layer, {"columns": columns})

    def recurrence(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rule: str,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float = 1.0,
        layer: int | None = None,
    ) -> torch.Tensor:
        batch, sequence, heads, size = v.shape
        shape = (batch, sequence, max(q.shape[2], heads), size)
        attributes = {"rule": rule, "scale": float(scale)}
        return self._numbered(RECURRENCE, (q, k, v, decay, beta), v.dtype, shape, layer, attributes)

    @abstractmethod
    def mark(
        self,
        op_type: str,
        inputs: tuple[torch.Tensor | None, ...],
        attributes: dict[str, Any],
        dtype: torch.dtype,
        shape: Sequence[int],
    ) -> torch.Tensor:
        """The output of the marker `op_type`."""

    def _numbered(
        self,
        op_type: str,
        inputs: tuple[torch.Tensor | None, ...],
        dtype: torch.dtype,
        shape: Sequence[int],
        layer: int | None,
        attributes: dict[str, Any],
    ) -> torch.Tensor:
        kind = RECURRENCE if op_type == RECURRENCE else CONVOLUTION
        if layer is None:
            pending = self._cache.convolution if kind == CONVOLUTION else self._cache.recurrence
            if pending is None:
                raise UnsupportedModelError(
                    f"a {op_type.lower()} requests no state from the cache, so its layer is unknown; graft an ONNX "
                    "decoder made by another exporter."
                )
            layer = pending[0]
        state = self._counts.get((kind, layer), 0)
        self._counts[kind, layer] = state + 1
        return self.mark(op_type, inputs, {**attributes, "layer": layer, "state": state}, dtype, shape)


class SymbolicMarkers(MixerMarkers):
    """Leaves marker nodes in a torch.onnx trace."""

    def mark(
        self,
        op_type: str,
        inputs: tuple[torch.Tensor | None, ...],
        attributes: dict[str, Any],
        dtype: torch.dtype,
        shape: Sequence[int],
    ) -> torch.Tensor:
        return torch.onnx.ops.symbolic(
            f"{MARKER_DOMAIN}::{op_type}", inputs, attributes, dtype=dtype, shape=shape, version=1
        )
