"""Read the header of a safetensors file: 8 bytes with its length, little-endian, then JSON. The data follows."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.text import short_repr

LARGEST_HEADER = 100 << 20  # bytes: the limit of the safetensors library
METADATA = "__metadata__"
_MOST_AXES = 32  # the bound of NumPy before version 2
_MOST_BYTES = (1 << 63) - 1
ELEMENT_BYTES = {each.safetensors: each.bits // 8 for each in ELEMENT_TYPES.values() if each.safetensors}
"""safetensors' name of an element type -> bytes per element."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a header. begin, end: the range of its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(stream: BinaryIO, size: int, most: int = LARGEST_HEADER) -> tuple[dict[str, Any], int]:
    """Read the header of a file of `size` bytes. Returns (header, offset of the data).

    Raises ValueError if the header is not a JSON object, names a tensor twice, or is longer than the file or `most`
    bytes.
    """
    start = stream.read(8)
    if len(start) < 8:
        raise ValueError(f"it has {len(start)} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > min(most, size - 8):
        raise ValueError(f"its header claims {length} bytes")
    try:
        header = msgspec.json.decode(stream.read(length))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length


def read_entry(name: str, given: Any) -> Entry:
    """Check the entry of a tensor in a header.

    Raises ValueError if a field is missing or wrong, or if the range of bytes does not fit the type and the shape.
    """
    if not isinstance(given, dict) or not {"dtype", "shape", "data_offsets"} <= given.keys():
        raise ValueError(f"{short_repr(name)} has no dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the entry of {short_repr(name)} is {short_repr(given)}")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"{short_repr(name)} has {len(shape)} axes, more than {_MOST_AXES}")
    count = ELEMENT_BYTES.get(dtype, 0)
    extent = max(count, 1)  # bytes if empty axes had size 1, which is what NumPy bounds
    for dimension in shape:
        count *= dimension
        extent *= max(dimension, 1)
    if extent > _MOST_BYTES:
        raise ValueError(f"{short_repr(name)} has the shape {short_repr(shape)}, of more than {_MOST_BYTES} bytes")
    begin, end = offsets
    if end - begin != count:
        raise ValueError(
            f"{short_repr(name)} has {end - begin} bytes for {short_repr(dtype)} of shape {short_repr(shape)}"
        )
    return Entry(dtype, tuple(shape), begin, end)


def refuse_overlap(entries: Mapping[str, Entry]) -> None:
    """Raise ValueError if two tensors share bytes."""
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end:
            raise ValueError(
                f"{short_repr(name)} begins at {entry.begin}, within {short_repr(last)}, which ends at {end}"
            )
        end, last = entry.end, name


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
