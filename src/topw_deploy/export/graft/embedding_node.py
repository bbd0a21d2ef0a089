"""Finding the node that looks token embeddings up, in whichever form the decoder's exporter wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph.editor import find_input, is_constant
from topw_deploy.export.tail import EmbeddingForm

# On the way from the ids to the embedding: these change neither the ids' values nor their order.
_TRANSPARENT = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity"}
_LOOKUPS = {("", "Gather"), ("com.microsoft", "GatherBlockQuantized")}
_IDS_AT = 1  # input of either lookup that takes the ids


@dataclass(frozen=True)
class EmbeddingNode:
    """The lookup node, its form, and its data inputs in order (the ids left out)."""

    node: ir.Node
    form: EmbeddingForm
    data: tuple[ir.Value, ...]
    rows: int
    hidden: int


def find_embedding(graph: ir.Graph) -> EmbeddingNode:
    """The one embedding lookup downstream of `input_ids`.

    Raises UnsupportedModelError where there is none or more than one: a metric other than `uniform` needs it.
    """
    found = _lookups(graph)
    if not found:
        raise UnsupportedModelError(
            "the decoder has no input embeddings: no Gather or GatherBlockQuantized of a constant table is fed by "
            "input_ids; export with --metric uniform, which needs none."
        )
    if len(found) > 1:
        names = ", ".join(node.name or node.op_type for node in found)
        raise UnsupportedModelError(
            f"the decoder looks input_ids up in {len(found)} tables ({names}), so the token geometry is ambiguous; "
            "export with --metric uniform."
        )
    return _describe(found[0])


def _lookups(graph: ir.Graph) -> list[ir.Node]:
    ids = find_input(graph, "input_ids")
    waiting, seen, found = [ids] if ids is not None else [], set(), []
    while waiting:
        for node, position in waiting.pop().uses():
            if node.op_type in _TRANSPARENT and node.domain == "" and position == 0:
                if id(node) not in seen:
                    seen.add(id(node))
                    waiting.append(node.outputs[0])
            elif (node.domain, node.op_type) in _LOOKUPS and position == _IDS_AT and _has_constant_matrix(node):
                found.append(node)
    return found


def _has_constant_matrix(node: ir.Node) -> bool:
    table = node.inputs[0]
    return is_constant(table) and table is not None and table.shape is not None and len(table.shape) == 2


def _describe(node: ir.Node) -> EmbeddingNode:
    data = tuple(value for index, value in enumerate(node.inputs) if index != _IDS_AT and value is not None)
    if len(data) != len(node.inputs) - 1:
        raise UnsupportedModelError(
            f"the embedding node {node.name} leaves an optional input out; write it explicitly."
        )
    inputs = tuple((_element_type(value), _fixed_shape(value)) for value in data)
    attributes = tuple(
        sorted(
            (name, tuple(a.value) if isinstance(a.value, list | tuple) else a.value)
            for name, a in node.attributes.items()
        )
    )
    form = EmbeddingForm(node.domain, node.op_type, attributes, inputs, _IDS_AT)
    rows, width = inputs[0][1]
    return EmbeddingNode(node, form, data, rows, width * _values_per_element(node, inputs[0][0]))


def _values_per_element(node: ir.Node, stored: ir.DataType) -> int:
    """How many weights one stored element packs: GatherBlockQuantized keeps 4-bit weights in pairs as uint8."""
    if node.op_type == "GatherBlockQuantized" and stored == ir.DataType.UINT8:
        bits = node.attributes.get("bits")
        return 8 // (bits.as_int() if bits is not None else 4)
    return 1


def _element_type(value: ir.Value) -> ir.DataType:
    dtype = value.dtype if value.dtype is not None else getattr(value.const_value, "dtype", None)
    if dtype is None:  # derived from an initializer by nodes that keep its type
        producer = value.producer()
        assert producer is not None
        assert producer.inputs[0] is not None
        return _element_type(producer.inputs[0])
    return dtype


def _fixed_shape(value: ir.Value) -> tuple[int, ...]:
    shape = value.shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise UnsupportedModelError(
            f"the embedding table {value.name} has the shape {shape}, but fixed sizes are needed; "
            "export the decoder with shapes inferred."
        )
    return tuple(int(size) for size in shape)  # type: ignore[arg-type]
