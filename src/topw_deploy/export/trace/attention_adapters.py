"""Methods for models whose own cannot be traced, though they call transformers' attention interface.

Each replaces a method of one class during the trace, and computes what it computes. It writes rotations so that
`lowering.rotary` recognises them. `attention` has the models that do not call the interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Method = Callable[..., Any]
LATENTS = "topw_latents"  # attribute of a module: the arguments of its last call of `expand_kv`
BIASES = "rel_logits_proj"  # attribute of attention modules whose `position_bias` comes from `_distance_biases`


def rotate_pairs(x: Tensor, angles: Tensor, width: int, scaling: float = 1.0) -> Tensor:
    """Rotate neighbouring pairs of the first `width` elements of each head, and multiply them with `scaling`.

    x: [batch, heads, sequence, head_dim].
    angles: [batch, sequence, width / 2].
    """
    both = torch.repeat_interleave(angles, 2, dim=-1)
    tables = (both.cos(), both.sin()) if scaling == 1 else (both.cos() * scaling, both.sin() * scaling)
    cos, sin = (table.unsqueeze(1).to(x.dtype) for table in tables)
    part = x[..., :width]
    crossed = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    rotated = part * cos + crossed * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads * dim] -> [batch, heads, sequence, dim]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def update_cache(cache: Any, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values to attend to: as the cache returns them, or unchanged without a cache."""
    return (key, value) if cache is None else cache.update(key, value, layer)


