"""Trace mixers, which are convolutions and recurrences, as placeholders.

Most mixers of transformers call functions of their Python module. Those functions are replaced during the trace.
Where one returns its last state, its replacement returns zeros, because a traced cache stores no states. A mixer that
computes in its own forward has an adapter, which takes the module and its layer's placeholders before the arguments of
the method that it replaces.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers.activations import ACT2FN

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.source.text_decoder import replaced
from topw_deploy.export.trace.placeholders import MixerPlaceholders, untraceable

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_LARGEST_GATE = 40.0  # sums of exp(40) do not overflow float32
_RG_LRU_C = -8.0  # -c of Griffin's equation 6


def layer_of(name: str) -> int:
    """The layer index in a submodule's name. Raises UnsupportedModelError if there is none."""
    found = _LAYER.search(name)
    if found is None:
        raise untraceable(f"the mixer {name!r} belongs to no numbered layer, so its state cannot be named")
    return int(found[1])


def lightning_attention(
    mixer: Any, placeholders: MixerPlaceholders, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """MiniMax: S_t = exp(-slope) S_(t-1) + k_t v_t^T; o_t = S_t^T q_t."""
    batch, sequence = hidden_states.shape[:2]
    heads = mixer.num_attention_heads
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states)).reshape(batch, sequence, heads, -1)
    query, key, value = projected.float().split(mixer.head_dim, dim=3)
    decay = -mixer.slope_rate.float().reshape(heads).expand(batch, sequence, heads)
    output = placeholders.recurrence(query, key, value, rule="gated", decay=decay)
    output = mixer.norm(output.to(hidden_states.dtype).flatten(2))
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * output), None


