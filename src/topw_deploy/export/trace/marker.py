"""Markers: placeholder nodes for attention in a trace.

A marker has scale, soft cap, window and layer but no mask, so one trace serves every target.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.masks import Visible

MARKER_DOMAIN = "topw.trace"
MARKER_OP = "Attention"


def marker_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The markers in layer order."""
    nodes = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == MARKER_OP]
    return sorted(nodes, key=lambda node: node.attributes["layer"].as_int())


def check_layer_types(model: PreTrainedModel, config: Any) -> None:
    """Raises UnsupportedModelError for layers that markers cannot represent."""
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal decoder; choose a decoder-only language model."
        )


def check_markers(model: PreTrainedModel, config: Any, graph: ir.Graph, layers: int) -> None:
    """Raises UnsupportedModelError unless each layer has one marker with the configured window."""
    nodes = marker_nodes(graph)
    name = type(model).__name__
    if [node.attributes["layer"].as_int() for node in nodes] != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} shows {len(nodes)} attention calls for {layers} layers through transformers' attention interface, "
            "but exactly one per layer is needed; graft an ONNX decoder made by another exporter."
        )
    for index, node in enumerate(nodes):
        for value, kind in zip(node.inputs[1:3], ("key", "value"), strict=True):
            producer = value.producer()
            if producer is None or producer.op_type != "Concat" or value.name != f"present.{index}.{kind}":
                raise UnsupportedModelError(
                    f"{name} changes the {kind}s of layer {index} between cache and attention, which the export does "
                    "not support; graft an ONNX decoder made by another exporter."
                )
        expected = _stated_window(config, index)
        found = node.attributes["window"].as_int()
        if expected is not None and found != expected:
            raise UnsupportedModelError(
                f"{name} states a window of {expected} tokens for layer {index} but calls attention with {found}, so "
                "its mask is uncertain; graft an ONNX decoder made by another exporter."
            )


def _stated_window(config: Any, layer: int) -> int | None:
    """0: no window. None: no layer types configured."""
    types = getattr(config, "layer_types", None)
    if not types:
        return None
    return int(config.sliding_window) if types[layer] == "sliding_attention" else 0


def mark_attention(
    query: torch.Tensor,  # [batch, heads, sequence, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, sequence, head_dim]
    value: torch.Tensor,  # [batch, kv_heads, sequence, value_dim]
    *,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    visible: Visible | None = None,
    sink: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """A marker; returns [batch, sequence, heads, value_dim].

    sink: [heads], scores that take part in the softmax only.
    slopes: [heads], ALiBi: score += slope * (key position - query position).
    """
    seen = visible or Visible()
    attributes: dict[str, Any] = {
        "scale": float(scale),
        "softcap": float(softcap),
        "window": seen.window,
        "chunk": seen.chunk,
        "layer": layer,
    }
    inputs = [query, key, value, None if sink is None else sink.to(query.dtype), slopes]
    while inputs[-1] is None:
        inputs.pop()
    batch, heads, sequence, _ = query.shape
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{MARKER_OP}",
        inputs,
        attributes,
        dtype=query.dtype,
        shape=(batch, sequence, heads, value.shape[-1]),
        version=1,
    )
