"""GPU code in a shared library: list its architectures and zero what one GPU does not need.

nvcc stores fat binaries in their own sections: a header and entries. Each entry is machine code (a cubin) or PTX of one
architecture; the driver picks one. Zeroing the others keeps sizes and offsets, and zeros compress well.

Layout, little-endian. Fat binary: magic u32, version u16, header size u16, size of the entries u64. Entry: kind u16 (1
PTX, 2 cubin), u16, header size u32, payload size u64, at byte 28 architecture u32 (90 is sm_90), at byte 40 flags u64,
where bit 20 is the "a" of sm_90a.
"""

from __future__ import annotations

import struct
from collections import Counter
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


@dataclass(frozen=True)
class Kept:
    """What `keep_only` keeps: entries by architecture before and after, and payload bytes.

    without: number of fat binaries that have no code for the GPU.
    """

    found: dict[str, int]
    kept: dict[str, int]
    kept_bytes: int
    zeroed_bytes: int
    without: int


def fat_binaries(data: bytes) -> list[list[Code]]:
    """Every fat binary's entries in a 64-bit little-endian ELF file.

    Raises BenchmarkError for another file, or a header that points outside it.
    """
    found = []
    try:
        for start, size in _sections(data):
            found += list(_fat_binaries_of(data, start, start + size))
    except struct.error:
        raise BenchmarkError("the file ends within a header; copy or download it again.") from None
    return found


def loaded_code(entries: Sequence[Code], sm: int) -> list[Code]:
    """What the driver loads: the best machine code, else the newest PTX, else nothing."""
    for cubin in (True, False):
        fitting = [code for code in entries if code.cubin == cubin and code.runs_on(sm)]
        if fitting:
            best = max(code.architecture for code in fitting)
            return [code for code in fitting if code.architecture == best]
    return []


def keep_only(path: Path, sm: int) -> Kept:
    """Zero every payload that `sm` does not load.

    Raises BenchmarkError as `fat_binaries` does, or if there is no code for `sm`, without changing the file.
    """
    data = path.read_bytes()
    try:
        binaries = fat_binaries(data)
    except BenchmarkError as error:
        raise BenchmarkError(f"{path.name}: {error}") from None
    summary = _summary(binaries, sm)
    if not summary.kept:
        raise BenchmarkError(f"{path.name} has code for {', '.join(summary.found) or 'no GPU'}, none for sm_{sm}.")
    changed = bytearray(data)
    for entries in binaries:
        wanted = loaded_code(entries, sm)
        for code in entries:
            if code not in wanted:
                changed[code.start : code.start + code.size] = bytes(code.size)
    path.write_bytes(changed)
    return summary


def _summary(binaries: Sequence[Sequence[Code]], sm: int) -> Kept:
    kept = [code for entries in binaries for code in loaded_code(entries, sm)]
    every = [code for entries in binaries for code in entries]
    kept_bytes = sum(code.size for code in kept)
    return Kept(
        dict(Counter(code.label for code in every)),
        dict(Counter(code.label for code in kept)),
        kept_bytes,
        sum(code.size for code in every) - kept_bytes,
        sum(not loaded_code(entries, sm) for entries in binaries),
    )


def _sections(data: bytes) -> Iterator[tuple[int, int]]:
    """(position, size) of each section with fat binaries."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise BenchmarkError("this is not a 64-bit little-endian ELF file; give a shared library for Linux.")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    if names_index >= count:
        raise BenchmarkError(f"it has {count} sections and names number {names_index} for their names; copy it again.")
    names = headers[names_index][4]
    for name, _, _, _, position, size in headers:
        text = data[names + name : data.find(b"\0", names + name)].decode("ascii", "replace")
        if text in SECTIONS:
            if position + size > len(data):
                raise BenchmarkError(f"section {text} ends at byte {position + size}, the file at {len(data)}.")
            yield position, size


def _fat_binaries_of(data: bytes, position: int, end: int) -> Iterator[list[Code]]:
    """Fat binaries are aligned to 8 bytes, with padding between them."""
    while position + _FAT_HEADER.size <= end:
        magic, _, header, size = _FAT_HEADER.unpack_from(data, position)
        if magic != MAGIC:
            position += 8
            continue
        stop = position + header + size
        if stop > end:
            raise BenchmarkError(f"a fat binary ends at byte {stop}, its section at {end}; copy the file again.")
        yield _entries(data, position + header, stop)
        position = (stop + 7) & ~7


def _entries(data: bytes, position: int, stop: int) -> list[Code]:
    found = []
    while position < stop:
        kind, _, header, size, architecture, flags = _ENTRY_HEADER.unpack_from(data, position)
        following = position + header + size
        if kind not in (_PTX, _CUBIN) or header < _ENTRY_HEADER.size or following > stop:
            raise BenchmarkError(
                f"the fat binary's entry at byte {position} is of kind {kind} with {header} + {size} bytes, up to byte "
                f"{following} of {stop}: this layout is unknown, so nothing was changed."
            )
        found.append(Code(kind == _CUBIN, architecture, bool(flags & _ONE_GPU_ONLY), position + header, size))
        position = following
    return found
