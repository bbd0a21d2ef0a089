"""The recurrences of mixers, written with markers.

Each function has the signature of the transformers function that it replaces. Where that returns the last state, it
returns a placeholder, because a traced cache keeps no states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from topw_deploy.export.trace.mixer_markers import MixerMarkers

_NORM_EPSILON = 1e-6


def causal_convolution(
    markers: MixerMarkers,
    hidden_states: torch.Tensor,  # [batch, channels, sequence]
    weight: torch.Tensor,  # [channels, kernel]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_kernel_options: Any,
) -> torch.Tensor:
    """Depthwise causal convolution. An activation other than SiLU is applied after the marker."""
    fused = activation in ("silu", "swish")
    output = markers.convolution(
        hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, activation="silu" if fused else ""
    )
    if activation is not None and not fused:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


def selective_scan(
    markers: MixerMarkers,
    hidden_states: torch.Tensor,  # x, [batch, channels, sequence]
    dt: torch.Tensor,  # [batch, channels, sequence]
    A: torch.Tensor,  # [channels, state size]
    B: torch.Tensor,  # [batch, state size, sequence]
    C: torch.Tensor,  # [batch, state size, sequence]
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_kernel_options: Any,
) -> Any:
    """Mamba: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t; y_t = (C_t h_t + D x_t) silu(z_t).

    The marker has one head per channel, with the state size as its key dim.
    """
    dt, x = dt.float(), hidden_states.float()
    if delta_bias is not None:
        dt = dt + delta_bias[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    decay = A.float() * dt.transpose(1, 2)[..., None]  # [batch, sequence, channels, state size]
    query, key = (part.float().transpose(1, 2).unsqueeze(2) for part in (C, B))
    value = (dt * x).transpose(1, 2)[..., None]
    output = markers.recurrence(query, key, value, rule="gated", decay=decay).squeeze(-1).transpose(1, 2)
    if D is not None:
        output = output + x * D.float()[None, :, None]
    if z is not None:
        output = output * functional.silu(z.float())
    return (output, _unused_state(x)) if return_last_state else output


def state_space_dual(
    markers: MixerMarkers,
    hidden_states: torch.Tensor,  # x, [batch, sequence, heads, head_dim]
    dt: torch.Tensor,  # [batch, sequence, heads]
    A: torch.Tensor,  # [heads]
    B: torch.Tensor,  # [batch, sequence, groups, state size]
    C: torch.Tensor,  # [batch, sequence, groups, state size]
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_kernel_options: Any,
) -> Any:
    """Mamba-2: H_t = exp(A dt_t) H_(t-1) + B_t (dt_t x_t)^T; y_t = H_t^T C_t + D x_t."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt, x = dt.clamp(min=dt_limit[0], max=dt_limit[1]).float(), hidden_states.float()
    output = markers.recurrence(C.float(), B.float(), x * dt[..., None], rule="gated", decay=A.float() * dt)
    if D is not None:
        output = output + D[..., None] * x
    if z is not None:
        output = output * functional.silu(z.float())
    return (output, _unused_state(x)) if return_final_states else output


def gated_delta_rule(
    markers: MixerMarkers,
    query: torch.Tensor,  # [batch, sequence, key heads, key dim]
    key: torch.Tensor,  # [batch, sequence, key heads, key dim]
    value: torch.Tensor,  # [batch, sequence, heads, value dim]
    g: torch.Tensor,  # log decay: [batch, sequence, heads], and of KDA [batch, sequence, heads, key dim]
    beta: torch.Tensor,  # [batch, sequence, heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaNet and KDA: S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T; o_t = S_t^T q_t.

    Queries are divided by the square root of the key dim.
    """
    dtype = query.dtype
    query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit_length(query), _unit_length(key)
    scale = query.shape[-1] ** -0.5
    output = markers.recurrence(query, key, value, rule="gated_delta", decay=g, beta=beta, scale=scale)
    return output.to(dtype), _unused_state(value)


def _unit_length(vectors: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + epsilon), as an RMS norm: one operator instead of five."""
    size = vectors.shape[-1]
    weight = torch.full((size,), size**-0.5, dtype=vectors.dtype)
    return functional.rms_norm(vectors, (size,), weight, _NORM_EPSILON / size)


def _unused_state(like: torch.Tensor) -> torch.Tensor:
    """A placeholder tensor, because callers store, cast or stack the state."""
    return like.new_zeros(1)
