"""Attention of models that do not call transformers' attention interface.

An adapter replaces methods of one class during the trace, so that each call leaves a marker. It computes what the class
computes, and writes rotations so that `lowering.rotary` recognises them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from topw_deploy.export.trace.latent import expand_kv
from topw_deploy.export.trace.marker import mark_attention
from topw_deploy.export.trace.masks import Visible
from topw_deploy.export.trace.relative import block_residual, inkling_attention, relative_bias
from topw_deploy.export.trace.sparse import is_indexer, select_none

Method = Callable[..., Any]


@contextlib.contextmanager
def adapted(model: torch.nn.Module) -> Iterator[None]:
    """Replace the methods named in `ADAPTERS` inside the block."""
    counted: dict[str, int] = {}
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            folder, kind = type(module).__module__.split("."), type(module).__name__
            if folder[:2] != ["transformers", "models"]:
                continue
            name = f"{folder[2]}.{kind}"
            for function, replacement in _FUNCTIONS.get(name, {}).items():
                file = sys.modules[type(module).__module__]
                undo.callback(setattr, file, function, getattr(file, function))
                setattr(file, function, replacement)
            methods = dict(ADAPTERS.get(name, {}))
            if hasattr(module, "expand_kv"):
                methods["expand_kv"] = expand_kv
            if hasattr(module, "_maybe_slice_kv_shared_inputs"):
                methods["_maybe_slice_kv_shared_inputs"] = _all_columns
            if is_indexer(module):
                methods["forward"] = select_none
            for attribute, method in methods.items():
                setattr(module, attribute, MethodType(method, module))
                undo.callback(delattr, module, attribute)
            if name in _UNNUMBERED:
                counted[name] = counted.get(name, -1) + 1
                setattr(module, "layer_idx", counted[name])  # noqa: B010
                undo.callback(delattr, module, "layer_idx")
        yield


def rotate_pairs(x: Tensor, angles: Tensor, width: int, scaling: float = 1.0) -> Tensor:
    """Rotate neighbouring pairs of the first `width` elements, and scale them.

    x: [batch, heads, sequence, head_dim]. angles: [batch, sequence, width / 2].
    """
    both = torch.repeat_interleave(angles, 2, dim=-1)
    tables = (both.cos(), both.sin()) if scaling == 1 else (both.cos() * scaling, both.sin() * scaling)
    cos, sin = (table.unsqueeze(1).to(x.dtype) for table in tables)
    part = x[..., :width]
    crossed = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    rotated = part * cos + crossed * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads * dim] -> [batch, heads, sequence, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _all_columns(_self: Any, *inputs: Any, **_others: Any) -> tuple[Any, ...]:
    """Replaces Gemma 4's method that cuts inputs to the columns of the last one, logits_to_keep; returns them whole."""
    return inputs[:-1]


def _remember(cache: Any, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return (key, value) if cache is None else cache.update(key, value, layer)


def _attended(self: Any, cache: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> Tensor:
    """[batch, sequence, heads, dim], by transformers' attention interface."""
    key, value = _remember(cache, key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, mask, scaling=self.scaling, **others)
    found: Tensor = output
    return found


def _helper(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file that defines the class of `module`."""
    return getattr(sys.modules[type(module).__module__], name)


# BLOOM, MPT and Falcon.


def alibi_slopes(heads: int) -> Tensor:
    """BLOOM's and Falcon's: powers of 2^(-8/n), n the largest power of two <= heads; then slopes between them."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * power / below) for power in range(1, below + 1)]
    slopes += [2 ** (-4 * power / below) for power in range(1, 2 * (heads - below) + 1, 2)]
    return torch.tensor(slopes)


def mpt_slopes(heads: int) -> Tensor:
    """Powers of 2^(-8/n), n the smallest power of two >= heads; if n > heads, every second slope comes first."""
    above = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * power / above) for power in range(1, above + 1)]
    return torch.tensor(slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads])


def _bloom(self: Any, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **_: Any) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
    query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
    key, value = _remember(layer_past, key, value, self.layer_idx)
    slopes = alibi_slopes(self.num_heads)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.inv_norm_factor, slopes=slopes)
    return self.dense(output.flatten(2)) + residual, None


