"""Read the nodes, types and shapes of an ONNX file.

Weights are not read: a Constant has a view of its bytes. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from topw_deploy.dtypes import ELEMENT_TYPES, array_name
from topw_deploy.onnx_file import protobuf
from topw_deploy.onnx_file.protobuf import Field

DATA_TYPES = {element.number: array_name(name) for name, element in ELEMENT_TYPES.items()} | {8: "string"}
"""Number of TensorProto.DataType -> name of the type, as `array_name` returns it."""

_SMALL = 64  # bytes: numbers of integer tensors up to this size are read, because they may be shapes or axes
_MOST_PARTS = 1 << 21  # nodes, values and numbers of a file; a layer of 128 experts of 10 nodes has about 10,000
_NO_GRAPH = "it has no graph"
_MOST_NESTED = 64  # graphs within graphs; protobuf's own readers allow 100 messages


@dataclass(frozen=True)
class Value:
    """An input, output or inner value of a graph.

    dtype: a name from DATA_TYPES; None if the file does not state it.
    shape: sizes, or their names; None if the file does not state it.
    """

    name: str
    dtype: str | None = None
    shape: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Constant:
    """A tensor.

    numbers: the values of a small integer tensor, else None.
    raw: a view of the values' bytes; None if the file does not hold them as bytes.
    external: the place of the values in another file, if they are there: `location`, `offset`, `length`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[int, ...] | None = None
    raw: memoryview | None = None
    external: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A node.

    attributes: by name, a number, string, Constant or Graph, or a tuple of integers, strings or graphs. None for a type
        that is not read: a list of floats or tensors, or a sparse tensor.
    """

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """`Gather` for a standard operator; with the domain for others, `com.microsoft.GroupQueryAttention`."""
        return f"{self.domain}.{self.op_type}" if self.domain not in ("", "ai.onnx") else self.op_type

    @property
    def subgraphs(self) -> Mapping[str, Graph]:
        """The attributes that are graphs, such as the branches of If."""
        return {name: value for name, value in self.attributes.items() if isinstance(value, Graph)}


@dataclass(frozen=True)
class Graph:
    """A graph.

    constants: the initializers, by name.
    values: the values inside the graph whose type or shape the file states, by name.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)


class _Budget:
    """A bound on the parts of one file and the depth of its graphs, so that a small file cannot exhaust memory."""

    def __init__(self) -> None:
        self._left, self._nested = _MOST_PARTS, 0

    def take(self, count: int = 1) -> None:
        """Count more parts. Raises ProtobufError above _MOST_PARTS."""
        self._left -= count
        if self._left < 0:
            raise protobuf.ProtobufError(f"it has more than {_MOST_PARTS} nodes, values and numbers")

    def integers(self, value: Field) -> Iterator[int]:
        """Yield the integers of a field, and count each."""
        for number in protobuf.integers(value):
            self.take()
            yield number

    @contextmanager
    def inner_graph(self) -> Iterator[None]:
        """Count one more level of graphs inside the block. Raises ProtobufError above _MOST_NESTED."""
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise protobuf.ProtobufError(f"its graphs are nested more than {_MOST_NESTED} deep")
        yield
        self._nested -= 1


def read_graph(data: memoryview) -> Graph:
    """Read the graph in a file's bytes, without functions and opsets.

    Raises ProtobufError if it is not ONNX, or larger than any published graph.
    """
    for number, value, *_ in protobuf.fields(data):
        if number == 7:  # graph
            return _graph(protobuf.payload(value), _Budget())
    raise protobuf.ProtobufError(_NO_GRAPH)


def _graph(message: memoryview, budget: _Budget) -> Graph:
    nodes, inputs, outputs, constants, values = [], [], [], {}, {}
    for number, value, *_ in protobuf.fields(message):
        if number == 1:  # node
            nodes.append(_node(protobuf.payload(value), budget))
        elif number == 5:  # initializer
            constant = _tensor(protobuf.payload(value), budget)
            constants[constant.name] = constant
        elif number == 11:  # input
            inputs.append(_value(protobuf.payload(value), budget))
        elif number == 12:  # output
            outputs.append(_value(protobuf.payload(value), budget))
        elif number == 13:  # value_info
            described = _value(protobuf.payload(value), budget)
            values[described.name] = described
    return Graph(tuple(nodes), tuple(inputs), tuple(outputs), constants, values)


