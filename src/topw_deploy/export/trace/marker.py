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
_SEE_LATER_TOKENS = {"cpmant"}  # model types whose own masks show a prompt's tokens all of the prompt


def marker_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The markers in layer order."""
    nodes = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == MARKER_OP]
    return sorted(nodes, key=lambda node: node.attributes["layer"].as_int())


# Model type -> why no graph over tokens computes it.
_REFUSED = {
    "blt": "runs its middle layers once for each patch of bytes, and where a patch starts depends on entropies that a "
    "second model predicts",
}


def check_layer_types(model: PreTrainedModel, config: Any) -> None:
    """Raises UnsupportedModelError for layers that markers cannot represent."""
    reason = _REFUSED.get(model.config.model_type)
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}, which the export does not support; choose a model of tokens."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal decoder; choose a decoder-only language model."
        )
    if getattr(config, "model_type", "") in _SEE_LATER_TOKENS:
        raise UnsupportedModelError(
            f"{type(model).__name__} lets a prompt's tokens attend to later ones, so its logits depend on how a prompt "
            "is divided into calls; choose a causal decoder."
        )


def check_markers(model: PreTrainedModel, config: Any, graph: ir.Graph) -> None:
    """Raises UnsupportedModelError if the graph has no marker, or several attention markers for one layer."""
    nodes = marker_nodes(graph)
    name = type(model).__name__
    layers = [node.attributes["layer"].as_int() for node in nodes]
    if len(set(layers)) != len(layers) or not any(node.domain == MARKER_DOMAIN for node in graph):
        raise UnsupportedModelError(
            f"{name} shows {len(nodes)} attention calls for {config.num_hidden_layers} layers through transformers' "
            "attention interface, but one per attention layer is needed; graft an ONNX decoder made by another "
            "exporter."
        )


def mark_attention(
    query: torch.Tensor,  # [batch, heads, sequence, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, sequence, head_dim]
    value: torch.Tensor | None,  # [batch, kv_heads, sequence, value_dim]
    *,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    visible: Visible | None = None,
    sink: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    relative: torch.Tensor | None = None,
    latent: int = 0,
    stride: int = 0,
) -> torch.Tensor:
    """Mark attention. Returns [batch, sequence, heads, value_dim].

    value: None with `latent`, where the values are the first `latent` columns of the keys.
    sink: [heads], additional scores in the softmax, which select no value.
    slopes: [heads], ALiBi: score += slope * (key position - query position). Slopes in bfloat16 follow Falcon: score +=
        scale * slope * key position, with positions and products rounded to bfloat16.
    relative: [batch, heads, sequence, extent], what each query adds to the scores of keys at each distance, that is its
        position minus theirs; the last column holds for all greater distances.
    stride: with `latent`, if above 0: each key is two, of `latent` columns. The first is the token's. The second stands
        for the tokens up to it, and is seen by its own and all later queries where the token's position + 1 is a
        multiple of `stride`. Their values are the keys themselves.
    """
    seen = visible or Visible()
    attributes: dict[str, Any] = {
        "scale": float(scale),
        "softcap": float(softcap),
        "window": seen.window,
        "chunk": seen.chunk,
        "latent": latent,
        "stride": stride,
        "layer": layer,
    }
    inputs = [query, key, value, None if sink is None else sink.to(query.dtype), slopes, relative]
    while inputs[-1] is None:
        inputs.pop()
    batch, heads, sequence, _ = query.shape
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{MARKER_OP}",
        inputs,
        attributes,
        dtype=query.dtype,
        shape=(batch, sequence, heads, latent if value is None else value.shape[-1]),
        version=1,
    )
