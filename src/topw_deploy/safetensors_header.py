"""Read the header of a safetensors file: 8 bytes with its length, little-endian, then JSON. The data follows."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta, Struct

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.text import short_repr

LARGEST_HEADER = 100 << 20  # bytes: the limit of the safetensors library
METADATA = "__metadata__"
_MOST_BYTES = (1 << 63) - 1
ELEMENT_BYTES = {each.safetensors: each.bits // 8 for each in ELEMENT_TYPES.values() if each.safetensors}
"""safetensors' name of an element type -> bytes per element."""

_Count = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]


class Entry(Struct, frozen=True):
    """A tensor in a header. data_offsets: the range of its bytes, counted from the end of the header.

    Raises ValueError if the range does not fit the type and the shape.
    """

    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=32)]  # the bound of NumPy before version 2
    data_offsets: tuple[_Count, _Count]

    def __post_init__(self) -> None:
        element = ELEMENT_BYTES.get(self.dtype, 0)
        if element * math.prod(max(axis, 1) for axis in self.shape) > _MOST_BYTES:  # NumPy bounds empty arrays too
            raise ValueError(f"the shape {short_repr(list(self.shape))} has more than {_MOST_BYTES} bytes")
        if self.end - self.begin != element * math.prod(self.shape):
            raise ValueError(
                f"{self.end - self.begin} bytes for {short_repr(self.dtype)} of shape {short_repr(list(self.shape))}"
            )

    @property
    def begin(self) -> int:
        return self.data_offsets[0]

    @property
    def end(self) -> int:
        return self.data_offsets[1]


def read_header(stream: BinaryIO, size: int, most: int = LARGEST_HEADER) -> tuple[dict[str, Any], int]:
    """Read the header of a file of `size` bytes. Returns (header, offset of the data).

    Raises ValueError if the header is not a JSON object, or is longer than the file or `most` bytes.
    """
    start = stream.read(8)
    if len(start) < 8:
        raise ValueError(f"it has {len(start)} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > min(most, size - 8):
        raise ValueError(f"its header claims {length} bytes")
    try:
        return msgspec.json.decode(stream.read(length), type=dict[str, Any]), 8 + length
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None


def read_entry(name: str, value: Any) -> Entry:
    """Check the entry of a tensor in a header. Raises ValueError if a field is missing or wrong."""
    try:
        return msgspec.convert(value, Entry)
    except ValueError as error:
        raise ValueError(f"the entry of {short_repr(name)}: {error!s:.300}") from None


def refuse_overlap(entries: Mapping[str, Entry]) -> None:
    """Raise ValueError if two tensors share bytes."""
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.begin < end:
            raise ValueError(
                f"{short_repr(name)} begins at {entry.begin}, within {short_repr(last)}, which ends at {end}"
            )
        end, last = entry.end, name
