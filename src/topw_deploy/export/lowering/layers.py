"""The attention layers of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.export.graph.values import fixed_size
from topw_deploy.export.trace.marker import marker_nodes
from topw_deploy.export.trace.trace import TracedDecoder


@dataclass(frozen=True)
class AttentionLayer:
    """A marker and its values.

    query: [batch, heads, sequence, head_dim].
    new_key, new_value: [batch, kv_heads, sequence, head_dim or value_dim].
    past_key, past_value: graph inputs.
    softcap: 0 for none.
    window: visible tokens including the query; 0 for all.
    chunk: tokens see their own chunk of this size only; 0 for no chunks.
    """

    index: int
    marker: ir.Node
    query: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    window: int
    chunk: int

    @property
    def sink(self) -> ir.Value | None:
        """Scores [heads] that take part in the softmax only."""
        return _input(self.marker, 3)

    @property
    def slopes(self) -> ir.Value | None:
        """ALiBi's slopes [heads]; bfloat16 for Falcon's rounding."""
        return _input(self.marker, 4)

    @property
    def output(self) -> ir.Value:
        """[batch, sequence, heads, value_dim]."""
        return self.marker.outputs[0]


def _input(marker: ir.Node, place: int) -> ir.Value | None:
    return marker.inputs[place] if place < len(marker.inputs) else None


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    layers = []
    for index, marker in enumerate(marker_nodes(decoder.model.graph)):
        query, keys, values = marker.inputs[:3]
        # Checked by `trace`.
        past_key, new_key = keys.producer().inputs
        past_value, new_value = values.producer().inputs
        layers.append(
            AttentionLayer(
                index=index,
                marker=marker,
                query=query,
                new_key=new_key,
                new_value=new_value,
                past_key=past_key,
                past_value=past_value,
                heads=fixed_size(query, 1),
                kv_heads=decoder.num_kv_heads[index],
                head_dim=decoder.head_dim[index],
                value_dim=fixed_size(past_value, 3),
                scale=marker.attributes["scale"].as_float(),
                softcap=marker.attributes["softcap"].as_float(),
                window=marker.attributes["window"].as_int(),
                chunk=marker.attributes["chunk"].as_int(),
            )
        )
    return layers
