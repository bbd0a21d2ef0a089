"""Replace the markers of mixtures of experts (`trace.experts`), by one of two forms.

`experts_operator` has onnxruntime's MoE, which multiplies each token with its own experts. This module has blocks of
standard operators without control flow, for other runtimes and for what MoE lacks.

A row is a token with one of its experts. Rows are grouped by expert into blocks of equal height, and each block is
multiplied with a copy of its expert's matrices. For R rows and E experts, a block has h = ceil(R / E) rows. All blocks
of an expert but the last are full, so min(R, R // h + min(R, E)) blocks suffice: one per row in a short step, at most
2 E in a long prompt. So the copies take at most twice the memory of one layer's experts, and the products compute at
most about twice the routed rows.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph.editor import ROUTER_PROPERTY, GraphEditor, fixed_size, required_node_input
from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.lowering import experts_operator
from topw_deploy.export.lowering.experts_operator import stored_stack, stored_value
from topw_deploy.export.trace.experts import EXPERTS_OP, PRODUCT_OP
from topw_deploy.export.trace.markers import MARKER_DOMAIN

_PREFIX = "topw.experts"


def lower_experts(model: ir.Model, *, operator: bool, quantised: bool = False) -> int:
    """Replace every marker of experts in `model` in place. Returns the number of markers.

    operator: use onnxruntime's MoE where it can replace the marker.
    quantised: the matrices will be quantised, for which MoE supports half precision.
    """
    markers = [
        node for node in model.graph if node.domain == MARKER_DOMAIN and node.op_type in (EXPERTS_OP, PRODUCT_OP)
    ]
    if not markers:
        return 0
    lowering = _Lowering(model, operator=operator, quantised=quantised)
    for marker in markers:
        _mark_router(marker)
        lowering.replace(marker)
    RemoveUnusedNodesPass()(model)
    lowering.editor.finish()
    return len(markers)


class _Lowering:
    def __init__(self, model: ir.Model, *, operator: bool, quantised: bool) -> None:
        self.editor = GraphEditor(model.graph, _PREFIX)
        self._model, self._operator, self._quantised = model, operator, quantised
        self._blocks: dict[int, ExpertBlocks] = {}

    def replace(self, marker: ir.Node) -> None:
        old = marker.outputs[0]
        made = self._product(marker) if marker.op_type == PRODUCT_OP else self._experts(marker)
        made.type, made.shape = old.type, old.shape
        self.editor.replace(marker, made)

    def _experts(self, marker: ir.Node) -> ir.Value:
        matrices = marker.inputs[3:5]
        stacks = [stored_stack(value) for value in matrices]
        reason = experts_operator.refusal(marker, stacks, quantised=self._quantised)
        if self._operator and reason is None:
            self._model.opset_imports[experts_operator.DOMAIN] = 1
            return experts_operator.add_moe(self.editor, marker, [stack for stack in stacks if stack is not None])
        flat = self.editor.op("Reshape", [marker.inputs[1], self.editor.constant([-1])])
        blocks = self._blocks_of(marker.inputs[1], flat, fixed_size(required_node_input(matrices[0]), 0))
        weights = [self._experts_first(*pair) for pair in zip(matrices, stacks, strict=True)]
        return _experts_in_blocks(self.editor, marker, blocks, weights)

    def _product(self, marker: ir.Node) -> ir.Value:
        rows, ids, weight, bias = [*marker.inputs, None][:4]
        blocks = self._blocks_of(ids, ids, fixed_size(required_node_input(weight), 0))
        matrices = self._experts_first(weight, stored_stack(weight))
        products = blocks.product(blocks.columns(required_node_input(rows)), matrices, bias)
        return blocks.rows(products, fixed_size(required_node_input(weight), 1))

    def _blocks_of(self, key: ir.Value | None, ids: ir.Value | None, experts: int) -> ExpertBlocks:
        """The blocks of `ids`. Markers with the same `key` share them.

        experts: number of experts.
        """
        if id(key) not in self._blocks:
            self._blocks[id(key)] = ExpertBlocks(self.editor, required_node_input(ids), experts)
        return self._blocks[id(key)]

    def _experts_first(self, value: ir.Value | None, stack: LazyWeight | None) -> ir.Value:
        """The weight [E, N, K], stored in this order if `stack` is given, so that no call rearranges it."""
        return (
            required_node_input(value)
            if stack is None
            else stored_value(self.editor, required_node_input(value), stack)
        )


def _mark_router(marker: ir.Node) -> None:
    """Mark the products that compute a marker's ids and weights, so that quantisation leaves them.

    Rounding their weights would change which experts are chosen.
    """
    pending = list(marker.inputs[1 : 2 if marker.op_type == PRODUCT_OP else 3])
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type in ("MatMul", "Gemm"):
            node.metadata_props[ROUTER_PROPERTY] = "yes"
        elif node.domain == "":
            pending += node.inputs


class ExpertBlocks:
    """The rows of one marker, grouped into blocks by expert.

    ids: each row's expert, int64 [R].
    experts: number of experts, E.
    count: number of blocks, B; int64 [1].
    height: number of rows in a block, H; int64 [1].
    """

    def __init__(self, editor: GraphEditor, ids: ir.Value, experts: int) -> None:
        self._editor, self.experts = editor, experts
        op, constant = editor.op, editor.constant
        rows = op("Shape", [ids])
        self.height = op("Div", [op("Add", [rows, constant(np.array([experts - 1]))]), constant(np.array([experts]))])
        most_experts = op("Min", [rows, constant(np.array([experts]))])  # experts that can have rows
        self.count = op("Min", [rows, op("Add", [op("Div", [rows, self.height]), most_experts])])
        self._slot_of_row, self._expert_of_block = self._assign_slots(ids, rows)
        self._row_of_slot = self._invert_slots(rows)

    def _assign_slots(self, ids: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The slot of each row in the blocks, int64 [R], and the expert of each block, int64 [B].

        Sums are in float32, as TensorRT needs, and exact up to 2**24 rows.
        """
        op, constant = self._editor.op, self._editor.constant
        axis, last = constant(np.array([0])), constant(np.array([1]))
        of_expert = op("Equal", [op("Unsqueeze", [ids, last]), constant(np.arange(self.experts))])
        chosen = op("Cast", [of_expert], to=ir.DataType.FLOAT)  # [R, E]
        earlier = op("Mul", [op("CumSum", [chosen, constant(np.int64(0))], exclusive=1), chosen])
        place = op("ReduceSum", [earlier, last], keepdims=0)  # [R], of a row among its expert's rows
        height = op("Cast", [self.height], to=ir.DataType.FLOAT)
        filled = op("ReduceSum", [chosen, axis], keepdims=0)  # [E]
        blocks = op("Ceil", [op("Div", [filled, height])])
        ends = op("CumSum", [blocks, constant(np.int64(0))])  # [E]
        starts = op("ReduceSum", [op("Mul", [chosen, op("Sub", [ends, blocks])]), last], keepdims=0)  # [R]
        slots = op("Cast", [op("Add", [op("Mul", [starts, height]), place])], to=ir.DataType.INT64)
        numbers = op("Range", [constant(np.int64(0)), op("Squeeze", [self.count]), constant(np.int64(1))])
        begun = op(
            "GreaterOrEqual", [op("Unsqueeze", [op("Cast", [numbers], to=ir.DataType.FLOAT), last]), ends]
        )  # [B, E]
        before = op("ReduceSum", [op("Cast", [begun], to=ir.DataType.FLOAT), last], keepdims=0)
        inside = op("Min", [before, constant(np.float32(self.experts - 1))])  # for unused blocks at the end
        return slots, op("Cast", [inside], to=ir.DataType.INT64)

    def _invert_slots(self, rows: ir.Value) -> ir.Value:
        """The row of each slot, int64 [B * H]. Unused slots have row 0; no row reads their results."""
        op, constant = self._editor.op, self._editor.constant
        empty = op("Expand", [constant(np.array([0])), op("Mul", [self.count, self.height])])
        numbers = op("Range", [constant(np.int64(0)), op("Squeeze", [rows]), constant(np.int64(1))])
        return op("ScatterElements", [empty, self._slot_of_row, numbers], axis=0)

    def columns(self, source: ir.Value, repeated: int = 1) -> ir.Value:
        """The rows of `source` as the columns of the blocks, [B, K, H].

        source: [R / repeated, K].
        repeated: number of experts of each row of `source`.
        """
        op, constant = self._editor.op, self._editor.constant
        index = self._row_of_slot
        if repeated > 1:
            index = op("Div", [index, constant(np.array([repeated]))])
        width = constant(np.array([fixed_size(source, 1)]))
        shape = op("Concat", [self.count, self.height, width], axis=0)
        blocks = op("Reshape", [op("Gather", [source, index], axis=0, dtype=source.dtype), shape])
        return op("Transpose", [blocks], perm=[0, 2, 1], dtype=source.dtype)

    def product(self, columns: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Multiply each block with its expert's matrix, and add its bias. Returns [B, N, H].

        columns: [B, K, H].
        weight: [E, N, K].
        bias: [E, N] or None.
        """
        op = self._editor.op
        copies = op("Gather", [weight, self._expert_of_block], axis=0, dtype=columns.dtype)  # [B, N, K]
        products = op("MatMul", [copies, columns], dtype=columns.dtype)
        if bias is None:
            return products
        terms = op("Gather", [bias, self._expert_of_block], axis=0)
        terms = op("Unsqueeze", [terms, self._editor.constant(np.array([2]))])
        return op("Add", [products, terms], dtype=columns.dtype)

    def rows(self, columns: ir.Value, width: int) -> ir.Value:
        """The columns of the blocks [B, width, H] as rows [R, width], in the order of `ids`."""
        op, constant = self._editor.op, self._editor.constant
        flat = op("Reshape", [op("Transpose", [columns], perm=[0, 2, 1]), constant(np.array([-1, width]))])
        return op("Gather", [flat, self._slot_of_row], axis=0, dtype=columns.dtype, shape=["rows", width])


def _experts_in_blocks(
    editor: GraphEditor, marker: ir.Node, blocks: ExpertBlocks, matrices: list[ir.Value]
) -> ir.Value:
    """Compute an `Experts` marker in `blocks`. Returns [tokens, D].

    matrices: up (and gate) [E, N, D] and down [E, D, I].
    """
    op, constant = editor.op, editor.constant
    hidden, ids, weights = marker.inputs[:3]
    biases = [*marker.inputs[5:], None, None][:2]
    count, width = fixed_size(ids, 1), fixed_size(hidden, 1)
    up = blocks.product(blocks.columns(hidden, count), matrices[0], biases[0])
    down = blocks.product(_activate(editor, up, marker), matrices[1], biases[1])
    split = constant(np.array([-1, count, width]))
    outputs = op("Reshape", [blocks.rows(down, width), split])  # [tokens, k, D]
    weighted = op("Mul", [outputs, op("Unsqueeze", [weights, constant(np.array([2]))])])
    return op("ReduceSum", [weighted, constant(np.array([1]))], keepdims=0)


def _activate(editor: GraphEditor, up: ir.Value, marker: ir.Node) -> ir.Value:
    """Apply the marker's activation to `up` [B, N, H]. Returns [B, I, H]."""
    op = editor.op
    name = marker.attributes["activation"].as_string()
    if name == "identity":
        return up
    if name in ("relu", "gelu"):
        extra = {"approximate": "tanh"} if name == "gelu" else {}
        return op(name.capitalize(), [up], dtype=up.dtype, **extra)
    if name == "silu":
        return op("Mul", [up, op("Sigmoid", [up])], dtype=up.dtype)
    alpha, beta, limit = (marker.attributes[key].as_float() for key in ("alpha", "beta", "limit"))
    gate, linear = _split_gate_and_up(editor, up, interleaved=bool(marker.attributes["interleaved"].as_int()))
    kind = up.dtype.numpy() if up.dtype is not None else np.float32

    def number(value: float) -> ir.Value:
        return editor.constant(np.array(value, kind))

    if limit:
        gate = op("Min", [gate, number(limit)])
        linear = op("Clip", [linear, number(-limit), number(limit)])
    scaled = gate if math.isclose(alpha, 1.0) else op("Mul", [gate, number(alpha)])
    linear = op("Add", [linear, number(beta)]) if beta else linear
    return op("Mul", [op("Mul", [gate, op("Sigmoid", [scaled])]), linear], dtype=up.dtype)


def _split_gate_and_up(editor: GraphEditor, up: ir.Value, *, interleaved: bool) -> tuple[ir.Value, ir.Value]:
    """[B, 2 I, H] -> two of [B, I, H]. interleaved: rows are [gate 0, up 0, gate 1, ...], else [gates; ups]."""
    if not interleaved:
        gate, linear = editor.outputs("Split", [up], 2, axis=1, num_outputs=2)
        return gate, linear
    ends = [editor.constant(np.array([number])) for number in (np.iinfo(np.int64).max, 1, 2)]
    first, second = (
        editor.op("Slice", [up, editor.constant(np.array([start])), *ends], dtype=up.dtype) for start in (0, 1)
    )
    return first, second
