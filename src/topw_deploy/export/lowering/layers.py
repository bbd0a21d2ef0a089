"""What a lowering has to know of each attention layer, read from its marker and the cache's Concat beside it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.export.trace.trace import TracedDecoder, marker_nodes


@dataclass(frozen=True)
class AttentionLayer:
    """One layer. query [batch, heads, sequence, head_dim]; new_key, new_value [batch, kv_heads, sequence, head_dim]:
    this call's tokens alone; past_*: graph inputs; output [batch, sequence, heads, head_dim]: the marker's.
    window: most tokens a query sees, itself included, 0 for all. softcap: 0 for none."""

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

    @property
    def output(self) -> ir.Value:
        return self.marker.outputs[0]


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    """The layers in order. The trace has checked that each marker's keys and values come from the cache's Concat."""
    layers = []
    for index, marker in enumerate(marker_nodes(decoder.model.graph)):
        query, keys, values = marker.inputs
        assert query is not None
        (past_key, new_key), (past_value, new_value) = _concatenated(keys), _concatenated(values)
        assert query.shape is not None
        assert past_value.shape is not None
        layers.append(
            AttentionLayer(
                index=index,
                marker=marker,
                query=query,
                new_key=new_key,
                new_value=new_value,
                past_key=past_key,
                past_value=past_value,
                heads=int(query.shape[1]),  # type: ignore[arg-type]
                kv_heads=decoder.num_kv_heads[index],
                head_dim=decoder.head_dim[index],
                value_dim=int(past_value.shape[3]),  # type: ignore[arg-type]
                scale=marker.attributes["scale"].as_float(),
                softcap=marker.attributes["softcap"].as_float(),
                window=marker.attributes["window"].as_int(),
            )
        )
    return layers


def _concatenated(value: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """Past and new part of what the cache's Concat makes."""
    assert value is not None
    concat = value.producer()
    assert concat is not None
    past, new = concat.inputs
    assert past is not None
    assert new is not None
    return past, new
