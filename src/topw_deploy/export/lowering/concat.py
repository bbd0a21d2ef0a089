"""Lower placeholders to standard attention over a concatenated cache.

Causal masks compare cache slots, and windows compare positions (running sums of `attention_mask`). So padding may be on
the left, on the right or between chunks. Every query sees its own slot, so no row of a softmax is empty.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor, required_input
from topw_deploy.export.lowering.attention import Masks, Positions, States, attend, attention_layers, tensorrt_fuses
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.trace.placeholders import PLACEHOLDER_DOMAIN
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

PREFIX = "topw.attention"


def lower(decoder: TracedDecoder, *, tensorrt: bool = False) -> list[State]:
    """Replace every placeholder of `decoder` in place. Returns the states.

    Adds the input `attention_mask`, int64 [batch, past + sequence].
    tensorrt: use standard operators only, and decompose attention that TensorRT cannot build as one operator.
    """
    graph = decoder.model.graph
    editor = GraphEditor(graph, PREFIX)
    attention_mask = ir.Value(
        name="attention_mask",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["batch_size", "total_sequence_length"]),
    )
    graph.inputs.insert(1, attention_mask)
    masks = _masks(editor, attention_mask)
    states = States(editor, "past_sequence_length", "total_sequence_length")
    presents: dict[int, list[ir.Value]] = {}
    for layer in attention_layers(decoder):
        if layer.source is None:
            presents[layer.index] = [
                states.present(state, editor.op("Concat", [states.past(state), part], axis=2))
                for state, part in zip(layer.states, layer.new_parts, strict=True)
            ]
        decomposed = tensorrt and not tensorrt_fuses(layer)
        attend(editor, layer, presents[layer.owner], masks.of(layer), decomposed=decomposed)
    if has_mixers(decoder):
        padding = Padding.of_attention_mask(editor, attention_mask)
        lower_mixers(editor, decoder, states, padding, contrib=not tensorrt)
    decoder.model.opset_imports.pop(PLACEHOLDER_DOMAIN, None)
    editor.finish()
    return states.declared


def _masks(editor: GraphEditor, attention_mask: ir.Value) -> Masks:
    """Masks over all slots, [batch, 1, sequence, past + sequence]."""
    op = editor.op
    ids = required_input(editor.graph, "input_ids")
    total = op("Squeeze", [op("Shape", [attention_mask], start=1, end=2)])
    new = op("Squeeze", [op("Shape", [ids], start=1, end=2)])
    past = op("Sub", [total, new])
    slots = op("Range", [0, total, 1])  # [past + sequence]
    own_slots = op("Unsqueeze", [op("Range", [past, total, 1]), [1]])  # [sequence, 1]
    attended = op("Cast", [attention_mask], to=ir.DataType.BOOL)
    attended = op("Unsqueeze", [attended, [1, 2]])  # [batch, 1, 1, past + sequence]
    visible = op("And", [op("LessOrEqual", [slots, own_slots]), attended])
    own = op("Equal", [slots, own_slots])

    def add_positions() -> tuple[ir.Value, ir.Value]:
        """The positions of queries and keys: the number of attended tokens before each."""
        counts = op("CumSum", [attention_mask, 1])  # [batch, past + sequence]
        positions = op("Sub", [counts, 1])
        start = op("Unsqueeze", [past, [0]])
        queries = op("Slice", [positions, start, [np.iinfo(np.int64).max], [1]])  # [batch, sequence]
        keys = op("Unsqueeze", [positions, [1, 2]])
        return op("Unsqueeze", [queries, [1, 3]]), keys

    return Masks(editor, Positions(editor, add_positions), visible, own)
