"""ONNX element types by manifest name."""

from __future__ import annotations

from typing import NamedTuple


class ElementType(NamedTuple):
    """number: TensorProto.DataType. bits: per element. numpy: type name, or ""."""

    number: int
    bits: int
    numpy: str


ELEMENT_TYPES = {
    "float": ElementType(1, 32, "float32"),
    "uint8": ElementType(2, 8, "uint8"),
    "int8": ElementType(3, 8, "int8"),
    "int32": ElementType(6, 32, "int32"),
    "int64": ElementType(7, 64, "int64"),
    "bool": ElementType(9, 8, "bool"),
    "float16": ElementType(10, 16, "float16"),
    "double": ElementType(11, 64, "float64"),
    "bfloat16": ElementType(16, 16, ""),
    "uint4": ElementType(21, 4, ""),
    "int4": ElementType(22, 4, ""),
}
"""Element types by lower-case name (`float`, `int64`)."""


def element_bytes(name: str) -> int:
    """Bytes per element of a type of at least 8 bits."""
    return ELEMENT_TYPES[name].bits // 8
