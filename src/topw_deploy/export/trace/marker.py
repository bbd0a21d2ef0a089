"""Markers: placeholder nodes for attention in a trace.

A marker has scale, soft cap, window and layer but no mask, so one trace serves every target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from topw_deploy.errors import UnsupportedModelError

MARKER_DOMAIN = "topw.trace"
MARKER_OP = "Attention"
_IMPLEMENTATION = "topw_marker"
_SLIDING = ("sliding_attention", "hybrid_sliding")
_LAYER_TYPES = {"full_attention", *_SLIDING, "linear_attention", "hybrid", "conv", "moe", "mlp"}
# Arguments without effect in causal inference.
_HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


@contextlib.contextmanager
def marked(model: PreTrainedModel) -> Iterator[None]:
    """Trace attention of `model` as markers inside the block."""
    AttentionInterface.register(_IMPLEMENTATION, _marker_attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def marker_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The markers in layer order."""
    nodes = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == MARKER_OP]
    return sorted(nodes, key=lambda node: node.attributes["layer"].as_int())


def check_layer_types(model: PreTrainedModel, config: Any) -> None:
    """Raises UnsupportedModelError for layers that markers cannot represent."""
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(other)}, which "
            "cannot be exported; choose another model or graft an ONNX decoder made by another exporter."
        )
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal decoder; choose a decoder-only language model."
        )


def check_markers(model: PreTrainedModel, config: Any, graph: ir.Graph) -> None:
    """Raises UnsupportedModelError unless attention layers have one marker each, with the configured window."""
    nodes = marker_nodes(graph)
    name = type(model).__name__
    layers = [node.attributes["layer"].as_int() for node in nodes]
    if len(set(layers)) != len(layers) or not any(node.domain == MARKER_DOMAIN for node in graph):
        raise UnsupportedModelError(
            f"{name} shows {len(nodes)} attention calls for {config.num_hidden_layers} layers through transformers' "
            "attention interface, but one per attention layer is needed; graft an ONNX decoder made by another "
            "exporter."
        )
    for index, node in zip(layers, nodes, strict=True):
        expected = _stated_window(config, index)
        found = node.attributes["window"].as_int()
        if expected is not None and found != expected:
            raise UnsupportedModelError(
                f"{name} states a window of {expected} tokens for layer {index} but calls attention with {found}, so "
                "its mask is uncertain; graft an ONNX decoder made by another exporter."
            )


def _stated_window(config: Any, layer: int) -> int | None:
    """The configured window of a layer; 0 for no window, None if no layer types are configured."""
    types = getattr(config, "layer_types", None)
    if not types:
        return None
    return int(config.sliding_window) if types[layer] in _SLIDING else 0


def _marker_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, heads, sequence, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, sequence, head_dim]
    value: torch.Tensor,  # [batch, kv_heads, sequence, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    unknown = sorted(name for name, given in others.items() if name not in _HARMLESS and given is not None)
    masked = attention_mask is not None  # `_no_mask` was bypassed
    if masked or unknown or is_causal is False or not getattr(module, "is_causal", True):
        what = f"the attention argument {unknown[0]}" if unknown else "attention that is not causal"
        what = "an attention mask of its own" if masked else what
        raise UnsupportedModelError(
            f"{type(module).__name__} uses {what}, which the export does not support; "
            "choose another model or graft an ONNX decoder made by another exporter."
        )
    batch, heads, sequence, head_dim = query.shape
    attributes: dict[str, Any] = {
        "scale": float(head_dim**-0.5 if scaling is None else scaling),
        "softcap": float(softcap or 0.0),
        "window": int(sliding_window or 0),
        "layer": int(module.layer_idx),  # type: ignore[arg-type]
    }
    output = torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{MARKER_OP}",
        (query, key, value),
        attributes,
        dtype=query.dtype,
        shape=(batch, sequence, heads, value.shape[-1]),
        version=1,
    )
    return output, None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Replace transformers' mask functions: lowerings add the masks."""