def _mpt(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (_heads(part, self.n_heads) for part in mixed.chunk(3, dim=2))
    key, value = _remember(past_key_values, key, value, self.layer_idx)
    slopes = mpt_slopes(self.n_heads)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.softmax_scale, slopes=slopes)
    return self.out_proj(output.flatten(2)), None


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = _split_falcon(self, self.query_key_value(hidden_states))
    slopes = None
    if alibi is None:
        query, key = _helper(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    else:  # Falcon rounds slopes, positions and their products to bfloat16, and scales them with the scores
        slopes = alibi_slopes(self.num_heads).to(torch.bfloat16)
    key, value = _remember(layer_past, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.inv_norm_factor, slopes=slopes)
    return self.dense(output.flatten(2)), None


def _split_falcon(self: Any, fused: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [batch, heads, sequence, head_dim], keys and values not repeated."""
    if not self.new_decoder_architecture and self.multi_query:
        heads = fused.unflatten(-1, (self.num_heads + 2, self.head_dim)).transpose(1, 2)
        return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    groups = self.num_kv_heads
    grouped = fused.unflatten(-1, (groups, self.num_heads // groups + 2, self.head_dim))
    query = grouped[..., :-2, :].flatten(2, 3)
    return tuple(part.transpose(1, 2) for part in (query, grouped[..., -2, :], grouped[..., -1, :]))


# GPT-J and CodeGen: rotations of pairs, from tables of all positions.


def _gptj(self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any) -> Any:
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (_heads(part, self.num_attention_heads) for part in parts)
    return _rotated_attention(self, query, key, value, layer_past, position_ids)


def _codegen(self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any) -> Any:
    # Four blocks, each with its share of queries, values and keys.
    blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    parts = (blocks[..., part, :].flatten(2) for part in (0, 2, 1))
    query, key, value = (_heads(part, self.num_attention_heads) for part in parts)
    return _rotated_attention(self, query, key, value, layer_past, position_ids)


def _rotated_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, position_ids: Tensor
) -> tuple[Tensor, None]:
    width = self.rotary_dim or self.head_dim
    tabled = self.pos_embd_dim  # GPT-J takes its frequencies from it
    frequencies = 1.0 / (10000 ** (torch.arange(0, tabled, 2, dtype=torch.int64) / tabled))
    angles = position_ids[..., None].float() * frequencies
    query, key = (rotate_pairs(part, angles, width) for part in (query, key))
    key, value = _remember(cache, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=1 / self.scale_attn)
    return self.out_proj(output.flatten(2)), None


# Llama 4 and DeepSeek V2: rotations of pairs as products with complex numbers, which the tracer does not support.


class _Rotation(NamedTuple):
    """Replaces the complex numbers.

    positions: [batch, sequence].
    angles: [batch, sequence, width / 2].
    """

    positions: Tensor
    angles: Tensor
    scaling: float

    def to(self, *_: Any, **__: Any) -> _Rotation:
        return self


def _rotation(self: Any, _x: Tensor, position_ids: Tensor) -> _Rotation:
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return _Rotation(position_ids, angles, float(self.attention_scaling))


def _rotate_heads(query: Tensor, key: Tensor, rotation: _Rotation) -> tuple[Tensor, Tensor]:
    """[batch, heads, sequence, head_dim], rotated in float32."""
    width = query.shape[-1]
    parts = (rotate_pairs(part.float(), rotation.angles, width, rotation.scaling) for part in (query, key))
    rotated_query, rotated_key = (part.to(query.dtype) for part in parts)
    return rotated_query, rotated_key


def _llama4(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: _Rotation,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Scales unrotated queries by position. The original reads positions from the cache; this reads position_ids."""
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
    if self.use_rope:
        query, key = _rotate_heads(query, key, position_embeddings)
    elif self.attn_temperature_tuning:
        steps = torch.floor((position_embeddings.positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        query = (query * scales[:, None, :, None]).to(query.dtype)
    if hasattr(self, "qk_norm"):
        query, key = self.qk_norm(query), self.qk_norm(key)
    output = _attended(self, past_key_values, query, key, value, attention_mask, **others)
    return self.o_proj(output.flatten(2)), None


# Doge: every key adds a number to its scores.


def _doge(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Appends the number to the key, and 1 / scale to the query."""
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
    query, key, merged, value = self.q_norm(query), self.k_norm(key), value.flatten(2), value.transpose(1, 2)
    rotate = _helper(self, "apply_rotary_pos_emb")
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
    added = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(merged)))  # [batch, sequence, kv_heads]
    key = torch.cat((key, added.transpose(1, 2)[..., None].to(key.dtype)), dim=-1)
    query = torch.cat((query, torch.full_like(query[..., :1], 1 / self.scaling)), dim=-1)
    output = _attended(self, past_key_values, query, key, value, attention_mask, **others)
    return self.o_proj(output.flatten(2)), None


# Qwen 4: gated, behind an indexer that selects all tokens here.


def _qwen4(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The original combines the mask with the selection, and takes the new tokens' angles from those of all."""
    query, gate = self.q_proj(hidden_states).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
    key, value = (part(hidden_states).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
    query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = _helper(self, "apply_rotary_pos_emb")(query, key, cos, sin)
    output = _attended(self, past_key_values, query, key, value.transpose(1, 2), attention_mask, **others)
    return self.o_proj(output.flatten(2) * torch.sigmoid(gate.flatten(2))), None


# DeepSeek V4: a window of tokens and, in one softmax, blocks of tokens that a compressor makes one key of.


def _deepseek_v4(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Keys are values too, and rotated: the outputs are rotated back."""
    rotate, (cos, sin) = _helper(self, "apply_rotary_pos_emb"), position_embeddings[self.rope_layer_type]
    compact = self.q_a_norm(self.q_a_proj(hidden_states))
    query = rotate(self.q_b_norm(_heads(self.q_b_proj(compact), self.num_heads)), cos, sin)
    key = rotate(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)
    if self.compressor is not None:
        made = self.compressor(hidden_states, compact, position_ids, None, self.layer_idx)
        others["blocks"] = made, self.compressor.compress_rate
    output = _attended(self, past_key_values, query, key, key, attention_mask, s_aux=self.sinks, **others)
    output = rotate(output.transpose(1, 2), cos, -sin).transpose(1, 2)
    groups = output.flatten(2).unflatten(-1, (self.config.o_groups, -1))
    return self.o_b_proj(self.o_a_proj(groups).flatten(2)), None


# GIT: the mask differs from a causal one for tokens of images only.


def _git(self: Any, hidden_states: Tensor, _mask: Any = None, past_key_values: Any = None, **_: Any) -> Any:
    parts = (project(hidden_states) for project in (self.query, self.key, self.value))
    query, key, value = (_heads(part, self.num_attention_heads) for part in parts)
    key, value = _remember(past_key_values, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.attention_head_size**-0.5)
    return output.flatten(2), None


def _no_mask(**_: Any) -> None:
    """Replaces GIT's mask, which the attention above does not read."""


# Models with an `_attn` of their own.


def _gpt_neo(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    visible = Visible(window=self.config.window_size if self.attention_type == "local" else 0)
    output = mark_attention(query, key, value, layer=self.layer_id, scale=1.0, visible=visible)
    return output.transpose(1, 2), None


def _gpt_neox_japanese(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=1 / self.norm_factor)
    return output.transpose(1, 2), None


def _openai_gpt(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    scale = value.shape[-1] ** -0.5 if self.scale else 1.0
    output = mark_attention(query, key.transpose(2, 3), value, layer=self.layer_idx, scale=scale)
    return [output.transpose(1, 2)]


# XGLM.


def _xglm(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (_heads(part, self.num_heads) for part in parts)
    key, value = _remember(past_key_values, key, value, self.layer_idx)
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=self.scaling)
    return self.out_proj(output.flatten(2)), None


# Folder in transformers.models and class -> replaced methods.
ADAPTERS: dict[str, dict[str, Method]] = {
    "bloom.BloomAttention": {"forward": _bloom},
    "codegen.CodeGenAttention": {"forward": _codegen},
    "deepseek_v2.DeepseekV2RotaryEmbedding": {"forward": _rotation},
    "deepseek_v4.DeepseekV4Attention": {"forward": _deepseek_v4},
    "doge.DogeAttention": {"forward": _doge},
    "falcon.FalconAttention": {"forward": _falcon},
    "git.GitSelfAttention": {"forward": _git},
    "gpt_neo.GPTNeoSelfAttention": {"_attn": _gpt_neo},
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": {"_attn": _gpt_neox_japanese},
    "gptj.GPTJAttention": {"forward": _gptj},
    "inkling.InklingAttention": {"forward": inkling_attention},
    "inkling.InklingRelativeLogits": {"forward": relative_bias},
    "inkling2.Inkling2BlockAttentionResidual": {"forward": block_residual},
    "inkling2.Inkling2RelativeLogits": {"forward": relative_bias},
    "llama4.Llama4TextAttention": {"forward": _llama4},
    "llama4.Llama4TextRotaryEmbedding": {"forward": _rotation},
    "mpt.MptAttention": {"forward": _mpt},
    "openai.Attention": {"_attn": _openai_gpt},
    "qwen4_exp.Qwen4ExpTextAttention": {"forward": _qwen4},
    "xglm.XGLMAttention": {"forward": _xglm},
}
# The same -> replaced functions of the file that defines the class.
_FUNCTIONS: dict[str, dict[str, Method]] = {
    "deepseek_v2.DeepseekV2RotaryEmbedding": {"apply_rotary_emb": _rotate_heads},
    "git.GitModel": {"create_causal_mask": _no_mask},
}
_UNNUMBERED = {"openai.Attention"}  # classes without layer_idx
