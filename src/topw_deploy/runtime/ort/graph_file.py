"""Read nodes and initializer shapes from an ONNX file, because onnxruntime does not report them.

The file is not validated here: onnxruntime must have opened it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap

Span = tuple[int, int]
"""A byte range in the file."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_GRAPH = 7  # ModelProto field
_NODE, _INITIALIZER = 1, 5  # GraphProto
_INPUT, _OUTPUT, _OPERATOR, _ATTRIBUTE = 1, 2, 4, 5  # NodeProto
_ATTRIBUTE_NAME, _INTEGER = 1, 3  # AttributeProto
_SIZES, _TYPE, _TENSOR_NAME, _RAW, _EXTERNAL = 1, 2, 8, 9, 13  # TensorProto
_KEY, _VALUE = 1, 2  # StringStringEntryProto


@dataclass
class Node:
    """integers: integer attributes."""

    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    integers: dict[str, int] = field(default_factory=dict)


@dataclass
class Initializer:
    """dtype: a TensorProto.DataType.

    raw: where its bytes are in this file, or None.
    external: where they are in another one: `location`, `offset`, `length`.
    """

    name: str = ""
    dtype: int = 0
    shape: list[int] = field(default_factory=list)
    raw: Span | None = None
    external: dict[str, str] = field(default_factory=dict)


def read_graph(file: mmap) -> tuple[list[Node], dict[str, Initializer]]:
    """Returns (nodes of the main graph, its initializers by name)."""
    nodes, initializers = [], {}
    for number, span in _fields(file, (0, len(file))):
        if number != _GRAPH or isinstance(span, int):
            continue
        for kind, part in _fields(file, span):
            if isinstance(part, int):
                continue
            if kind == _NODE:
                nodes.append(_node(file, part))
            elif kind == _INITIALIZER:
                tensor = _initializer(file, part)
                initializers[tensor.name] = tensor
    return nodes, initializers


def _node(file: mmap, span: Span) -> Node:
    node = Node()
    for number, value in _fields(file, span):
        if isinstance(value, int):
            continue
        if number == _INPUT:
            node.inputs.append(_text(file, value))
        elif number == _OUTPUT:
            node.outputs.append(_text(file, value))
        elif number == _OPERATOR:
            node.operator = _text(file, value)
        elif number == _ATTRIBUTE:
            fields = dict(_fields(file, value))
            name, integer = fields.get(_ATTRIBUTE_NAME), fields.get(_INTEGER)
            if isinstance(name, tuple) and isinstance(integer, int):
                node.integers[_text(file, name)] = integer
    return node


def _initializer(file: mmap, span: Span) -> Initializer:
    tensor = Initializer()
    for number, value in _fields(file, span):
        if number == _SIZES and isinstance(value, int):
            tensor.shape.append(value)
        elif number == _SIZES and isinstance(value, tuple):  # packed encoding
            tensor.shape += _packed(file, value)
        elif number == _TYPE and isinstance(value, int):
            tensor.dtype = value
        elif number == _TENSOR_NAME and isinstance(value, tuple):
            tensor.name = _text(file, value)
        elif number == _RAW and isinstance(value, tuple):
            tensor.raw = value
        elif number == _EXTERNAL and isinstance(value, tuple):
            entry = dict(_fields(file, value))
            key, text = entry.get(_KEY), entry.get(_VALUE)
            if isinstance(key, tuple) and isinstance(text, tuple):
                tensor.external[_text(file, key)] = _text(file, text)
    return tensor


def _fields(file: mmap, span: Span) -> Iterator[tuple[int, int | Span]]:
    """(number, integer or span) of each field."""
    at, end = span
    while at < end:
        key, at = _varint(file, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(file, at)
            yield key >> 3, value
        elif kind == _BYTES:
            size, at = _varint(file, at)
            yield key >> 3, (at, at + size)
            at += size
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[kind]


def _packed(file: mmap, span: Span) -> Iterator[int]:
    at, end = span
    while at < end:
        value, at = _varint(file, at)
        yield value


def _varint(file: mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = file[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _text(file: mmap, span: Span) -> str:
    return file[span[0] : span[1]].decode()
