"""Trace mixers, which are convolutions and recurrences, as markers.

Most mixers of transformers call functions of their Python module for the convolution and the recurrence. The functions
here replace these during the trace, with the same arguments. Where a function returns its last state, its replacement
returns a placeholder, because a traced cache stores no states. A mixer that computes in its own forward has an adapter
instead (see `mixer_adapters`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers.activations import ACT2FN

from topw_deploy.export.trace.markers import MixerMarkers
from topw_deploy.export.trace.mixer_adapters import ADAPTERS, METHODS, layer_of

_NORM_EPSILON = 1e-6
# Models that do not take transformers' cache but one of their own. All their layers have adapters, which need none.
_WITHOUT_CACHE = {"RwkvForCausalLM", "xLSTMForCausalLM"}
# Cache classes that a model checks for. Each is replaced by Cache during the trace, so that any cache passes.
_CACHE_CLASSES = ("MiniMaxCache",)


@contextlib.contextmanager
def marked_mixers(model: PreTrainedModel, markers: MixerMarkers) -> Iterator[None]:
    """Make the mixers of `model` call `markers` inside the block."""
    with contextlib.ExitStack() as changes:
        for module in modeling_modules(model):
            for name, function in _FUNCTIONS.items():
                if hasattr(module, name):
                    changes.enter_context(_replaced(module, name, partial(function, markers)))
            for name in _CACHE_CLASSES:
                if hasattr(module, name):
                    changes.enter_context(_replaced(module, name, Cache))
        for name, mixer in model.named_modules():
            kind = type(mixer).__name__
            if kind in ADAPTERS:
                method = METHODS.get(kind, "forward")
                vars(mixer)[method] = partial(ADAPTERS[kind], mixer, markers, layer_of(name))
                changes.callback(vars(mixer).pop, method)
        yield


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the forward of `model` takes a transformers cache."""
    return type(model).__name__ not in _WITHOUT_CACHE


def modeling_modules(model: PreTrainedModel) -> list[ModuleType]:
    """The Python modules that define the classes of `model`'s submodules."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if ".modeling_" in name]


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute `name` of a Python module inside the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def causal_convolution(
    markers: MixerMarkers,
    hidden_states: torch.Tensor,  # [batch, channels, sequence]
    weight: torch.Tensor,  # [channels, kernel]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_kernel_options: Any,
) -> torch.Tensor:
    """Depthwise causal convolution, [batch, channels, sequence].

    An activation other than SiLU is applied after the marker.
    """
    is_fused = activation in ("silu", "swish")
    output = markers.convolution(
        hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, activation="silu" if is_fused else ""
    )
    if activation is not None and not is_fused:
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

    The marker has one head per channel, whose key dim is the state size. Returns y [batch, channels, sequence], and a
    placeholder state if `return_last_state`.
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
    """Mamba-2: H_t = exp(A dt_t) H_(t-1) + B_t (dt_t x_t)^T; y_t = (H_t^T C_t + D x_t) silu(z_t).

    Returns y [batch, sequence, heads, head_dim], and a placeholder state if `return_final_states`.
    """
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
    g: torch.Tensor,  # log decay, [batch, sequence, heads], or [batch, sequence, heads, key dim] for KDA
    beta: torch.Tensor,  # [batch, sequence, heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaNet and KDA: S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T; o_t = S_t^T q_t.

    Queries are divided by the square root of the key dim. Returns o [batch, sequence, heads, value dim] and a
    placeholder state.
    """
    dtype = query.dtype
    query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _normalize(query), _normalize(key)
    scale = query.shape[-1] ** -0.5
    output = markers.recurrence(query, key, value, rule="gated_delta", decay=g, beta=beta, scale=scale)
    return output.to(dtype), _unused_state(value)


def _normalize(vectors: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last axis, written as an RMS norm: one operator instead of five."""
    size = vectors.shape[-1]
    weight = torch.full((size,), size**-0.5, dtype=vectors.dtype)
    return functional.rms_norm(vectors, (size,), weight, _NORM_EPSILON / size)


def _unused_state(like: torch.Tensor) -> torch.Tensor:
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