def _attend(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> Tensor:
    """Call transformers' attention interface for the module `self`. Returns [batch, sequence, heads, value_dim].

    query, key, value: [batch, heads or kv_heads, sequence, dim].
    Further arguments: those of the module's own forward.
    """
    key, value = update_cache(past_key_values, key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output: Tensor
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **others)
    return output


def model_function(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """The function `name` of the Python module that defines the class of `module`."""
    return getattr(sys.modules[type(module).__module__], name)


# Llama 4 and DeepSeek V2 rotate pairs by products with complex numbers, which the tracer does not support.


def _rotary_angles(self: Any, _x: Tensor, position_ids: Tensor) -> SimpleNamespace:
    """What the replaced rotary embeddings return instead of complex numbers.

    positions: int64 [batch, sequence].
    angles: float32 [batch, sequence, width / 2].
    scaling: factor of the rotated elements.
    to: returns the same, as models move the numbers to a device.
    """
    angles = position_ids[..., None].float() * self.inv_freq.float()
    rotation = SimpleNamespace(positions=position_ids, angles=angles, scaling=float(self.attention_scaling))
    rotation.to = lambda *_, **__: rotation
    return rotation


def _rotate_queries_and_keys(query: Tensor, key: Tensor, rotation: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [batch, heads, sequence, head_dim] in float32; the results have the queries' type."""
    width = query.shape[-1]
    parts = (rotate_pairs(part.float(), rotation.angles, width, rotation.scaling) for part in (query, key))
    rotated_query, rotated_key = (part.to(query.dtype) for part in parts)
    return rotated_query, rotated_key


def _llama4_attention(
    self: Any, hidden_states: Tensor, position_embeddings: SimpleNamespace, **call: Any
) -> tuple[Tensor, None]:
    """Llama 4's attention. Layers without rotation scale their queries by position.

    The original reads the positions from the cache, and this function from position_ids.
    """
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
    if self.use_rope:
        query, key = _rotate_queries_and_keys(query, key, position_embeddings)
    elif self.attn_temperature_tuning:
        steps = torch.floor((position_embeddings.positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        query = (query * scales[:, None, :, None]).to(query.dtype)
    if hasattr(self, "qk_norm"):
        query, key = self.qk_norm(query), self.qk_norm(key)
    return self.o_proj(_attend(self, query, key, value, **call).flatten(2)), None


def _doge_attention(self: Any, hidden_states: Tensor, position_embeddings: Any, **call: Any) -> tuple[Tensor, None]:
    """Doge's attention, in which every key adds a number to its scores.

    The number becomes one more element of the key, and 1 / scale one more element of the query.
    """
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
    query, key, merged, value = self.q_norm(query), self.k_norm(key), value.flatten(2), value.transpose(1, 2)
    rotate = model_function(self, "apply_rotary_pos_emb")
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
    added = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(merged)))  # [batch, sequence, kv_heads]
    key = torch.cat((key, added.transpose(1, 2)[..., None].to(key.dtype)), dim=-1)
    query = torch.cat((query, torch.full_like(query[..., :1], 1 / self.scaling)), dim=-1)
    return self.o_proj(_attend(self, query, key, value, **call).flatten(2)), None


def _qwen4_attention(self: Any, hidden_states: Tensor, position_embeddings: Any, **call: Any) -> tuple[Tensor, None]:
    """Qwen 4's gated attention to all tokens, in place of those that an indexer selects.

    The original combines the mask with the selection, and takes the new tokens' angles from those of all tokens.
    """
    query, gate = self.q_proj(hidden_states).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
    key, value = (part(hidden_states).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
    query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = model_function(self, "apply_rotary_pos_emb")(query, key, cos, sin)
    output = _attend(self, query, key, value.transpose(1, 2), **call)
    return self.o_proj(output.flatten(2) * torch.sigmoid(gate.flatten(2))), None


def _deepseek_v4_attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any, position_ids: Tensor, **call: Any
) -> tuple[Tensor, None]:
    """DeepSeek V4's attention: one softmax over a window of tokens and over compressed blocks of tokens.

    Keys are rotated, and are the values too, so the outputs are rotated back.
    """
    rotate, (cos, sin) = model_function(self, "apply_rotary_pos_emb"), position_embeddings[self.rope_layer_type]
    compact = self.q_a_norm(self.q_a_proj(hidden_states))
    query = rotate(self.q_b_norm(split_heads(self.q_b_proj(compact), self.num_heads)), cos, sin)
    key = rotate(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)
    if self.compressor is not None:
        block_keys = self.compressor(hidden_states, compact, position_ids, None, self.layer_idx)
        call["blocks"] = block_keys, self.compressor.compress_rate
    output = _attend(self, query, key, key, s_aux=self.sinks, **call)
    output = rotate(output.transpose(1, 2), cos, -sin).transpose(1, 2)
    groups = output.flatten(2).unflatten(-1, (self.config.o_groups, -1))
    return self.o_b_proj(self.o_a_proj(groups).flatten(2)), None


# Latent attention expands keys and values from one compressed vector c per token. The states hold the compressed
# vectors, and queries and outputs absorb the expansions U_k and U_v:
#
#     q . (U_k c, r) = (U_k^T q_c, q_r) . (c, r)        sum of w U_v c = U_v (sum of w c)
#
# r is the rotated part of a key, which all heads share; w is the weight of a token in the softmax.


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values [batch, heads, sequence, dim] of compressed vectors and rotated parts of keys.

    Replaces the method of that name, and stores its arguments in the attribute `LATENTS` of the module.
    kv_nope: compressed vectors, [batch, 1, sequence, rank].
    k_rot: rotated parts, [batch, 1, sequence, rotary_dim].
    """
    widths = [self.qk_nope_head_dim, self.v_head_dim]
    both = self.kv_b_proj(kv_nope.squeeze(1)).unflatten(-1, (-1, sum(widths))).transpose(1, 2)
    key, value = torch.split(both, widths, dim=-1)
    setattr(self, LATENTS, (kv_nope, k_rot))
    return torch.cat((key, k_rot.expand(-1, key.shape[1], -1, -1)), dim=-1), value


def latents_are_smaller(self: Any, heads: int) -> bool:
    """Whether states of compressed vectors take less memory than states of keys and values of `heads` heads."""
    expanded = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
    return bool(self.kv_lora_rank + self.qk_rope_head_dim < expanded)


def mark_latent_attention(
    self: Any, query: Tensor, latents: tuple[Tensor, Tensor], mark: Callable[..., Tensor]
) -> Tensor:
    """Leave a placeholder of attention to compressed vectors. Returns [batch, sequence, heads, value_dim].

    query: [batch, heads, sequence, dim].
    latents: the arguments of `expand_kv`.
    mark: `mark_attention` without the arguments query, key, value and latent.
    """
    compressed, rotated = latents
    rank, plain = compressed.shape[-1], self.qk_nope_head_dim
    up = self.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))  # [heads, plain + value_dim, rank]
    absorbed = torch.matmul(query[..., :plain], up[:, :plain])
    queries, keys = torch.cat((absorbed, query[..., plain:]), dim=-1), torch.cat((compressed, rotated), dim=-1)
    output = mark(queries, keys, None, latent=rank)
    values = torch.matmul(output.transpose(1, 2), up[:, plain:].transpose(1, 2))
    return values.transpose(1, 2)


# Inkling adds a bias to each score, by the distance from query to key. Each query computes its biases for all distances
# before the keys are known.


def _distance_biases(self: Any, relative_states: Tensor, *_positions: Tensor) -> Tensor:
    """The argument `relative` of `mark_attention`, for relative_states [batch, sequence, heads, dim].

    Replaces the forward that returns the bias of each query and key. Keys beyond the last distance have no bias.
    """
    profiles = functional.pad(self.proj, (0, 1))  # [dim, extent + 1]
    return torch.matmul(relative_states, profiles).transpose(1, 2)


def move_sinks_to_biases(relative: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Biases and a constant sink for attention in which each query has a sink score of its own.

    sinks: the sink scores, [batch, heads, sequence, 1], or None.
    Returns the arguments `relative` and `sink` of `mark_attention`: a softmax does not change if the sink's score is
    subtracted from all scores, including its own, which becomes 0.
    """
    return (relative, None) if sinks is None else (relative - sinks, sinks.new_zeros(sinks.shape[1]))


def _inkling_attention(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Any = None, **others: Any
) -> tuple[Tensor, None]:
    """Inkling's attention. Positions scale queries and biases; the original counts them in the cache."""
    parts = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    key, value = (
        convolve(part, past_key_values=past_key_values, conv_mask=others.get("conv_mask"))
        for convolve, part in zip((self.k_sconv, self.v_sconv), parts[1:], strict=True)
    )
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (parts[0], key, value))
    query, key, value = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
    relative = self.rel_logits_proj(self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        # 1 up to log_scaling_n_floor tokens, then growing with the logarithm
        counts = (past_key_values.positions + 1).float() / self.config.log_scaling_n_floor
        growth = self.config.log_scaling_alpha * torch.log(counts.clamp(min=1.0))
        scales = (1.0 + growth)[:, None, :, None]
        query, relative = ((part.float() * scales).to(part.dtype) for part in (query, relative))
    output = _attend(self, query, key, value, attention_mask, past_key_values, position_bias=relative)
    return self.o_proj(output.flatten(2)), None


def _attend_to_blocks(self: Any, block_states: Tensor, partial_block_states: Tensor) -> tuple[Tensor, ...]:
    """Inkling 2's attention of a token to its own states after each block of layers, written as products.

    The tracer would turn the original into an operator for attention over tokens.
    """
    states = torch.cat([block_states, partial_block_states.unsqueeze(-2)], dim=-2).float()
    states = self.norm(states)  # [batch, sequence, blocks, hidden]
    width = states.shape[-1]
    queries = self.query.float().view(-1, width)
    scores = torch.matmul(states, queries.T).transpose(-1, -2) * width**-0.5  # [batch, sequence, queries, blocks]
    mixed = torch.matmul(torch.softmax(scores, dim=-1), states)
    return mixed.unbind(-2)


def keep_all_columns(_self: Any, *inputs: Any, **_others: Any) -> tuple[Any, ...]:
    """All inputs but the last, logits_to_keep; replaces Gemma 4's method that cuts them to the columns named by it."""
    return inputs[:-1]


# Folder in transformers.models and class -> replaced methods.
METHODS: dict[str, dict[str, Method]] = {
    "deepseek_v2.DeepseekV2RotaryEmbedding": {"forward": _rotary_angles},
    "deepseek_v4.DeepseekV4Attention": {"forward": _deepseek_v4_attention},
    "doge.DogeAttention": {"forward": _doge_attention},
    "inkling.InklingAttention": {"forward": _inkling_attention},
    "inkling.InklingRelativeLogits": {"forward": _distance_biases},
    "inkling2.Inkling2BlockAttentionResidual": {"forward": _attend_to_blocks},
    "inkling2.Inkling2RelativeLogits": {"forward": _distance_biases},
    "llama4.Llama4TextAttention": {"forward": _llama4_attention},
    "llama4.Llama4TextRotaryEmbedding": {"forward": _rotary_angles},
    "qwen4_exp.Qwen4ExpTextAttention": {"forward": _qwen4_attention},
}
# The same -> replaced functions of the Python module that defines the class.
FUNCTIONS: dict[str, dict[str, Method]] = {
    "deepseek_v2.DeepseekV2RotaryEmbedding": {"apply_rotary_emb": _rotate_queries_and_keys}
}
