"""Convolutions and recurrences as literal loops over tokens, and a cache for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig

from topw_deploy.export.trace.placeholders import CONVOLUTION, HISTORY, RECURRENCE, MixerPlaceholders


def literal_convolution(
    x: torch.Tensor,  # [batch, channels, sequence]
    weight: torch.Tensor,  # [channels, 1, kernel]
    bias: torch.Tensor | None,
    past: torch.Tensor,  # [batch, channels, kernel - 1]
    activation: str = "",
    lengths: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, one column at a time. Columns from a row's length on are padding: their output is zero."""
    output, present = torch.zeros_like(x), past.clone()
    for row in range(x.shape[0]):
        window = past[row]
        for column in range(x.shape[2] if lengths is None else lengths[row]):
            window = torch.cat([window, x[row, :, column : column + 1]], dim=-1)[:, -weight.shape[-1] :]
            total = (window * weight[:, 0]).sum(-1) + (0 if bias is None else bias)
            output[row, :, column] = functional.silu(total) if activation == "silu" else total
            window = window[:, 1:]
        present[row] = window
    return output, present


def literal_recurrence(
    q: torch.Tensor,  # [batch, sequence, query heads, key dim]
    k: torch.Tensor,  # [batch, sequence, key heads, key dim]
    v: torch.Tensor,  # [batch, sequence, heads, value dim]
    decay: torch.Tensor | None,  # [batch, sequence, heads] or [batch, sequence, heads, key dim]
    beta: torch.Tensor | None,  # [batch, sequence, heads]
    past: torch.Tensor,  # [batch, heads, key dim, value dim]
    rule: str,
    scale: float = 1.0,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, one token, one head at a time. real: bool [batch, sequence]; other columns are padding, output zero."""
    batch, sequence, heads, size = v.shape
    readers = max(q.shape[2], heads)
    output = torch.zeros(batch, sequence, readers, size, dtype=past.dtype)
    present = past.clone()
    for row, column in torch.cartesian_prod(torch.arange(batch), torch.arange(sequence)).tolist():
        if real is not None and not real[row, column]:
            continue
        for head in range(heads):
            state = present[row, head]
            key = k[row, column, head * k.shape[2] // heads]
            value = v[row, column, head]
            if rule in ("gated", "gated_delta"):
                factor = decay[row, column, head].exp()
                state = state * (factor if factor.dim() == 0 else factor[:, None])
            if rule in ("delta", "gated_delta"):
                value = beta[row, column, head] * (value - state.T @ key)
            present[row, head] = state + torch.outer(key, value)
        for reader in range(readers):
            query = q[row, column, reader * q.shape[2] // readers]
            output[row, column, reader] = scale * present[row, reader * heads // readers].T @ query
    return output, present


class EagerPlaceholders(MixerPlaceholders):
    """Computes what the placeholders of one call of a model represent.

    states: (kind, layer, number) -> state; updated.
    """

    def __init__(self, cache: Any, states: dict[tuple[str, int, int], torch.Tensor]) -> None:
        super().__init__(cache)
        self._states = states

    def _leave(  # type: ignore[override]
        self, op_type: str, inputs: Any, attributes: dict[str, Any], *_: Any
    ) -> torch.Tensor:
        kind = RECURRENCE if op_type == RECURRENCE else CONVOLUTION
        name = kind, attributes["layer"], attributes["state"]
        if op_type == RECURRENCE:
            q, k, v, decay, beta = inputs
            past = self._states.get(name, torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
            rule, scale = attributes["rule"], attributes["scale"]
            output, self._states[name] = literal_recurrence(q, k, v, decay, beta, past, rule, scale)
            return output
        x = inputs[0]
        if op_type == HISTORY:
            columns = attributes["columns"]
            window = torch.cat([self._states.get(name, x.new_zeros(*x.shape[:2], columns)), x], dim=-1)
            self._states[name] = window[..., -columns:]
            return window
        _, weight, bias = inputs
        past = self._states.get(name, x.new_zeros(*x.shape[:2], weight.shape[-1] - 1))
        output, self._states[name] = literal_convolution(x, weight, bias, past, attributes["activation"])
        return output


class StatelessMixersCache(DynamicCache):
    """A cache of keys and values that keeps no states of mixers, like the cache of a trace."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.convolution: tuple[int, int] | None = None
        self.recurrence: tuple[int, int] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.convolution = layer_idx, state_idx

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.recurrence = layer_idx, state_idx

    def update_conv_state(self, conv_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states
