"""Protocol buffers' wire format, as far as reading an ONNX file takes: machines that only build and run engines have no
`onnx`. Values are views into the file's bytes; nothing large is copied."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Field = int | memoryview
"""A number, or the bytes of a text, a packed list or an inner message."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class WireError(ValueError):
    """The bytes are no message."""


def fields(message: memoryview) -> Iterator[tuple[int, Field, int, int]]:
    """The message's fields in their order: number, value, and where field begins and ends in `message`.

    Raises WireError for bytes that are cut short or of no known kind.
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
            raise WireError(f"a field of kind {kind} at byte {start}")
        if place + size > end:
            raise WireError(f"a field of {size} bytes at byte {start}, past the end")
        yield tag >> 3, message[place : place + size], start, place + size
        place += size


def text(value: Field) -> str:
    """The text in a field. Raises WireError for a number."""
    return inner(value).tobytes().decode("utf-8", "replace")


def inner(value: Field) -> memoryview:
    """The bytes in a field. Raises WireError for a number."""
    if isinstance(value, int):
        raise WireError("a number where bytes belong")
    return value


def integers(value: Field) -> Iterator[int]:
    """Signed integers: of one field, or of a packed list."""
    if isinstance(value, int):
        yield _signed(value)
        return
    place = 0
    while place < len(value):
        number, place = _varint(value, place)
        yield _signed(number)


def integer(value: Field) -> int:
    """A signed integer. Raises WireError for bytes."""
    if not isinstance(value, int):
        raise WireError("bytes where a number belongs")
    return _signed(value)


def float32(value: Field) -> float:
    """The number in a field of four bytes. Raises WireError for another."""
    data = inner(value)
    if len(data) != 4:
        raise WireError(f"{len(data)} bytes where a float belongs")
    return float(struct.unpack("<f", data)[0])


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    number = 0
    for index in range(_LONGEST_VARINT):
        if place >= len(message):
            raise WireError("a number past the end")
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, place
    raise WireError(f"a number of more than {_LONGEST_VARINT} bytes")
