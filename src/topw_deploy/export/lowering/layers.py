"""The attention layers of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from topw_deploy.export.graph.editor import element_type, fixed_size
from topw_deploy.export.trace.marker import marker_nodes
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State, key_value_states

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class AttentionLayer:
    """An attention marker and its values.

    query: [batch, heads, sequence, head_dim].
    new_key, new_value: [batch, kv_heads, sequence, head_dim or value_dim].
    latent: whether values are the first value_dim columns of the keys; then new_value is new_key.
    softcap: 0 for none.
    window: visible tokens including the query; 0 for all.
    source: an earlier layer with the same keys and values, whose states this layer reads. None: it has its own.
    shared_by: later layers that read its states.
    chunk: tokens see their own chunk of this size only; 0 for no chunks.
    kept: number of tokens in a state that holds only the window; 0 if it holds the whole sequence.
    stride: of layers with two keys per token, of `head_dim` together (`trace.marker.mark_attention`); 0 for others.
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
    chunk: int
    latent: bool
    stride: int = 0
    source: int | None = None
    shared_by: tuple[int, ...] = ()
    kept: int = 0

    @property
    def owner(self) -> int:
        """The layer whose states it reads."""
        return self.index if self.source is None else self.source

    @property
    def dtype(self) -> ir.DataType:
        """The type in which it computes."""
        return element_type(self.query)

    @property
    def sink(self) -> ir.Value | None:
        """Additional scores [heads] in the softmax, which select no value."""
        return _input(self.marker, 3)

    @property
    def slopes(self) -> ir.Value | None:
        """ALiBi's slopes [heads]; bfloat16 for Falcon's rounding."""
        return _input(self.marker, 4)

    @property
    def relative(self) -> ir.Value | None:
        """Biases of a query by distance [batch, heads, sequence, extent], the last one of all larger distances."""
        return _input(self.marker, 5)

    @property
    def states(self) -> tuple[State, ...]:
        """Keys and values of all tokens, in one state if latent."""
        dtype = element_type(self.new_key).name.lower()
        if self.latent:
            return (
                State(
                    layer=self.index,
                    kind="latent",
                    past=f"past_key_values.{self.index}.latent",
                    present=f"present.{self.index}.latent",
                    dtype=dtype,
                    shape=(self.kv_heads, 0, self.head_dim),
                    shared_by=self.shared_by,
                ),
            )
        sizes = self.kv_heads, self.head_dim, self.value_dim
        return key_value_states(self.index, dtype, *sizes, window=self.kept, shared_by=self.shared_by)

    @property
    def news(self) -> tuple[ir.Value, ...]:
        """The part that this call adds to each state."""
        return (self.new_key,) if self.latent else (self.new_key, self.new_value)

    @property
    def output(self) -> ir.Value:
        """[batch, sequence, heads, value_dim]."""
        return self.marker.outputs[0]


def _input(marker: ir.Node, place: int) -> ir.Value | None:
    return marker.inputs[place] if place < len(marker.inputs) else None


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    layers = []
    for marker in marker_nodes(decoder.model.graph):
        query, key = marker.inputs[:2]
        value = _input(marker, 2)
        latent = marker.attributes["latent"].as_int()
        layers.append(
            AttentionLayer(
                index=marker.attributes["layer"].as_int(),
                marker=marker,
                query=query,
                new_key=key,
                new_value=key if latent else value,
                heads=fixed_size(query, 1),
                kv_heads=fixed_size(key, 1),
                head_dim=fixed_size(key, 3),
                value_dim=latent or fixed_size(value, 3),
                scale=marker.attributes["scale"].as_float(),
                softcap=marker.attributes["softcap"].as_float(),
                window=marker.attributes["window"].as_int(),
                chunk=marker.attributes["chunk"].as_int(),
                latent=latent > 0,
                stride=marker.attributes["stride"].as_int(),
            )
        )
    return _with_sources(layers)


def _with_sources(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    owners: dict[tuple[ir.Value, ir.Value], int] = {}
    readers: dict[int, list[int]] = {}
    sources: dict[int, int] = {}
    for layer in layers:
        owner = owners.setdefault((layer.new_key, layer.new_value), layer.index)
        if owner != layer.index:
            sources[layer.index] = owner
            readers.setdefault(owner, []).append(layer.index)
    return [
        replace(layer, source=sources.get(layer.index), shared_by=tuple(readers.get(layer.index, ())))
        for layer in layers
    ]
