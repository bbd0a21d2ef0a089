"""Experts in standard operators, without control flow.

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

from topw_deploy.export.graph.editor import GraphEditor, fixed_size

_INT64, _FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


class ExpertBlocks:
    """The blocks of `ids` [R], int64 below `experts`.

    experts: number of experts, E.
    count: number of blocks B; height: rows of a block H; both int64 [1].
    """

    def __init__(self, editor: GraphEditor, ids: ir.Value, experts: int) -> None:
        self._editor, self.experts = editor, experts
        op, constant = editor.op, editor.constant
        rows = op("Shape", [ids])
        self.height = op("Div", [op("Add", [rows, constant(np.array([experts - 1]))]), constant(np.array([experts]))])
        hit = op("Min", [rows, constant(np.array([experts]))])
        self.count = op("Min", [rows, op("Add", [op("Div", [rows, self.height]), hit])])
        self._slots, self._of_block = self._places(ids, rows)
        self._row_of_slot = self._inverse(rows)

    def _places(self, ids: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The slot of each row [R], and the expert of each block [B].

        Sums are in float32, for TensorRT, and exact up to 2 ** 24 rows.
        """
        op, constant = self._editor.op, self._editor.constant
        axis, last = constant(np.array([0])), constant(np.array([1]))
        of_expert = op("Equal", [op("Unsqueeze", [ids, last]), constant(np.arange(self.experts))])
        chosen = op("Cast", [of_expert], to=_FLOAT)  # [R, E]
        earlier = op("Mul", [op("CumSum", [chosen, constant(np.int64(0))], exclusive=1), chosen])
        place = op("ReduceSum", [earlier, last], keepdims=0)  # [R], among its expert's rows
        height = op("Cast", [self.height], to=_FLOAT)
        filled = op("ReduceSum", [chosen, axis], keepdims=0)  # [E]
        blocks = op("Ceil", [op("Div", [filled, height])])
        ends = op("CumSum", [blocks, constant(np.int64(0))])  # [E]
        starts = op("ReduceSum", [op("Mul", [chosen, op("Sub", [ends, blocks])]), last], keepdims=0)  # [R]
        slots = op("Cast", [op("Add", [op("Mul", [starts, height]), place])], to=_INT64)
        numbers = op("Range", [constant(np.int64(0)), op("Squeeze", [self.count]), constant(np.int64(1))])
        begun = op("GreaterOrEqual", [op("Unsqueeze", [op("Cast", [numbers], to=_FLOAT), last]), ends])  # [B, E]
        before = op("ReduceSum", [op("Cast", [begun], to=_FLOAT), last], keepdims=0)
        inside = op("Min", [before, constant(np.float32(self.experts - 1))])  # for unused blocks at the end
        return slots, op("Cast", [inside], to=_INT64)

    def _inverse(self, rows: ir.Value) -> ir.Value:
        """The row of each slot [B * H]; row 0 in unused ones, which no row reads."""
        op, constant = self._editor.op, self._editor.constant
        empty = op("Expand", [constant(np.array([0])), op("Mul", [self.count, self.height])])
        numbers = op("Range", [constant(np.int64(0)), op("Squeeze", [rows]), constant(np.int64(1))])
        return op("ScatterElements", [empty, self._slots, numbers], axis=0)

    def columns(self, source: ir.Value, repeated: int = 1) -> ir.Value:
        """The rows of `source` as columns of blocks, [B, K, H].

        source: [R / repeated, K]; each row is used for `repeated` experts.
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
        """The blocks' products [B, N, H] of columns [B, K, H], weight [E, N, K] and bias [E, N]."""
        op = self._editor.op
        copies = op("Gather", [weight, self._of_block], axis=0, dtype=columns.dtype)  # [B, N, K]
        found = op("MatMul", [copies, columns], dtype=columns.dtype)
        if bias is None:
            return found
        terms = op("Unsqueeze", [op("Gather", [bias, self._of_block], axis=0), self._editor.constant(np.array([2]))])
        return op("Add", [found, terms], dtype=columns.dtype)

    def rows(self, columns: ir.Value, width: int) -> ir.Value:
        """Columns [B, width, H] as rows [R, width], in the order of the ids."""
        op, constant = self._editor.op, self._editor.constant
        flat = op("Reshape", [op("Transpose", [columns], perm=[0, 2, 1]), constant(np.array([-1, width]))])
        return op("Gather", [flat, self._slots], axis=0, dtype=columns.dtype, shape=["rows", width])


def experts_of(editor: GraphEditor, marker: ir.Node, blocks: ExpertBlocks, matrices: list[ir.Value]) -> ir.Value:
    """The output of an `Experts` marker, [tokens, D]; matrices: [E, N, D] and [E, D, I]."""
    op, constant = editor.op, editor.constant
    hidden, ids, weights = marker.inputs[:3]
    biases = [*marker.inputs[5:], None, None][:2]
    count, width = fixed_size(ids, 1), fixed_size(hidden, 1)
    up = blocks.product(blocks.columns(hidden, count), matrices[0], biases[0])
    down = blocks.product(_activated(editor, up, marker), matrices[1], biases[1])
    split = constant(np.array([-1, count, width]))
    outputs = op("Reshape", [blocks.rows(down, width), split])  # [tokens, k, D]
    weighted = op("Mul", [outputs, op("Unsqueeze", [weights, constant(np.array([2]))])])
    return op("ReduceSum", [weighted, constant(np.array([1]))], keepdims=0)


def _activated(editor: GraphEditor, up: ir.Value, marker: ir.Node) -> ir.Value:
    """[B, N, H] -> [B, I, H]."""
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
    gate, linear = _halves(editor, up, interleaved=bool(marker.attributes["interleaved"].as_int()))
    kind = up.dtype.numpy() if up.dtype is not None else np.float32

    def number(value: float) -> ir.Value:
        return editor.constant(np.array(value, kind))

    if limit:
        gate = op("Min", [gate, number(limit)])
        linear = op("Clip", [linear, number(-limit), number(limit)])
    scaled = gate if math.isclose(alpha, 1.0) else op("Mul", [gate, number(alpha)])
    linear = op("Add", [linear, number(beta)]) if beta else linear
    return op("Mul", [op("Mul", [gate, op("Sigmoid", [scaled])]), linear], dtype=up.dtype)


def _halves(editor: GraphEditor, up: ir.Value, *, interleaved: bool) -> tuple[ir.Value, ir.Value]:
    if not interleaved:
        gate, linear = editor.outputs("Split", [up], 2, axis=1, num_outputs=2)
        return gate, linear
    ends = [editor.constant(np.array([number])) for number in (np.iinfo(np.int64).max, 1, 2)]
    first, second = (
        editor.op("Slice", [up, editor.constant(np.array([start])), *ends], dtype=up.dtype) for start in (0, 1)
    )
    return first, second
