"""Forwards, written with markers, of mixers that compute by hand.

Each takes the mixer, the markers and the layer's index before the arguments of the forward that it replaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.mixer_markers import MixerMarkers

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_RG_LRU_C = -8.0  # of Griffin's equation 6


def layer_of(name: str) -> int:
    """The layer index in a submodule's name. Raises UnsupportedModelError if there is none."""
    found = _LAYER.search(name)
    if found is None:
        raise UnsupportedModelError(
            f"the mixer {name!r} belongs to no numbered layer, so its state cannot be named; graft an ONNX decoder "
            "made by another exporter."
        )
    return int(found[1])


def lightning_attention(
    mixer: Any, markers: MixerMarkers, layer: int, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, None]:
    """MiniMax: S_t = exp(-slope) S_(t-1) + k_t v_t^T; o_t = S_t^T q_t."""
    batch, sequence, _ = hidden_states.shape
    heads = mixer.num_attention_heads
    joint = mixer.act_fn(mixer.qkv_proj(hidden_states)).reshape(batch, sequence, heads, -1)
    query, key, value = joint.float().split(mixer.head_dim, dim=3)
    decay = -mixer.slope_rate.float().reshape(heads).expand(batch, sequence, heads)
    output = markers.recurrence(query, key, value, rule="gated", decay=decay, layer=layer)
    output = mixer.norm(output.to(hidden_states.dtype).flatten(2))
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * output), None


def griffin_recurrent_block(
    block: Any,
    markers: MixerMarkers,
    layer: int,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma: convolution, then RG-LRU, gated by a linear branch."""
    gate = block.act_fn(block.linear_y(input_states))
    x = block.linear_x(input_states).transpose(1, 2)
    x = markers.convolution(x, block.conv_1d.weight, block.conv_1d.bias, layer=layer).transpose(1, 2)
    output = _rg_lru(block.rg_lru, markers, layer, x, position_ids).to(input_states.dtype)
    return block.linear_out(output * gate), None


def _rg_lru(unit: Any, markers: MixerMarkers, layer: int, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Real-gated linear recurrent unit: h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), with gates a and i.

    A head of one number per channel. A sequence's first token is not scaled; its past state is zero.
    """
    input_gate = _block_diagonal_gate(x, unit.input_gate_weight, unit.input_gate_bias)
    recurrent_gate = _block_diagonal_gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = (_RG_LRU_C * recurrent_gate * functional.softplus(unit.recurrent_param)).float()
    first = position_ids[:, :, None] == 0
    factor = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    value = (x * input_gate * factor.to(x.dtype)).float()[..., None]
    one = value.new_ones(x.shape[0], x.shape[1], 1, 1)
    return markers.recurrence(one, one, value, rule="gated", decay=log_decay, layer=layer).squeeze(-1)


def _block_diagonal_gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x: [batch, sequence, width]; weight: [blocks, block, block]."""
    blocks = x.unflatten(-1, (weight.shape[0], -1)).unsqueeze(-2)  # [batch, sequence, blocks, 1, block]
    return torch.sigmoid((blocks @ weight).squeeze(-2) + bias).flatten(-2)


def convolved_projections(
    mixer: Any,
    markers: MixerMarkers,
    layer: int,
    hidden_states: torch.Tensor,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ZAYA: queries and keys through a depthwise and a grouped convolution, half of each value from the last token.

    Returns query, key and value [batch, sequence, heads, head_dim]. Biases are added after the markers, because the
    past of a sequence's first token counts as zeros before them.
    """
    shape = (*hidden_states.shape[:-1], -1, mixer.head_dim)
    groups = mixer.num_key_value_groups
    queries, keys = mixer.q_proj(hidden_states), mixer.k_proj(hidden_states)
    query_mean = (queries.view(shape) + keys.view(shape).repeat_interleave(groups, dim=2)) * 0.5
    key_mean = query_mean.unflatten(2, (-1, groups)).mean(dim=3)

    depthwise, grouped = mixer.conv_qk_depthwise, mixer.conv_qk_grouped
    column = markers.convolution(torch.cat([queries, keys], -1).transpose(1, 2), depthwise.weight, layer=layer)
    kernel = grouped.weight.shape[-1]
    mixed = grouped.bias[:, None]
    for lag in range(kernel):
        column = column if lag == 0 else _previous(markers, layer, column)
        tap = grouped.weight[..., kernel - 1 - lag, None]
        mixed = mixed + functional.conv1d(column + depthwise.bias[:, None], tap, groups=grouped.groups)
    mixed = mixed.transpose(1, 2)
    width = queries.shape[-1]
    query = mixed[..., :width].view(shape) + query_mean
    key = mixed[..., width:].view(shape) + key_mean

    late = mixer.v_proj_delayed
    delayed = functional.linear(hidden_states, late.weight).transpose(1, 2)
    delayed = _previous(markers, layer, delayed).transpose(1, 2)
    if late.bias is not None:
        delayed = delayed + late.bias
    value = torch.cat([mixer.v_proj_current(hidden_states), delayed], dim=-1).view(shape)
    return query, key, value


def _previous(markers: MixerMarkers, layer: int, columns: torch.Tensor) -> torch.Tensor:
    """The columns [batch, channels, sequence], each one token later."""
    weight = columns.new_tensor([1.0, 0.0]).expand(columns.shape[1], 1, 2)
    return markers.convolution(columns, weight, layer=layer)


def shared_attention(
    mixer: Any, markers: MixerMarkers, layer: int, *args: Any, layer_idx: int, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Zamba's attention, shared by layers: tell attention markers the layer of the call."""
    before = mixer.layer_idx
    mixer.layer_idx = layer_idx
    try:
        return type(mixer).forward(mixer, *args, layer_idx=layer_idx, **kwargs)
    finally:
        mixer.layer_idx = before


ADAPTERS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": lightning_attention,
    "RecurrentGemmaRecurrentBlock": griffin_recurrent_block,
    "ZambaAttention": shared_attention,
    "Zamba2Attention": shared_attention,
    "ZayaCCAProjection": convolved_projections,
}
