"""Element types by their names in ONNX, which manifests use."""

from __future__ import annotations

from typing import NamedTuple


class ElementType(NamedTuple):
    """number: TensorProto.DataType.

    bits: per element.
    numpy, safetensors: their names of the type, or "".
    """

    number: int
    bits: int
    numpy: str = ""
    safetensors: str = ""


ELEMENT_TYPES = {
    "float": ElementType(1, 32, "float32", "F32"),
    "uint8": ElementType(2, 8, "uint8", "U8"),
    "int8": ElementType(3, 8, "int8", "I8"),
    "uint16": ElementType(4, 16, "uint16", "U16"),
    "int16": ElementType(5, 16, "int16", "I16"),
    "int32": ElementType(6, 32, "int32", "I32"),
    "int64": ElementType(7, 64, "int64", "I64"),
    "bool": ElementType(9, 8, "bool", "BOOL"),
    "float16": ElementType(10, 16, "float16", "F16"),
    "double": ElementType(11, 64, "float64", "F64"),
    "uint32": ElementType(12, 32, "uint32", "U32"),
    "uint64": ElementType(13, 64, "uint64", "U64"),
    "bfloat16": ElementType(16, 16, safetensors="BF16"),
    "float8e4m3fn": ElementType(17, 8, safetensors="F8_E4M3"),
    "float8e5m2": ElementType(19, 8, safetensors="F8_E5M2"),
    "uint4": ElementType(21, 4),
    "int4": ElementType(22, 4),
    "float4e2m1": ElementType(23, 4),
    "float8e8m0": ElementType(24, 8, safetensors="F8_E8M0"),
}
"""Element types by lower-case name (`float`, `int64`)."""

FLOATS = ("float", "float16", "bfloat16")
"""Types in which decoders compute, and keep their caches."""

SAMPLER_OUTPUT_TYPES = {
    "next_token": "int64",
    "logprob": "float",
    "kept": "int32",
    "certified": "bool",
    "mass": "float",
    "keep_mask": "bool",
}
"""Types of the sampler node's outputs, in order; the last two are optional (docs/contract/graph.md, section 8)."""


def element_bytes(name: str) -> int:
    """Bytes per element of a type of at least 8 bits."""
    return ELEMENT_TYPES[name].bits // 8


def array_name(name: str) -> str:
    """NumPy's name of a type (`float32` for `float`), or ONNX's if NumPy lacks it. For FLOATS, also torch's name."""
    return ELEMENT_TYPES[name].numpy or name


def onnx_name(name: str) -> str:
    """The type that `array_name` calls `name`. Raises KeyError for an unknown one."""
    return _ONNX_NAMES[name]


_ONNX_NAMES = {array_name(name): name for name in ELEMENT_TYPES}
