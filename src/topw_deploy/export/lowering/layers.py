"""The attention layers of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.export.graph.values import fixed_size
from topw_deploy.export.lowering.states import dtype_name
from topw_deploy.export.trace.marker import marker_nodes
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State, key_value_states


@dataclass(frozen=True)
class AttentionLayer:
    """A marker and its values.

    query: [batch, heads, sequence, head_dim].
    new_key, new_value: [batch, kv_heads, sequence, head_dim or value_dim].
    softcap: 0 for none.
    window: visible tokens including the query; 0 for all.
    """

    index: int
    marker: ir.Node
    query: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    window: int

    @property
    def states(self) -> tuple[State, State]:
        """Keys and values of all tokens."""
        dtype = dtype_name(self.new_key)
        return key_value_states(self.index, dtype, self.kv_heads, self.head_dim, self.value_dim)

    @property
    def output(self) -> ir.Value:
        """[batch, sequence, heads, value_dim]."""
        return self.marker.outputs[0]


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    layers = []
    for marker in marker_nodes(decoder.model.graph):
        query, key, value = marker.inputs
        layers.append(
            AttentionLayer(
                index=marker.attributes["layer"].as_int(),
                marker=marker,
                query=query,
                new_key=key,
                new_value=value,
                heads=fixed_size(query, 1),
                kv_heads=fixed_size(key, 1),
                head_dim=fixed_size(key, 3),
                value_dim=fixed_size(value, 3),
                scale=marker.attributes["scale"].as_float(),
                softcap=marker.attributes["softcap"].as_float(),
                window=marker.attributes["window"].as_int(),
            )
        )
    return layers
