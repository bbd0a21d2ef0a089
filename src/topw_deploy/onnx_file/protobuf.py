"""A reader of Protocol Buffers' wire format, limited to what ONNX files need.

Values are views of the file, so that nothing large is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Field = int | memoryview
"""A number, or the bytes of a string, a packed list or a nested message."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class ProtobufError(ValueError):
    """The bytes are not a valid message, or not an ONNX model."""


def fields(message: memoryview) -> Iterator[tuple[int, Field, int, int]]:
    """Yield the fields of a message in order, each as (number, value, start, end); it is message[start:end].

    Raises ProtobufError for truncated bytes or an unknown field type.
    """
    place, end = 0, len(message)
    while place < end:
        start = place
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield tag >> 3, value, start, place
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ProtobufError(f"a field of kind {kind} at byte {start}")
        if place + size > end:
            raise ProtobufError(f"a field of {size} bytes at byte {start}, past the end")
        yield tag >> 3, message[place : place + size], start, place + size
        place += size


def text(value: Field) -> str:
    """Return the string in a field. Raises ProtobufError for a number."""
    return payload(value).tobytes().decode("utf-8", "replace")


def payload(value: Field) -> memoryview:
    """Return the bytes in a field. Raises ProtobufError for a number."""
    if isinstance(value, int):
        raise ProtobufError("a number where bytes are expected")
    return value


def integers(value: Field) -> Iterator[int]:
    """Yield the signed integers of a field, which holds one or a packed list. Raises ProtobufError for cut numbers."""
    if isinstance(value, int):
        yield _signed(value)
        return
    place = 0
    while place < len(value):
        number, place = _varint(value, place)
        yield _signed(number)


def integer(value: Field) -> int:
    """Return the signed integer in a field. Raises ProtobufError for bytes."""
    if not isinstance(value, int):
        raise ProtobufError("bytes where a number is expected")
    return _signed(value)


def float32(value: Field) -> float:
    """Return the float in a field of four bytes. Raises ProtobufError for other fields."""
    data = payload(value)
    if len(data) != 4:
        raise ProtobufError(f"{len(data)} bytes where a float is expected")
    return float(struct.unpack("<f", data)[0])


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    number = 0
    for index in range(_LONGEST_VARINT):
        if place >= len(message):
            raise ProtobufError("a number past the end")
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, place
    raise ProtobufError(f"a number of more than {_LONGEST_VARINT} bytes")
