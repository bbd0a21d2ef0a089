"""The element types of tensors, by their names in ONNX. Manifests use these names."""

from __future__ import annotations

from typing import NamedTuple


class ElementType(NamedTuple):
    """An element type of tensors.

    number: its number in TensorProto.DataType.
    bits: bits per element.
    numpy, safetensors: NumPy's and safetensors' name of the type, "" if they have none.
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
"""Element types by lower-case ONNX name, such as `float` or `int64`."""

FLOATS = ("float", "float16", "bfloat16")
"""The types in which decoders compute and hold their caches."""

SAMPLER_OUTPUT_TYPES = {
    "next_token": "int64",
    "logprob": "float",
    "kept": "int32",
    "certified": "bool",
    "mass": "float",
    "keep_mask": "bool",
}
"""Types of the sampler node's outputs, in order. The last two are optional (docs/contract/graph.md, section 8)."""


def array_name(name: str) -> str:
    """Return NumPy's name of a type, `float32` for `float`, or ONNX's if NumPy has no such type.

    For FLOATS, this is also torch's name.
    """
    return ELEMENT_TYPES[name].numpy or name


def onnx_name(name: str) -> str:
    """Return the ONNX name of the type whose `array_name` is `name`. Raises KeyError for an unknown name."""
    return _ONNX_NAMES[name]


_ONNX_NAMES = {array_name(name): name for name in ELEMENT_TYPES}
