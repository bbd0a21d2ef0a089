"""The constants, types and shapes that each node of a graph sees, including those of outer graphs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from topw_deploy.onnx_file.model import DATA_TYPES, Constant, Graph, Node

_BOOL = {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
_INT64 = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size"}
_TYPE_OF_SECOND = {"Where"}


@dataclass(frozen=True)
class Scope:
    """What is known about the values that a node can read.

    constants, types, shapes: by the value's name; a size that is not fixed is a name.
    within: operators of the enclosing nodes, outermost first.
    """

    constants: Mapping[str, Constant] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    within: tuple[str, ...] = ()


def walk_nodes(graph: Graph, scope: Scope | None = None) -> Iterator[tuple[Node, Scope]]:
    """Yield each node of `graph` with its scope, followed by the nodes of its branches.

    scope: of the outer graph, or of a function's inputs.

    An output whose type is not in the file gets the type of the node's input, which most operators keep.
    """
    outer = scope or Scope()
    # A graph can have any number of branches, so the outer scope is not copied: ChainMap writes into its first mapping.
    constants: ChainMap[str, Constant] = ChainMap({}, cast(dict[str, Constant], outer.constants))
    types: ChainMap[str, str] = ChainMap({}, cast(dict[str, str], outer.types))
    shapes: ChainMap[str, tuple[int | str, ...]] = ChainMap({}, cast(dict[str, Any], outer.shapes))
    for value in (*graph.inputs, *graph.outputs, *graph.values.values()):
        if value.dtype is not None:
            types[value.name] = value.dtype
        if value.shape is not None:
            shapes[value.name] = value.shape
    for constant in graph.constants.values():
        constants[constant.name] = constant
        types[constant.name], shapes[constant.name] = constant.dtype, constant.shape
    inner = Scope(constants, types, shapes, outer.within)
    for node in graph.nodes:
        _infer_outputs(node, constants, types, shapes)
        yield node, inner
        for body in node.subgraphs.values():
            yield from walk_nodes(body, Scope(constants, types, shapes, (*outer.within, node.op_type)))


def _infer_outputs(
    node: Node,
    constants: ChainMap[str, Constant],
    types: ChainMap[str, str],
    shapes: ChainMap[str, tuple[int | str, ...]],
) -> None:
    if node.op_type == "Constant":
        value = node.attributes.get("value")
        if isinstance(value, Constant):
            types.setdefault(node.outputs[0], value.dtype)
            shapes.setdefault(node.outputs[0], value.shape)
        constants[node.outputs[0]] = value if isinstance(value, Constant) else _read_constant(node)
        return
    dtype = _output_type(node, types)
    if dtype is not None:
        for name in node.outputs[: 1 if node.op_type == "TopK" else None]:
            types.setdefault(name, dtype)


def _read_constant(node: Node) -> Constant:
    for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32")):
        if name in node.attributes:
            value = node.attributes[name]
            numbers = (value,) if isinstance(value, int) else value if isinstance(value, tuple) else None
            return Constant(node.outputs[0], dtype, (), numbers)
    return Constant(node.outputs[0], "float32", ())


def _output_type(node: Node, types: Mapping[str, str]) -> str | None:
    if node.op_type == "Cast":
        return DATA_TYPES.get(int(node.attributes.get("to") or 0))
    if node.op_type in _BOOL:
        return "bool"
    if node.op_type in _INT64:
        return "int64"
    if node.domain not in ("", "ai.onnx") or node.subgraphs or node.op_type == "DequantizeLinear":
        return None
    source = node.inputs[1:2] if node.op_type in _TYPE_OF_SECOND else node.inputs[:1]
    return types.get(source[0]) if source else None
