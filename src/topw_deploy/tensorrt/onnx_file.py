"""What an ONNX file says: nodes, functions, the shapes and types of what goes in and out. Weights are not read."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topw_deploy.errors import EngineError
from topw_deploy.files import NotRegularError, open_regular
from topw_deploy.tensorrt import wire
from topw_deploy.tensorrt.wire import Field

DATA_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16", 17: "float8e4m3fn", 21: "uint4",
    22: "int4", 23: "float4e2m1",
}  # fmt: skip
"""TensorProto.DataType by number; what is not here is shown by its number."""

_SMALL = 64  # bytes: a tensor of so many is read, being a number or a few that shape the graph


@dataclass(frozen=True)
class Value:
    """A graph's input, output or inner value. shape: sizes, or their names; None where the file does not say."""

    name: str
    dtype: str | None = None
    shape: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Constant:
    """A tensor in the file. numbers: its values if they are a few integers, else None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Node:
    """attributes: numbers, texts, tuples of them, Constant, Graph or tuples of Graph, by name."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """`Gather`, or with its domain `com.microsoft.GroupQueryAttention`."""
        return f"{self.domain}.{self.op_type}" if self.domain not in ("", "ai.onnx") else self.op_type

    @property
    def subgraphs(self) -> Mapping[str, Graph]:
        return {name: value for name, value in self.attributes.items() if isinstance(value, Graph)}


@dataclass(frozen=True)
class Graph:
    """A graph, or the body of a function, which has no types."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """opsets: version by domain, "" for the standard operators. functions: bodies by (domain, name)."""

    graph: Graph
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str], Graph]


def read_model(path: Path) -> Model:
    """The model in the file at `path`. Raises EngineError where it cannot be read or is no ONNX model."""
    with _bytes_of(path) as data:
        graph, opsets, functions = None, {}, {}
        for number, value, *_ in wire.fields(data):
            if number == 7:
                graph = _graph(wire.inner(value))
            elif number == 8:
                domain, version = _opset(wire.inner(value))
                opsets["" if domain == "ai.onnx" else domain] = version
            elif number == 25:
                key, body = _function(wire.inner(value))
                functions[key] = body
        if graph is None:
            raise wire.WireError("it has no graph")
        return Model(graph, opsets, functions)


def without_function(path: Path, domain: str, name: str) -> bytes:
    """The file's bytes without the model-local function `domain`::`name`; every other byte as it was.

    TensorRT before 10.15 inlines a node's function even where a plugin for the node is registered. Give these bytes to
    the parser instead of the file, with the file's path so that it finds the weights beside it:
    `parser.parse(without_function(path, "topw", "TopWSample"), str(path))`. The folder is not touched.

    Raises EngineError where the file cannot be read or is no ONNX model.
    """
    with _bytes_of(path) as data:
        kept, copied = [], 0
        for number, value, start, end in wire.fields(data):
            if number == 25 and _function_name(wire.inner(value)) == (domain, name):
                kept.append(bytes(data[copied:start]))
                copied = end
        return b"".join([*kept, bytes(data[copied:])])


@contextmanager
def _bytes_of(path: Path) -> Iterator[memoryview]:
    try:
        with open_regular(path) as file:
            yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # goes with its last view
    except wire.WireError as error:
        raise EngineError(f"{path} is not an ONNX model ({error}); export the model again.") from None
    except NotRegularError as error:
        raise EngineError(f"{path} is {error.kind}, not a regular file; copy the file itself there.") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise EngineError(f"{path} cannot be read: {error}.") from None


def _opset(message: memoryview) -> tuple[str, int]:
    domain, version = "", 0
    for number, value, *_ in wire.fields(message):
        if number == 1:
            domain = wire.text(value)
        elif number == 2:
            version = wire.integer(value)
    return domain, version


def _graph(message: memoryview) -> Graph:
    nodes, inputs, outputs, constants, values = [], [], [], {}, {}
    for number, value, *_ in wire.fields(message):
        if number == 1:
            nodes.append(_node(wire.inner(value)))
        elif number == 5:
            constant = _tensor(wire.inner(value))
            constants[constant.name] = constant
        elif number == 11:
            inputs.append(_value(wire.inner(value)))
        elif number == 12:
            outputs.append(_value(wire.inner(value)))
        elif number == 13:
            described = _value(wire.inner(value))
            values[described.name] = described
    return Graph(tuple(nodes), tuple(inputs), tuple(outputs), constants, values)


def _function_name(message: memoryview) -> tuple[str, str]:
    name = domain = ""
    for number, value, *_ in wire.fields(message):
        if number == 1:
            name = wire.text(value)
        elif number == 10:
            domain = wire.text(value)
    return domain, name


def _function(message: memoryview) -> tuple[tuple[str, str], Graph]:
    nodes, inputs, outputs, values = [], [], [], {}
    for number, value, *_ in wire.fields(message):
        if number == 4:
            inputs.append(Value(wire.text(value)))
        elif number == 5:
            outputs.append(Value(wire.text(value)))
        elif number == 7:
            nodes.append(_node(wire.inner(value)))
        elif number == 12:
            described = _value(wire.inner(value))
            values[described.name] = described
    return _function_name(message), Graph(tuple(nodes), tuple(inputs), tuple(outputs), {}, values)


def _node(message: memoryview) -> Node:
    inputs, outputs, attributes = [], [], {}
    texts = {3: "", 4: "", 7: ""}
    for number, value, *_ in wire.fields(message):
        if number == 1:
            inputs.append(wire.text(value))
        elif number == 2:
            outputs.append(wire.text(value))
        elif number == 5:
            name, given = _attribute(wire.inner(value))
            attributes[name] = given
        elif number in texts:
            texts[number] = wire.text(value)
    return Node(texts[4], texts[7], texts[3], tuple(inputs), tuple(outputs), attributes)


def _attribute(message: memoryview) -> tuple[str, Any]:
    name = ""
    given: Any = None
    many: list[Any] = []
    for number, value, *_ in wire.fields(message):
        match number:
            case 1:
                name = wire.text(value)
            case 2:
                given = wire.float32(value)
            case 3:
                given = wire.integer(value)
            case 4:
                given = wire.text(value)
            case 5:
                given = _tensor(wire.inner(value))
            case 6:
                given = _graph(wire.inner(value))
            case 8:
                many.extend(wire.integers(value))
            case 9:
                many.append(wire.text(value))
            case 11:
                many.append(_graph(wire.inner(value)))
    return name, tuple(many) if many else given


def _value(message: memoryview) -> Value:
    name, dtype, shape = "", None, None
    for number, value, *_ in wire.fields(message):
        if number == 1:
            name = wire.text(value)
        elif number == 2:
            for kind, tensor, *_ in wire.fields(wire.inner(value)):
                if kind == 1:
                    dtype, shape = _tensor_type(wire.inner(tensor))
    return Value(name, dtype, shape)


def _tensor_type(message: memoryview) -> tuple[str | None, tuple[int | str, ...] | None]:
    dtype, shape = None, None
    for number, value, *_ in wire.fields(message):
        if number == 1:
            dtype = _dtype(wire.integer(value))
        elif number == 2:
            shape = tuple(_size(wire.inner(size)) for part, size, *_ in wire.fields(wire.inner(value)) if part == 1)
    return dtype, shape


def _size(message: memoryview) -> int | str:
    for number, value, *_ in wire.fields(message):
        if number == 1:
            return wire.integer(value)
        if number == 2:
            return wire.text(value)
    return "?"


def _tensor(message: memoryview) -> Constant:
    name, dtype, raw = "", "", None
    shape: list[int] = []
    listed: list[int] = []
    for number, value, *_ in wire.fields(message):
        if number == 1:
            shape.extend(wire.integers(value))
        elif number == 2:
            dtype = _dtype(wire.integer(value))
        elif number in (5, 7) and (isinstance(value, int) or len(value) <= _SMALL):
            listed.extend(wire.integers(value))
        elif number == 8:
            name = wire.text(value)
        elif number == 9:
            raw = wire.inner(value)
    return Constant(name, dtype, tuple(shape), _numbers(dtype, raw, listed))


def _numbers(dtype: str, raw: Field | None, listed: list[int]) -> tuple[int, ...] | None:
    if dtype not in ("int32", "int64"):
        return None
    if not isinstance(raw, memoryview):
        return tuple(listed) if listed else None
    size, code = (4, "i") if dtype == "int32" else (8, "q")
    if not len(raw) or len(raw) > _SMALL or len(raw) % size:
        return None
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def _dtype(number: int) -> str:
    return DATA_TYPES.get(number, f"type {number}")