def _node(message: memoryview, budget: _Budget) -> Node:
    inputs, outputs, attributes = [], [], {}
    texts = {3: "", 4: "", 7: ""}  # name, op_type, domain
    budget.take()
    for number, value, *_ in protobuf.fields(message):
        budget.take()
        if number == 1:  # input
            inputs.append(protobuf.text(value))
        elif number == 2:  # output
            outputs.append(protobuf.text(value))
        elif number == 5:  # attribute
            name, given = _attribute(protobuf.payload(value), budget)
            attributes[name] = given
        elif number in texts:
            texts[number] = protobuf.text(value)
    return Node(texts[4], texts[7], texts[3], tuple(inputs), tuple(outputs), attributes)


def _attribute(message: memoryview, budget: _Budget) -> tuple[str, Any]:
    name = ""
    given: Any = None
    many: list[Any] = []
    for number, value, *_ in protobuf.fields(message):
        match number:
            case 1:  # name
                name = protobuf.text(value)
            case 2:  # f
                given = protobuf.float32(value)
            case 3:  # i
                given = protobuf.integer(value)
            case 4:  # s
                given = protobuf.text(value)
            case 5:  # t
                given = _tensor(protobuf.payload(value), budget)
            case 6:  # g
                given = _inner_graph(value, budget)
            case 8:  # ints
                many.extend(budget.integers(value))
            case 9:  # strings
                budget.take()
                many.append(protobuf.text(value))
            case 11:  # graphs
                many.append(_inner_graph(value, budget))
    return name, tuple(many) if many else given


def _inner_graph(value: Field, budget: _Budget) -> Graph:
    with budget.inner_graph():
        return _graph(protobuf.payload(value), budget)


def _value(message: memoryview, budget: _Budget) -> Value:
    name, dtype, shape = "", None, None
    budget.take()
    for number, value, *_ in protobuf.fields(message):
        if number == 1:
            name = protobuf.text(value)
        elif number == 2:
            for kind, tensor, *_ in protobuf.fields(protobuf.payload(value)):
                if kind == 1:
                    dtype, shape = _tensor_type(protobuf.payload(tensor), budget)
    return Value(name, dtype, shape)


def _tensor_type(message: memoryview, budget: _Budget) -> tuple[str | None, tuple[int | str, ...] | None]:
    dtype, shape = None, None
    for number, value, *_ in protobuf.fields(message):
        if number == 1:
            dtype = _dtype(protobuf.integer(value))
        elif number == 2:
            sizes = [size for part, size, *_ in protobuf.fields(protobuf.payload(value)) if part == 1]
            budget.take(len(sizes))
            shape = tuple(_dimension(protobuf.payload(size)) for size in sizes)
    return dtype, shape


def _dimension(message: memoryview) -> int | str:
    for number, value, *_ in protobuf.fields(message):
        if number == 1:
            return protobuf.integer(value)
        if number == 2:
            return protobuf.text(value)
    return "?"


def _tensor(message: memoryview, budget: _Budget) -> Constant:
    name, dtype, raw = "", "", None
    budget.take()
    shape: list[int] = []
    listed: list[int] = []
    external: dict[str, str] = {}
    for number, value, *_ in protobuf.fields(message):
        if number == 1:  # dims
            shape.extend(budget.integers(value))
        elif number == 2:  # data_type
            dtype = _dtype(protobuf.integer(value))
        elif number in (5, 7) and (isinstance(value, int) or len(value) <= _SMALL):  # int32_data, int64_data
            listed.extend(budget.integers(value))
        elif number == 8:  # name
            name = protobuf.text(value)
        elif number == 9:  # raw_data
            raw = protobuf.payload(value)
        elif number == 13:  # external_data
            entry = {part: protobuf.text(text) for part, text, *_ in protobuf.fields(protobuf.payload(value))}
            external[entry.get(1, "")] = entry.get(2, "")
    return Constant(name, dtype, tuple(shape), _numbers(dtype, raw, listed), raw, external)


def _numbers(dtype: str, raw: memoryview | None, listed: list[int]) -> tuple[int, ...] | None:
    if dtype not in ("int32", "int64"):
        return None
    if raw is None:
        return tuple(listed) if listed else None
    size, code = (4, "i") if dtype == "int32" else (8, "q")
    if not len(raw) or len(raw) > _SMALL or len(raw) % size:
        return None
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def _dtype(number: int) -> str:
    return DATA_TYPES.get(number, f"type {number}")
