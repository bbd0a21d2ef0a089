"""Change files at random: their bytes, or one value of their JSON.

The JSON may follow the first byte, with which some loaders choose a file, or the length at the start of a safetensors
file.
"""

from __future__ import annotations

import json
import random
import struct

from tests.support.mutations import VALUES, places, with_value

LONGEST = 1 << 16
"""The largest number of bytes of an input."""
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_WORDS = (
    b"..", b"/", b"\0", b"\xff", b"NaN", b"1e999", b"-1", b"null", b"{{", b"{%", b"}}", b"[" * 60, b'{"a":' * 60,
    b"9" * 400, b"\\ud800", b"/dev/zero", b"(a+)+", b"\n",
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with another value in its JSON, or with one to eight changes of its bytes; at most LONGEST bytes."""
    if rng.random() < 0.5 and (changed := _change_json(data, rng)) is not None:
        return changed[:LONGEST]
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        _change_bytes(found, rng)
    return bytes(found[:LONGEST])


def _change_json(data: bytes, rng: random.Random) -> bytes | None:
    """`data` with another value in its JSON, and with the JSON's new length if one is stated; None without JSON."""
    for start in (0, 1):
        if data[start : start + 1] in (b"{", b"["):
            changed = _change_value(data[start:], rng)
            return None if changed is None else data[:start] + changed
        length = int.from_bytes(data[start : start + 8], "little")
        begin = start + 8
        if data[begin : begin + 1] == b"{" and begin + length <= len(data):
            changed = _change_value(data[begin : begin + length], rng)
            if changed is not None:
                return data[:start] + struct.pack("<Q", len(changed)) + changed + data[begin + length :]
    return None


def _change_value(data: bytes, rng: random.Random) -> bytes | None:
    """The JSON, or JSON lines of which one changes, with another value at a random place; None if it cannot be read."""
    lines = data.splitlines(keepends=True)
    whole = rng.choice((*lines, data)) if len(lines) > 1 else data
    try:
        values = json.loads(whole)
        where = rng.choice(list(places(values)))
        changed = with_value(values, where, rng.choice(VALUES)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None
    return changed if whole is data else data.replace(whole, changed + b"\n", 1)


def _change_bytes(found: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(found) + 1)
    size = rng.choice((1, 2, 4, 8, 64, 1024))
    match rng.randrange(7):
        case 0 if found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        case 1:
            del found[at : at + size]
        case 2:
            found[at:at] = rng.randbytes(size)
        case 3:
            found[at:at] = found[rng.randrange(len(found) + 1) :][:size]
        case 4:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(_NUMBERS) & (1 << 8 * width) - 1
            found[at : at + width] = value.to_bytes(width, "little")
        case 5:
            found[at:at] = rng.choice(_WORDS)
        case _:
            found[at:at] = found[at : at + size] * rng.choice((1, 2, 16))