def griffin_recurrent_block(
    block: Any, placeholders: MixerPlaceholders, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """RecurrentGemma: a convolution and then an RG-LRU, multiplied with a gate from a linear branch."""
    gate = block.act_fn(block.linear_y(input_states))
    x = block.linear_x(input_states).transpose(1, 2)
    x = placeholders.convolution(x, block.conv_1d.weight, block.conv_1d.bias).transpose(1, 2)
    output = _rg_lru(block.rg_lru, placeholders, x, position_ids).to(input_states.dtype)
    return block.linear_out(output * gate), None


def _rg_lru(unit: Any, placeholders: MixerPlaceholders, x: Tensor, position_ids: Tensor) -> Tensor:
    """Real-gated linear recurrent unit: h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), with gates a and i.

    Each channel is a head whose state is one number. A sequence's first token, before which the state is zero, is not
    multiplied with the square root.
    """
    input_gate = _block_diagonal_gate(x, unit.input_gate_weight, unit.input_gate_bias)
    recurrent_gate = _block_diagonal_gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = (_RG_LRU_C * recurrent_gate * functional.softplus(unit.recurrent_param)).float()
    first = position_ids[:, :, None] == 0
    factor = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    value = (x * input_gate * factor.to(x.dtype)).float()[..., None]
    one = value.new_ones(x.shape[0], x.shape[1], 1, 1)
    return placeholders.recurrence(one, one, value, rule="gated", decay=log_decay).squeeze(-1)


def _block_diagonal_gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The sigmoid of a linear layer with a block-diagonal weight, [batch, sequence, width].

    x: [batch, sequence, width].
    weight: [blocks, width / blocks, width / blocks].
    bias: [blocks, width / blocks].
    """
    blocks = x.unflatten(-1, (weight.shape[0], -1)).unsqueeze(-2)  # [batch, sequence, blocks, 1, block]
    return torch.sigmoid((blocks @ weight).squeeze(-2) + bias).flatten(-2)


def convolved_projections(
    mixer: Any, placeholders: MixerPlaceholders, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """ZAYA: queries and keys pass a depthwise and a grouped convolution; half of the values come from the token before.

    Returns query, key and value [batch, sequence, heads or kv_heads, head_dim]. Biases are added after the
    placeholders, because the model also adds them to the zeros before a sequence's first token.
    """
    shape = (*hidden_states.shape[:-1], -1, mixer.head_dim)
    groups = mixer.num_key_value_groups
    queries, keys = mixer.q_proj(hidden_states), mixer.k_proj(hidden_states)
    query_mean = (queries.view(shape) + keys.view(shape).repeat_interleave(groups, dim=2)) * 0.5
    key_mean = query_mean.unflatten(2, (-1, groups)).mean(dim=3)

    depthwise, grouped = mixer.conv_qk_depthwise, mixer.conv_qk_grouped
    column = placeholders.convolution(torch.cat([queries, keys], -1).transpose(1, 2), depthwise.weight)
    kernel = grouped.weight.shape[-1]
    mixed = grouped.bias[:, None]
    for lag in range(kernel):
        column = column if lag == 0 else _delay(placeholders, column)
        tap = grouped.weight[..., kernel - 1 - lag, None]
        mixed = mixed + functional.conv1d(column + depthwise.bias[:, None], tap, groups=grouped.groups)
    mixed = mixed.transpose(1, 2)
    width = queries.shape[-1]
    query = mixed[..., :width].view(shape) + query_mean
    key = mixed[..., width:].view(shape) + key_mean

    projection = mixer.v_proj_delayed
    delayed = functional.linear(hidden_states, projection.weight).transpose(1, 2)
    delayed = _delay(placeholders, delayed).transpose(1, 2)
    if projection.bias is not None:
        delayed = delayed + projection.bias
    value = torch.cat([mixer.v_proj_current(hidden_states), delayed], dim=-1).view(shape)
    return query, key, value


def dynamic_convolution(
    mixer: Any, placeholders: MixerPlaceholders, hidden_states: Tensor, dynamic_input: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Inkling 2: a tap's weight is the sum of the channel's own weight and one that the token computes for a head."""
    heads, kernel = mixer.num_heads, mixer.conv_kernel_size
    taps = mixer.weight_proj(dynamic_input).float().unflatten(-1, (heads, 1, kernel))
    taps = taps + mixer.static_weight.float().T.unflatten(0, (heads, -1))  # [batch, sequence, heads, head_dim, kernel]
    total = hidden_states.float()
    column = total.transpose(1, 2)
    for lag in range(kernel):
        column = column if lag == 0 else _delay(placeholders, column)
        total = total + (column.transpose(1, 2).unflatten(-1, (heads, -1)) * taps[..., lag]).flatten(2)
    return (total / math.sqrt(2 * kernel + 1)).to(hidden_states.dtype)


def _delay(placeholders: MixerPlaceholders, columns: Tensor) -> Tensor:
    """Shift the columns [batch, channels, sequence] one token later."""
    weight = columns.new_tensor([1.0, 0.0]).expand(columns.shape[1], 1, 2)
    return placeholders.convolution(columns, weight)


def rwkv_attention(
    mixer: Any, placeholders: MixerPlaceholders, hidden: Tensor, state: Any = None, **_: Any
) -> tuple[Tensor, Any]:
    """RWKV: a mean of values with weights exp(k_s + w (t - 1 - s)) for s < t, and exp(k_t + u) for the token itself.

    transformers divides numerator and denominator by their largest weight. This function does not, so keys of 88 and
    more overflow.
    """
    mixed = _time_mix(mixer, placeholders, hidden)
    key, value = (mixer.key(mixed("key")).float(), mixer.value(mixed("value")).float())
    receptance = torch.sigmoid(mixer.receptance(mixed("receptance")))
    weight = torch.exp(key)
    one = weight.new_ones(*weight.shape[:2], 1, 1)
    decay = (-torch.exp(mixer.time_decay.float())).expand(weight.shape)
    sums = [
        placeholders.recurrence(one, one, part[..., None], rule="gated", decay=decay).squeeze(-1)
        for part in (weight * value, weight)
    ]
    earlier = _delay(placeholders, torch.cat(sums, dim=-1).transpose(1, 2)).transpose(1, 2)
    numerator, denominator = earlier.chunk(2, dim=-1)
    own = torch.exp(mixer.time_first.float() + key)
    mean = (numerator + own * value) / (denominator + own)
    return mixer.output(receptance * mean.to(hidden.dtype)), state


def rwkv_feed_forward(
    mixer: Any, placeholders: MixerPlaceholders, hidden: Tensor, state: Any = None, **_: Any
) -> tuple[Tensor, Any]:
    """RWKV's gated layer over mixes of each token and the one before it."""
    mixed = _time_mix(mixer, placeholders, hidden)
    value = mixer.value(torch.square(torch.relu(mixer.key(mixed("key")))))
    return torch.sigmoid(mixer.receptance(mixed("receptance"))) * value, state


def _time_mix(mixer: Any, placeholders: MixerPlaceholders, hidden: Tensor) -> Callable[[str], Tensor]:
    """A function that interpolates between each token and the one before it, by the weight time_mix_`name`."""
    delayed = _delay(placeholders, hidden.transpose(1, 2)).transpose(1, 2)

    def mix(name: str) -> Tensor:
        weight = getattr(mixer, f"time_mix_{name}")
        return hidden * weight + delayed * (1 - weight)

    return mix


def matrix_lstm(
    backend: Any,
    placeholders: MixerPlaceholders,
    query: Tensor,  # [batch, heads, sequence, dim], like key and value
    key: Tensor,
    value: Tensor,
    igate: Tensor,  # [batch, heads, sequence], like fgate
    fgate: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """xLSTM: C_t = f_t C_(t-1) + i_t k_t v_t^T; n_t = f_t n_(t-1) + i_t k_t; h_t = C_t^T q_t / max(|n_t . q_t|, 1).

    transformers divides C, n and the 1 by the largest gate so far, and adds an epsilon to the denominator. Here the
    model's cap on gates keeps exp(i) in range, without a division.
    Raises UnsupportedModelError without a cap, and for one above 40.
    """
    if not backend.config.gate_soft_cap or backend.config.gate_soft_cap > _LARGEST_GATE:
        raise UnsupportedModelError(
            f"xLSTM's gates are capped at {backend.config.gate_soft_cap}, but the export needs a cap of at most "
            f"{_LARGEST_GATE}, so that their exponentials do not overflow; choose another model."
        )
    dtype = query.dtype
    query, key, value, gate, forget = (part.float().transpose(1, 2) for part in (query, key, value, igate, fgate))
    gate = torch.exp(gate)[..., None]
    settings = {"rule": "gated", "decay": functional.logsigmoid(forget), "scale": query.shape[-1] ** -0.5}
    memory = placeholders.recurrence(query, key, gate * value, **settings)
    normalizer = placeholders.recurrence(query, key, gate, **settings)
    output = memory / (normalizer.abs().clamp(min=1.0) + backend.config.eps)
    return output.transpose(1, 2).to(dtype), None


def ngram_embedding(embedding: Any, placeholders: MixerPlaceholders, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    """Qwen 4: rows of a table, chosen by hashes of the last tokens, [batch, sequence, heads * dim].

    No n-gram reaches back past an end-of-text token: tokens before it, and those before a row's first token, count as
    end-of-text tokens. The history holds differences from that token's id, so that zeros stand for it.
    """
    end, earlier_tokens = embedding.eos_token_id, embedding.ngram_size - 1
    ids = input_ids.long()
    history = placeholders.history((ids - end)[:, None], earlier_tokens)[:, 0]
    multipliers, sizes, offsets = (
        getattr(embedding, name) for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    )
    hashes = ids * multipliers[0]
    rows, earlier = [], None
    for lag in range(1, earlier_tokens + 1):
        column = history[:, earlier_tokens - lag : -lag]
        earlier = column if earlier is None else torch.where(earlier == 0, 0, column)
        hashes = torch.bitwise_xor(hashes, (earlier + end) * multipliers[lag])
        heads = slice((lag - 1) * embedding.heads_per_ngram, lag * embedding.heads_per_ngram)
        rows.append(torch.remainder(hashes[..., None], sizes[heads]) + offsets[heads])
    return embedding.ngram_embedding(torch.cat(rows, dim=-1)).flatten(-2)


def dilated_convolution(ple: Any, placeholders: MixerPlaceholders, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Qwen 4's convolution of n-gram features [batch, sequence, channels], whose taps have gaps between them."""
    columns = placeholders.history(hidden_states.transpose(1, 2), ple.short_conv_state_len)
    return functional.silu(ple.conv1d(columns)).transpose(1, 2)


def compressed_blocks(
    compressor: Any,
    placeholders: MixerPlaceholders,
    hidden_states: Tensor,
    _compact: Tensor,
    position_ids: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """DeepSeek V4: a weighted mean of the last `compress_rate` tokens up to each, [batch, 1, sequence, head_dim].

    The model computes it only where a block of tokens ends. With an overlap, the mean includes the block before, which
    has gates and values of its own.
    """
    size, width, count = compressor.compress_rate, compressor.head_dim, hidden_states.shape[1]
    overlaps = compressor.position_bias.shape[1] != width
    span = 2 * size if overlaps else size  # tokens in a mean
    projected = torch.cat([compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)], dim=-1)
    columns = placeholders.history(projected.transpose(1, 2), span - 1).transpose(1, 2)
    windows = columns[:, torch.arange(count)[:, None] + torch.arange(span)]  # [batch, sequence, span, channels]
    values, gates = windows.chunk(2, dim=-1)
    bias = compressor.position_bias
    if overlaps:
        values, gates = (torch.cat([x[:, :, :size, :width], x[:, :, size:, width:]], dim=2) for x in (values, gates))
        is_missing = (position_ids < span - 1)[..., None, None] & (torch.arange(span) < size)[:, None]
        gates = torch.where(is_missing, float("-inf"), gates)  # the first block has none before it
        bias = torch.cat([bias[:, :width], bias[:, width:]])
    weights = (gates + bias).softmax(dim=2, dtype=torch.float32).to(values.dtype)
    blocks = compressor.kv_norm((values * weights).sum(dim=2))
    starts = position_ids + 1 - size
    cos, sin = compressor.rotary_emb(blocks, position_ids=starts, layer_type=compressor.rope_layer_type)
    return sys.modules[type(compressor).__module__].apply_rotary_pos_emb(blocks[:, None], cos, sin)


def shared_attention(
    mixer: Any, placeholders: MixerPlaceholders, *args: Any, layer_idx: int, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Zamba's attention, a module that several layers share: its placeholder gets the index of the calling layer."""
    before = mixer.layer_idx
    mixer.layer_idx = layer_idx
    try:
        return type(mixer).forward(mixer, *args, layer_idx=layer_idx, **kwargs)
    finally:
        mixer.layer_idx = before


# Class name -> replacement of its forward, or of its method in METHODS.
ADAPTERS: dict[str, Callable[..., Any]] = {
    "DeepseekV4CSACompressor": compressed_blocks,
    "DeepseekV4HCACompressor": compressed_blocks,
    "Inkling2DynamicShortConvolution": dynamic_convolution,
    "MiniMaxLightningAttention": lightning_attention,
    "Qwen4ExpTextNGramEmbedding": ngram_embedding,
    "Qwen4ExpTextPLELayer": dilated_convolution,
    "RecurrentGemmaRecurrentBlock": griffin_recurrent_block,
    "RwkvFeedForward": rwkv_feed_forward,
    "RwkvSelfAttention": rwkv_attention,
    "ZambaAttention": shared_attention,
    "Zamba2Attention": shared_attention,
    "ZayaCCAProjection": convolved_projections,
    "xLSTMBackend": matrix_lstm,
}
METHODS = {"Qwen4ExpTextPLELayer": "_short_conv"}

_NORM_EPSILON = 1e-6
# Models that do not take transformers' cache but one of their own. All their layers have adapters, which need none.
_WITHOUT_CACHE = {"RwkvForCausalLM", "xLSTMForCausalLM"}
# Cache classes that a model checks for. Each is replaced by Cache during the trace, so that any cache passes.
_CACHE_CLASSES = ("MiniMaxCache",)


def marked_mixers(model: PreTrainedModel, placeholders: MixerPlaceholders) -> contextlib.AbstractContextManager[None]:
    """Make the mixers of `model` call `placeholders` inside the block."""
    changes: list[tuple[Any, str, Any]] = []
    for module in modeling_modules(model):
        new = {name: partial(function, placeholders) for name, function in _FUNCTIONS.items()}
        new |= dict.fromkeys(_CACHE_CLASSES, Cache)
        changes += [(module, name, value) for name, value in new.items() if hasattr(module, name)]
    for name, mixer in model.named_modules():
        kind = type(mixer).__name__
        if kind in ADAPTERS:
            adapter = partial(ADAPTERS[kind], mixer, placeholders.of_layer(layer_of(name)))
            changes.append((mixer, METHODS.get(kind, "forward"), adapter))
    return replaced(*changes)


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the forward of `model` takes a transformers cache."""
    return _WITHOUT_CACHE.isdisjoint(base.__name__ for base in type(model).__mro__)


def modeling_modules(model: PreTrainedModel) -> list[ModuleType]:
    """The Python modules that define the classes of `model`'s submodules."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if ".modeling_" in name]


def causal_convolution(
    placeholders: MixerPlaceholders,
    hidden_states: Tensor,  # [batch, channels, sequence]
    weight: Tensor,  # [channels, kernel]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_kernel_options: Any,
) -> Tensor:
    """Depthwise causal convolution, [batch, channels, sequence].

    An activation other than SiLU is applied after the placeholder.
    """
    is_fused = activation in ("silu", "swish")
    output = placeholders.convolution(
        hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, activation="silu" if is_fused else ""
    )
    if activation is not None and not is_fused:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


def selective_scan(
    placeholders: MixerPlaceholders,
    hidden_states: Tensor,  # x, [batch, channels, sequence]
    dt: Tensor,  # [batch, channels, sequence]
    A: Tensor,  # [channels, state size]
    B: Tensor,  # [batch, state size, sequence]
    C: Tensor,  # [batch, state size, sequence]
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_kernel_options: Any,
) -> Any:
    """Mamba: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t; y_t = (C_t h_t + D x_t) silu(z_t).

    The placeholder has one head per channel, whose key dim is the state size. Returns y [batch, channels, sequence],
    and a placeholder state if `return_last_state`.
    """
    dt, x = dt.float(), hidden_states.float()
    if delta_bias is not None:
        dt = dt + delta_bias[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    decay = A.float() * dt.transpose(1, 2)[..., None]  # [batch, sequence, channels, state size]
    query, key = (part.float().transpose(1, 2).unsqueeze(2) for part in (C, B))
    value = (dt * x).transpose(1, 2)[..., None]
    output = placeholders.recurrence(query, key, value, rule="gated", decay=decay).squeeze(-1).transpose(1, 2)
    if D is not None:
        output = output + x * D.float()[None, :, None]
    if z is not None:
        output = output * functional.silu(z.float())
    return (output, _unused_state(x)) if return_last_state else output


def state_space_dual(
    placeholders: MixerPlaceholders,
    hidden_states: Tensor,  # x, [batch, sequence, heads, head_dim]
    dt: Tensor,  # [batch, sequence, heads]
    A: Tensor,  # [heads]
    B: Tensor,  # [batch, sequence, groups, state size]
    C: Tensor,  # [batch, sequence, groups, state size]
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_kernel_options: Any,
) -> Any:
    """Mamba-2: H_t = exp(A dt_t) H_(t-1) + B_t (dt_t x_t)^T; y_t = (H_t^T C_t + D x_t) silu(z_t).

    Returns y [batch, sequence, heads, head_dim], and a placeholder state if `return_final_states`.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt, x = dt.clamp(min=dt_limit[0], max=dt_limit[1]).float(), hidden_states.float()
    output = placeholders.recurrence(C.float(), B.float(), x * dt[..., None], rule="gated", decay=A.float() * dt)
    if D is not None:
        output = output + D[..., None] * x
    if z is not None:
        output = output * functional.silu(z.float())
    return (output, _unused_state(x)) if return_final_states else output


def gated_delta_rule(
    placeholders: MixerPlaceholders,
    query: Tensor,  # [batch, sequence, key heads, key dim]
    key: Tensor,  # [batch, sequence, key heads, key dim]
    value: Tensor,  # [batch, sequence, heads, value dim]
    g: Tensor,  # log decay, [batch, sequence, heads], or [batch, sequence, heads, key dim] for KDA
    beta: Tensor,  # [batch, sequence, heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_kernel_options: Any,
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet and KDA: S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T; o_t = S_t^T q_t.

    Queries are divided by the square root of the key dim. Returns o [batch, sequence, heads, value dim] and a
    placeholder state.
    """
    dtype = query.dtype
    query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _normalize(query), _normalize(key)
    scale = query.shape[-1] ** -0.5
    output = placeholders.recurrence(query, key, value, rule="gated_delta", decay=g, beta=beta, scale=scale)
    return output.to(dtype), _unused_state(value)


def _normalize(vectors: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last axis, written as an RMS norm: one operator instead of five."""
    size = vectors.shape[-1]
    weight = torch.full((size,), size**-0.5, dtype=vectors.dtype)
    return functional.rms_norm(vectors, (size,), weight, _NORM_EPSILON / size)


def _unused_state(like: Tensor) -> Tensor:
    """A placeholder for a last state, in the type of `like`; a tensor, because callers store, cast or stack it."""
    return like.new_zeros(1)


# Function of transformers -> its replacement. A traced cache returns no past states, so these functions suffice: they
# are those that a call without past states uses.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": state_space_dual,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
}
