"""The plain lowering: marker nodes become standard ONNX attention over a cache that is concatenated.

The mask is built in the graph from `attention_mask`, once per kind of window. Slots say what is past and what is
future; positions (the running count of attended tokens) say how far apart two tokens are. So padding may stand on
the left, on the right or between two chunks, and a row's result never depends on it. A query always sees its own
slot, hence no softmax ever runs over nothing, whatever the padding holds.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.editor import GraphEditor, find_input
from topw_deploy.export.trace import MARKER_DOMAIN, TracedDecoder, marker_nodes

PREFIX = "topw.attention"


def lower(decoder: TracedDecoder) -> None:
    """Replace every marker of `decoder.model` in place; adds the graph input `attention_mask` [batch, past + new]."""
    graph = decoder.model.graph
    editor = GraphEditor(graph, PREFIX)
    attention_mask = ir.Value(
        name="attention_mask",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["batch_size", "total_sequence_length"]),
    )
    graph.inputs.insert(1, attention_mask)
    masks = _Masks(editor, graph, attention_mask)
    for node, kv_heads in zip(marker_nodes(graph), decoder.num_kv_heads, strict=True):
        attention = _capped_attention if node.attributes["softcap"].as_float() else _attention
        output = attention(editor, node, masks.of(node.attributes["window"].as_int()), kv_heads)
        # [batch, heads, sequence, dim] -> [batch, sequence, heads, dim], what the marker stood for
        output = editor.op("Transpose", [output], perm=[0, 2, 1, 3], dtype=node.outputs[0].dtype)
        output.shape = node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], output)
        graph.remove(node, safe=True)
    decoder.model.opset_imports.pop(MARKER_DOMAIN, None)
    editor.finish()
    for value in graph.outputs:
        if value.name and value.name.startswith("present."):
            value.shape = ir.Shape(["batch_size", value.shape[1], "total_sequence_length", value.shape[3]])


class _Masks:
    """The boolean masks [batch, 1, sequence, past + sequence], one per window, True where attention is allowed."""

    def __init__(self, editor: GraphEditor, graph: ir.Graph, attention_mask: ir.Value) -> None:
        self._editor = editor
        self._attention_mask = attention_mask
        self._by_window: dict[int, ir.Value] = {}
        ids = find_input(graph, "input_ids")
        assert ids is not None
        op, constant = editor.op, editor.constant
        total = op("Squeeze", [op("Shape", [attention_mask], start=1, end=2)])
        new = op("Squeeze", [op("Shape", [ids], start=1, end=2)])
        self._past = op("Sub", [total, new])
        zero, one = constant(np.int64(0)), constant(np.int64(1))
        slots = op("Range", [zero, total, one])  # [past + sequence]
        own_slots = op("Unsqueeze", [op("Range", [self._past, total, one]), constant(np.array([1]))])  # [sequence, 1]
        attended = op("Cast", [attention_mask], to=ir.DataType.BOOL)
        attended = op("Unsqueeze", [attended, constant(np.array([1, 2]))])  # [batch, 1, 1, past + sequence]
        self._visible = op("And", [op("LessOrEqual", [slots, own_slots]), attended])
        self._own = op("Equal", [slots, own_slots])

    def of(self, window: int) -> ir.Value:
        """The mask of layers with this sliding window; 0 means none."""
        if window not in self._by_window:
            visible = self._visible if window == 0 else self._within(window)
            self._by_window[window] = self._editor.op("Or", [visible, self._own], dtype=ir.DataType.BOOL)
        return self._by_window[window]

    def _within(self, window: int) -> ir.Value:
        """`visible`, but only keys fewer than `window` real tokens before the query."""
        op, constant = self._editor.op, self._editor.constant
        positions = op("CumSum", [self._attention_mask, constant(np.int64(1))])  # [batch, past + sequence]
        start = op("Unsqueeze", [self._past, constant(np.array([0]))])
        far = constant(np.array([np.iinfo(np.int64).max]))
        own = op("Slice", [positions, start, far, constant(np.array([1]))])  # [batch, sequence]
        keys = op("Unsqueeze", [positions, constant(np.array([1, 2]))])
        queries = op("Unsqueeze", [own, constant(np.array([1, 3]))])
        near = op("Less", [op("Sub", [queries, keys]), constant(np.int64(window))])
        return op("And", [self._visible, near])


def _attention(editor: GraphEditor, marker: ir.Node, mask: ir.Value, _kv_heads: int) -> ir.Value:
    """The operator of opset 23, with one output only: NVIDIA's parser takes no other form."""
    query, key, value = marker.inputs
    scale = marker.attributes["scale"].as_float()
    return editor.op("Attention", [query, key, value, mask], scale=scale, dtype=marker.outputs[0].dtype)


def _capped_attention(editor: GraphEditor, marker: ir.Node, mask: ir.Value, kv_heads: int) -> ir.Value:
    """Attention with capped scores, cap * tanh(score / cap), spelled out.

    The operator has an attribute for the cap, but its text put the cap after the mask first and before it later, and
    runtimes followed either. After the mask it would let every query see the future.
    """
    op, constant = editor.op, editor.constant
    query, key, value = marker.inputs  # query [batch, heads, sequence, dim]
    number = _scalars(query.dtype)
    scale, cap = marker.attributes["scale"].as_float(), marker.attributes["softcap"].as_float()
    shape = op("Shape", [query])
    # The query heads that share a key head become more rows of it, so keys and values are never repeated.
    grouped = op("Reshape", [query, constant(np.array([0, kv_heads, -1, query.shape[3]]))])
    keys = op("Transpose", [key], perm=[0, 1, 3, 2])
    scores = op("MatMul", [op("Mul", [grouped, constant(number(scale / cap))]), keys])
    scores = op("Mul", [op("Tanh", [scores]), constant(number(cap))])
    heads_first = op(
        "Concat",
        [op("Slice", [shape, constant(np.array([0])), constant(np.array([3]))]), constant(np.array([-1]))],
        axis=0,
    )
    scores = op("Reshape", [scores, heads_first])  # [batch, heads, sequence, past + sequence]
    lowest = constant(number(np.finfo(number).min))
    weights = op("Softmax", [op("Where", [mask, scores, lowest])], axis=-1)
    rows = op("Shape", [grouped])
    weights = op(
        "Reshape",
        [
            weights,
            op(
                "Concat",
                [op("Slice", [rows, constant(np.array([0])), constant(np.array([3]))]), constant(np.array([-1]))],
                axis=0,
            ),
        ],
    )
    output = op("MatMul", [weights, value])  # [batch, kv_heads, group * sequence, dim]
    return op("Reshape", [output, heads_first], dtype=marker.outputs[0].dtype)


def _scalars(dtype: ir.DataType) -> type:
    """The NumPy scalar type of `dtype`."""
    return dtype.numpy().type
