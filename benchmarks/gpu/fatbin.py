"""GPU code in a shared library: zero what one GPU does not load.

nvcc stores fat binaries in their own sections: a header and entries. Each entry is machine code (a cubin) or PTX of one
architecture; the driver picks one. Zeroing the others keeps sizes and offsets, and zeros compress well.

Layout, little-endian. Fat binary: magic u32, version u16, header size u16, size of the entries u64. Entry: kind u16 (1
PTX, 2 cubin), u16, header size u32, payload size u64, at byte 28 architecture u32 (90 is sm_90), at byte 40 flags u64,
where bit 20 is the "a" of sm_90a.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import BenchmarkError

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
_FAT_HEADER = struct.Struct("<IHHQ")
_ENTRY_HEADER = struct.Struct("<HHIQ12xI8xQ")
_PTX, _CUBIN = 1, 2
_ONE_GPU_ONLY = 1 << 20  # flag: the code does not run on newer architectures


@dataclass(frozen=True)
class Code:
    """A fat binary's entry. start, size: position and size of its payload, in bytes."""

    cubin: bool
    architecture: int
    only_there: bool
    start: int
    size: int

    @property
    def label(self) -> str:
        kind = "sm" if self.cubin else "compute"
        return f"{kind}_{self.architecture}{'a' if self.only_there else ''}"

    def runs_on(self, sm: int) -> bool:
        """Machine code runs on its architecture and later ones of its generation; PTX on every later one."""
        if self.only_there:
            return self.architecture == sm
        same_generation = self.architecture // 10 == sm // 10
        return self.architecture <= sm and (same_generation or not self.cubin)


def loaded_code(entries: Sequence[Code], sm: int) -> list[Code]:
    """What the driver loads: the best machine code, else the newest PTX, else nothing."""
    for cubin in (True, False):
        fitting = [code for code in entries if code.cubin == cubin and code.runs_on(sm)]
        if fitting:
            best = max(code.architecture for code in fitting)
            return [code for code in fitting if code.architecture == best]
    return []


def keep_only(path: Path, sm: int) -> str:
    """Zero every payload that `sm` does not load. Returns a sentence on what is kept.

    Raises BenchmarkError for a file with an unknown layout or without code for `sm`, and does not change it.
    """
    data = bytearray(path.read_bytes())
    try:
        binaries = list(fat_binaries(data))
    except (struct.error, IndexError):
        raise BenchmarkError(f"{path.name} ends within a header; copy or download it again.") from None
    except BenchmarkError as error:
        raise BenchmarkError(f"{path.name}: {error}") from None
    every = [code for entries in binaries for code in entries]
    kept = {code for entries in binaries for code in loaded_code(entries, sm)}
    if not kept:
        labels = ", ".join(sorted({code.label for code in every})) or "no GPU"
        raise BenchmarkError(f"{path.name} has code for {labels}, none for sm_{sm}.")
    for code in every:
        if code not in kept:
            data[code.start : code.start + code.size] = bytes(code.size)
    path.write_bytes(data)
    sizes = [sum(code.size for code in codes) / 1e6 for codes in (kept, every)]
    labels = ", ".join(sorted({code.label for code in kept}))
    return f"{path.name} keeps {sizes[0]:.0f} of {sizes[1]:.0f} MB of GPU code ({labels})"


def fat_binaries(data: bytes | bytearray) -> Iterator[list[Code]]:
    """The entries of every fat binary in a 64-bit little-endian ELF file.

    Raises struct.error or IndexError for a file that is cut off, BenchmarkError for an unknown layout.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise BenchmarkError("this is not a 64-bit little-endian ELF file; give a shared library for Linux.")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, position, size in headers:
        if data[names + name : data.find(b"\0", names + name)].decode("ascii", "replace") in SECTIONS:
            yield from _fat_binaries_of(data, position, position + size)


def _fat_binaries_of(data: bytes | bytearray, position: int, end: int) -> Iterator[list[Code]]:
    """Fat binaries are aligned to 8 bytes, with padding between them."""
    while position + _FAT_HEADER.size <= end:
        magic, _, header, size = _FAT_HEADER.unpack_from(data, position)
        if magic != MAGIC:
            position += 8
            continue
        stop = position + header + size
        if stop > min(end, len(data)):
            raise BenchmarkError(f"a fat binary ends at byte {stop}, its section at {end}; copy the file again.")
        yield _entries(data, position + header, stop)
        position = (stop + 7) & ~7


def _entries(data: bytes | bytearray, position: int, stop: int) -> list[Code]:
    found = []
    while position < stop:
        kind, _, header, size, architecture, flags = _ENTRY_HEADER.unpack_from(data, position)
        following = position + header + size
        if kind not in (_PTX, _CUBIN) or header < _ENTRY_HEADER.size or following > stop:
            raise BenchmarkError(
                f"the entry at byte {position} is of kind {kind} and ends at byte {following} of {stop}: this layout "
                "is unknown, so nothing was changed."
            )
        found.append(Code(kind == _CUBIN, architecture, bool(flags & _ONE_GPU_ONLY), position + header, size))
        position = following
    return found
