"""Attention whose scores get a bias by the distance from query to key (Inkling).

Each query computes a bias for every distance, before the keys are known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BIASES = "rel_logits_proj"  # attribute of attention whose `position_bias` comes from `relative_bias`


def relative_bias(self: Any, relative_states: Tensor, *_positions: Tensor) -> Tensor:
    """The `relative` of `mark_attention` for relative_states [batch, sequence, heads, dim].

    Replaces the forward that returns the bias of each query and key. Keys at a greater distance have no bias.
    """
    profiles = functional.pad(self.proj, (0, 1))  # [dim, extent + 1]
    return torch.matmul(relative_states, profiles).transpose(1, 2)


def with_sinks(relative: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The biases and the sink [heads] of attention with a sink score of each query, [batch, heads, sequence, 1].

    A softmax does not change if the sink's score is subtracted from all scores, including its own.
    """
    return (relative, None) if sinks is None else (relative - sinks, sinks.new_zeros(sinks.shape[1]))


def inkling_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Any = None, **others: Any
) -> tuple[Tensor, None]:
    """The original counts positions, which scale queries and biases, in the cache."""
    parts = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    key, value = (
        convolve(part, past_key_values=past_key_values, conv_mask=others.get("conv_mask"))
        for convolve, part in zip((self.k_sconv, self.v_sconv), parts[1:], strict=True)
    )
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (parts[0], key, value))
    query, key, value = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
    relative = self.rel_logits_proj(self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        scales = _scales(past_key_values.positions, self.config)[:, None, :, None]
        query, relative = ((part.float() * scales).to(part.dtype) for part in (query, relative))
    key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, position_bias=relative)
    return self.o_proj(output.flatten(2)), None


def _scales(positions: Tensor, config: Any) -> Tensor:
    """1 up to a number of tokens, then growing with the logarithm; shaped like `positions` [batch, sequence]."""
    counts = (positions + 1).float() / config.log_scaling_n_floor
    return 1.0 + config.log_scaling_alpha * torch.log(counts.clamp(min=1.0))


def block_residual(self: Any, block_states: Tensor, partial_block_states: Tensor) -> tuple[Tensor, ...]:
    """Inkling 2: attention over the states of a token after blocks of layers, as products.

    The tracer would turn the original into the operator for attention over tokens.
    """
    states = torch.cat([block_states, partial_block_states.unsqueeze(-2)], dim=-2).float()
    states = self.norm(states)  # [batch, sequence, blocks, hidden]
    width = states.shape[-1]
    queries = self.query.float().view(-1, width)
    scores = torch.matmul(states, queries.T).transpose(-1, -2) * width**-0.5  # [batch, sequence, queries, blocks]
    mixed = torch.matmul(torch.softmax(scores, dim=-1), states)
    return mixed.unbind(-2)
