"""The attention layers of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from topw_deploy.export.graph.editor import element_type, fixed_size
from topw_deploy.export.trace.markers import attention_markers
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State, key_value_states

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class AttentionLayer:
    """An attention marker with its inputs and attributes (see `trace.markers.mark_attention`).

    index: number of the layer.
    query: [batch, heads, sequence, head_dim].
    new_key, new_value: this call's keys and values, [batch, kv_heads, sequence, head_dim or value_dim].
    softcap: the largest absolute score; 0 for no cap.
    window: number of visible tokens, including the query; 0 for all.
    chunk: tokens see only their own chunk of this many tokens; 0 for no chunks.
    latent: whether values are the first value_dim columns of the keys; then new_value is new_key.
    stride: above 0 for layers with two keys per token, which together have head_dim columns; else 0.
    source: the earlier layer with the same keys and values, whose states this layer reads; None if it has its own.
    shared_by: the later layers that read this layer's states.
    state_window: number of tokens in states that hold only the window; 0 if they hold the whole sequence.
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
    state_window: int = 0

    @property
    def owner(self) -> int:
        """The layer whose states this layer reads: `source`, or itself."""
        return self.index if self.source is None else self.source

    @property
    def dtype(self) -> ir.DataType:
        """The type in which the layer computes."""
        return element_type(self.query)

    @property
    def sink(self) -> ir.Value | None:
        """Scores [heads] that take part in the softmax but have no value; None for none."""
        return _optional_input(self.marker, 3)

    @property
    def slopes(self) -> ir.Value | None:
        """ALiBi's slopes [heads], in bfloat16 for Falcon's rounding; None for none."""
        return _optional_input(self.marker, 4)

    @property
    def relative(self) -> ir.Value | None:
        """Each query's biases by distance, [batch, heads, sequence, extent]; None for none.

        The last bias holds for all larger distances too.
        """
        return _optional_input(self.marker, 5)

    @property
    def states(self) -> tuple[State, ...]:
        """The layer's states: one of keys and one of values, or a single latent one."""
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
        return key_value_states(self.index, dtype, *sizes, window=self.state_window, shared_by=self.shared_by)

    @property
    def new_parts(self) -> tuple[ir.Value, ...]:
        """What this call adds to each of `states`, [batch, kv_heads, sequence, dim]."""
        return (self.new_key,) if self.latent else (self.new_key, self.new_value)

    @property
    def output(self) -> ir.Value:
        """The marker's output, [batch, sequence, heads, value_dim]."""
        return self.marker.outputs[0]


def _optional_input(marker: ir.Node, place: int) -> ir.Value | None:
    return marker.inputs[place] if place < len(marker.inputs) else None


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    """The attention layers of `decoder`, in layer order."""
    layers = []
    for marker in attention_markers(decoder.model.graph):
        query, key = marker.inputs[:2]
        value = _optional_input(marker, 2)
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
    return _link_shared_states(layers)


def _link_shared_states(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Copies of `layers` with `source` and `shared_by`: layers with the same keys and values share states."""
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
