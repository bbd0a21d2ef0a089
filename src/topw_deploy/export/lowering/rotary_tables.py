"""Cosine and sine tables for GroupQueryAttention, shared by layers with equal frequencies.

The trace's own nodes compute the tables, so that they match the model's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from topw_deploy.export.graph.editor import GraphEditor, find_input
from topw_deploy.export.lowering.projections import MergedHeads
from topw_deploy.export.lowering.rotary import rotary_kind
from topw_deploy.export.trace.trace import TracedDecoder

# Two tables (cosines and sines) that are larger than both are not stored; every call then computes its angles.
_SHARE_OF_WEIGHTS = 1 / 16
_ALWAYS_SMALL = 1 << 20  # bytes


@dataclass(frozen=True)
class RotaryTable:
    """The tables of one rotation.

    cos, sin: initializers [context_length, rotary_dim / 2].
    interleaved: 1 if neighbouring elements are pairs, 0 if pairs are half the rotated part apart.
    """

    cos: ir.Value
    sin: ir.Value
    interleaved: int


class RotaryTables:
    """The rotary tables of one graph, each stored once.

    context_length: rows of the tables.
    """

    def __init__(self, editor: GraphEditor, decoder: TracedDecoder, context_length: int) -> None:
        self._editor = editor
        self._length = context_length
        self._positions = find_input(decoder.model.graph, "position_ids")
        weights = [value.const_value for value in decoder.model.graph.initializers.values()]
        size = sum(tensor.nbytes for tensor in weights if tensor is not None)
        self._most_bytes = max(_ALWAYS_SMALL, int(size * _SHARE_OF_WEIGHTS))
        self._stored: dict[tuple[str, ...], ir.Value] = {}

    def of(self, query: MergedHeads, key: MergedHeads, head_dim: int) -> RotaryTable | None:
        """The table for `query` and `key`; None if the operator cannot rotate them or the table is too large."""
        if query.rotary is None or key.rotary is None or head_dim % 16:  # the operator's own condition
            return None
        interleaved, rotary_dim = rotary_kind(query.rotary)
        if rotary_kind(key.rotary) != (interleaved, rotary_dim) or rotary_dim % 16:  # also for partial rotation
            return None
        factors = [value for node in (query.rotary, key.rotary) for value in node.inputs[1:]]
        if not all(self._is_small(value, (rotary_dim or head_dim) // 2) for value in factors):
            return None
        tables = [self._table(value) for value in factors]
        cos, sin = tables[:2]
        if cos is None or sin is None or tables[:2] != tables[2:]:
            return None
        return RotaryTable(cos, sin, interleaved)

    def _is_small(self, factor: ir.Value | None, width: int) -> bool:
        """Whether two tables like that of `factor`, `width` columns wide, may be stored."""
        dtype = ir.DataType.FLOAT if factor is None or factor.dtype is None else factor.dtype
        return 2 * self._length * width * dtype.itemsize <= self._most_bytes

    def _table(self, factor: ir.Value | None) -> ir.Value | None:
        """The table of the cosines or sines `factor`; None if more than positions and weights decide them."""
        nodes = _nodes_between(self._positions, factor)
        if nodes is None or factor is None or self._positions is None:
            return None
        key = tuple(_signature(node) for node in nodes)
        if key not in self._stored:
            array = _evaluate(nodes, self._positions, factor, self._length)
            if array is None:
                return None
            self._stored[key] = self._editor.constant(array, self._editor.unique("rotary_table"))
        return self._stored[key]


def _nodes_between(source: ir.Value | None, value: ir.Value | None) -> list[ir.Node] | None:
    """The nodes that compute `value` from `source` and initializers, in order; None if it depends on anything else."""
    found: list[ir.Node] = []

    def visit(value: ir.Value | None) -> bool:
        if value is None or value is source or value.is_initializer():
            return True
        node = value.producer()
        if node is None:
            return False
        if node not in found:
            if not all(visit(before) for before in node.inputs):
                return False
            found.append(node)
        return True

    return found if visit(value) and found else None


def _signature(node: ir.Node) -> str:
    """A string that is equal for nodes that compute equal outputs from equal inputs."""
    names = [value.name if value is not None and value.is_initializer() else "" for value in node.inputs]
    attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
    return f"{node.domain}::{node.op_type}{attributes}{names}"


def _evaluate(nodes: list[ir.Node], positions: ir.Value, value: ir.Value, length: int) -> np.ndarray | None:
    """Compute `value` at the positions 0 to `length` - 1. Returns [length, width]; None if it has other axes.

    nodes: from `_nodes_between`.
    """
    graph = ir.Graph([], [], nodes=[], name="angles", opset_imports={"": 23})
    known = {id(positions): ir.Value(name="positions", type=positions.type, shape=ir.Shape([1, length]))}
    graph.inputs.append(known[id(positions)])
    for node in nodes:
        for source in node.inputs:
            if source is not None and id(source) not in known:
                copy = ir.Value(name=source.name, type=source.type, shape=source.shape, const_value=source.const_value)
                graph.register_initializer(copy)
                known[id(source)] = copy
        node_copy = ir.Node(
            node.domain,
            node.op_type,
            [None if source is None else known[id(source)] for source in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
        )
        for old, new in zip(node.outputs, node_copy.outputs, strict=True):
            new.name, new.type = old.name, old.type
            known[id(old)] = new
        graph.append(node_copy)
    result = known[id(value)]
    result.type = result.type or ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(result)
    evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)))
    (found,) = evaluator.run(None, {"positions": np.arange(length, dtype=np.int64)[None]})
    array = np.asarray(found)
    return array[0] if array.ndim == 3 and array.shape[:2] == (1, length) else None
