"""Minimal ELF files with fat binaries."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from benchmarks.gpu.fatbin import MAGIC

PTX, CUBIN = 1, 2
ONLY_THERE = 1 << 20


def entry(kind: int, architecture: int, payload: bytes, flags: int = 0) -> bytes:
    """With a header of 64 bytes."""
    header = struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, len(payload), architecture, flags)
    assert len(header) == 64
    return header + payload


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def elf(sections: Sequence[tuple[str, bytes]]) -> bytes:
    """64-bit little-endian, with these sections and their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".shstrtab\0"
    content, headers, position = b"", [bytes(64)], 64
    for name, data in [*sections, (".shstrtab", names)]:
        offset = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, position, len(data), 0, 0, 8, 0))
        padded = data + bytes(-len(data) % 8)
        content += padded
        position += len(padded)
    start = b"\x7fELF\x02\x01\x01" + bytes(9)
    rest = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, position, 0, 64, 0, 0, 64, len(headers), len(headers) - 1)
    return start + rest + content + b"".join(headers)
