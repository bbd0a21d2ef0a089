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
from typing import Any

import torch
from torch import Tensor

from topw_deploy.export.trace.latent import expand_kv
from topw_deploy.export.trace.marker import mark_attention
from topw_deploy.export.trace.masks import Visible

Method = Callable[..., Any]


@contextlib.contextmanager
def adapted(model: torch.nn.Module) -> Iterator[None]:
    """Replace the methods named in `ADAPTERS` inside the block."""
    replaced: list[tuple[torch.nn.Module, str]] = []
    counted: dict[str, int] = {}
    for module in model.modules():
        file, kind = type(module).__module__.split("."), type(module).__name__
        if file[:2] != ["transformers", "models"]:
            continue
        name = f"{file[2]}.{kind}"
        changes: dict[str, Any] = {
            attribute: MethodType(method, module) for attribute, method in ADAPTERS.get(name, {}).items()
        }
        if hasattr(type(module), "expand_kv"):
            changes["expand_kv"] = MethodType(expand_kv, module)
        if name in _UNNUMBERED:
            changes["layer_idx"] = counted[name] = counted.get(name, -1) + 1
        for attribute, change in changes.items():
            setattr(module, attribute, change)
            replaced.append((module, attribute))
    try:
        yield
    finally:
        for module, name in replaced:
            delattr(module, name)


def rotate_pairs(x: Tensor, angles: Tensor, width: int) -> Tensor:
    """Rotate neighbouring pairs of the first `width` elements.

    x: [batch, heads, sequence, head_dim]. angles: [batch, sequence, width / 2].
    """
    both = torch.repeat_interleave(angles, 2, dim=-1)
    cos, sin = (table.unsqueeze(1).to(x.dtype) for table in (both.cos(), both.sin()))
    part = x[..., :width]
    crossed = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    rotated = part * cos + crossed * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads * dim] -> [batch, heads, sequence, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _remember(cache: Any, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return (key, value) if cache is None else cache.update(key, value, layer)


def _helper(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file that defines the class of `module`."""
    return getattr(sys.modules[type(module).__module__], name)


# BLOOM, MPT and Falcon.


def alibi_slopes(heads: int) -> Tensor:
    """BLOOM's and Falcon's: powers of 2^(-8/n), n the power of two below; for further heads, those between them."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * power / below) for power in range(1, below + 1)]
    slopes += [2 ** (-4 * power / below) for power in range(1, 2 * (heads - below) + 1, 2)]
    return torch.tensor(slopes)


def mpt_slopes(heads: int) -> Tensor:
    """Powers of 2^(-8/n), n the power of two above; every second first, if not all are used."""
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


# By folder in transformers.models, and class.
ADAPTERS: dict[str, dict[str, Method]] = {
    "bloom.BloomAttention": {"forward": _bloom},
    "codegen.CodeGenAttention": {"forward": _codegen},
    "falcon.FalconAttention": {"forward": _falcon},
    "gpt_neo.GPTNeoSelfAttention": {"_attn": _gpt_neo},
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": {"_attn": _gpt_neox_japanese},
    "gptj.GPTJAttention": {"forward": _gptj},
    "mpt.MptAttention": {"forward": _mpt},
    "openai.Attention": {"_attn": _openai_gpt},
    "xglm.XGLMAttention": {"forward": _xglm},
}
_UNNUMBERED = {"openai.Attention"}  # without an index of the layer
