"""Methods for the attention of models that do not call transformers' attention interface.

Each replaces a method of one class during the trace, leaves a marker, and computes what the method computes. It writes
rotations so that `lowering.rotary` recognises them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from topw_deploy.export.trace.attention_adapters import (
    Method,
    model_function,
    rotate_pairs,
    split_heads,
    update_cache,
)
from topw_deploy.export.trace.markers import Visible, mark_attention

# BLOOM, MPT and Falcon.


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [heads] in BLOOM and Falcon.

    The powers of 2^(-8/n), with n the largest power of two <= heads; then every second power of 2^(-4/n).
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * power / below) for power in range(1, below + 1)]
    slopes += [2 ** (-4 * power / below) for power in range(1, 2 * (heads - below) + 1, 2)]
    return torch.tensor(slopes)


def mpt_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [heads] in MPT.

    The powers of 2^(-8/n), with n the smallest power of two >= heads. If n > heads, every second power comes first, and
    the list is cut to `heads`.
    """
    above = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * power / above) for power in range(1, above + 1)]
    return torch.tensor(slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads])


def _bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **_: Any
) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
    query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
    key, value = update_cache(layer_past, key, value, self.layer_idx)
    slopes = alibi_slopes(self.num_heads)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.inv_norm_factor, slopes=slopes)
    return self.dense(output.flatten(2)) + residual, None


def _mpt_attention(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (split_heads(part, self.n_heads) for part in mixed.chunk(3, dim=2))
    key, value = update_cache(past_key_values, key, value, self.layer_idx)
    slopes = mpt_slopes(self.n_heads)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.softmax_scale, slopes=slopes)
    return self.out_proj(output.flatten(2)), None


def _falcon_attention(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = _split_falcon_heads(self, self.query_key_value(hidden_states))
    slopes = None
    if alibi is None:
        query, key = model_function(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    else:  # Falcon rounds slopes, positions and their products to bfloat16, and scales them with the scores
        slopes = alibi_slopes(self.num_heads).to(torch.bfloat16)
    key, value = update_cache(layer_past, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.inv_norm_factor, slopes=slopes)
    return self.dense(output.flatten(2)), None


def _split_falcon_heads(self: Any, fused: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [batch, heads or kv_heads, sequence, head_dim] of Falcon's fused projection."""
    if not self.new_decoder_architecture and self.multi_query:
        heads = fused.unflatten(-1, (self.num_heads + 2, self.head_dim)).transpose(1, 2)
        return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    groups = self.num_kv_heads
    grouped = fused.unflatten(-1, (groups, self.num_heads // groups + 2, self.head_dim))
    query = grouped[..., :-2, :].flatten(2, 3)
    return tuple(part.transpose(1, 2) for part in (query, grouped[..., -2, :], grouped[..., -1, :]))


# GPT-J and CodeGen rotate pairs, with tables of all positions.


def _gptj_attention(
    self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any
) -> Any:
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (split_heads(part, self.num_attention_heads) for part in parts)
    return _mark_rotated_attention(self, query, key, value, layer_past, position_ids)


def _codegen_attention(
    self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any
) -> Any:
    # The projection has four blocks, each with its share of queries, values and keys.
    blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    parts = (blocks[..., part, :].flatten(2) for part in (0, 2, 1))
    query, key, value = (split_heads(part, self.num_attention_heads) for part in parts)
    return _mark_rotated_attention(self, query, key, value, layer_past, position_ids)


def _mark_rotated_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, position_ids: Tensor
) -> tuple[Tensor, None]:
    """Rotate queries and keys [batch, heads, sequence, head_dim] by the positions, and leave a marker."""
    width = self.rotary_dim or self.head_dim
    table_width = self.pos_embd_dim  # decides GPT-J's frequencies
    frequencies = 1.0 / (10000 ** (torch.arange(0, table_width, 2, dtype=torch.int64) / table_width))
    angles = position_ids[..., None].float() * frequencies
    query, key = (rotate_pairs(part, angles, width) for part in (query, key))
    key, value = update_cache(cache, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=1 / self.scale_attn)
    return self.out_proj(output.flatten(2)), None


# GIT's mask differs from a causal one only for the tokens of images, which the export has not.


def _git_attention(self: Any, hidden_states: Tensor, _mask: Any = None, past_key_values: Any = None, **_: Any) -> Any:
    parts = (project(hidden_states) for project in (self.query, self.key, self.value))
    query, key, value = (split_heads(part, self.num_attention_heads) for part in parts)
    key, value = update_cache(past_key_values, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.attention_head_size**-0.5)
    return output.flatten(2), None


def _no_mask(**_: Any) -> None:
    """No mask; replaces the function that makes GIT's mask, which `_git_attention` does not read."""


# GPT-Neo, GPT-NeoX Japanese and OpenAI GPT compute attention in a method `_attn`.


def _gpt_neo_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    visible = Visible(window=self.config.window_size if self.attention_type == "local" else 0)
    output = mark_attention(query, key, value, layer=self.layer_id, scale=1.0, visible=visible)
    return output.transpose(1, 2), None


def _gpt_neox_japanese_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=1 / self.norm_factor)
    return output.transpose(1, 2), None


def _openai_gpt_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    scale = value.shape[-1] ** -0.5 if self.scale else 1.0
    output = mark_attention(query, key.transpose(2, 3), value, layer=self.layer_idx, scale=scale)
    return [output.transpose(1, 2)]


# XGLM.


def _xglm_attention(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (split_heads(part, self.num_heads) for part in parts)
    key, value = update_cache(past_key_values, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.scaling)
    return self.out_proj(output.flatten(2)), None


# Folder in transformers.models and class -> replaced methods.
METHODS: dict[str, dict[str, Method]] = {
    "bloom.BloomAttention": {"forward": _bloom_attention},
    "codegen.CodeGenAttention": {"forward": _codegen_attention},
    "falcon.FalconAttention": {"forward": _falcon_attention},
    "git.GitSelfAttention": {"forward": _git_attention},
    "gpt_neo.GPTNeoSelfAttention": {"_attn": _gpt_neo_attention},
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": {"_attn": _gpt_neox_japanese_attention},
    "gptj.GPTJAttention": {"forward": _gptj_attention},
    "mpt.MptAttention": {"forward": _mpt_attention},
    "openai.Attention": {"_attn": _openai_gpt_attention},
    "xglm.XGLMAttention": {"forward": _xglm_attention},
}
# The same -> replaced functions of the Python module that defines the class.
FUNCTIONS: dict[str, dict[str, Method]] = {"git.GitModel": {"create_causal_mask": _no_mask}}
