"""Write a folder as .tar.xz files of limited size.

.xz files may concatenate streams, and tar files are sequences of members. So each block of members is a stream, and an
archive takes blocks until the next does not fit. Blocks above the limit are halved, down to slices of a file, which
`unpack.py` joins. Any tar with xz reads the archives.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import BenchmarkError

SUFFIX = ".tar.xz"
SLICE = ".slice-"
"""The text between a file's name and the offset of its slice."""

SMALLEST = 64 << 10
"""The smallest limit, in bytes."""

_BLOCK = 16 << 20  # bytes of files per stream, with one dictionary
_DICTIONARY = 32 << 20  # a larger one saves below 1 % of onnxruntime's CUDA library


@dataclass(frozen=True)
class Member:
    """A link, or `size` bytes of a file from `start`. sliced: whether that is not the whole file."""

    name: str
    path: Path
    start: int
    size: int
    sliced: bool = False


@dataclass(frozen=True)
class Written:
    """Results of `write`.

    archives: name, bytes and SHA-256 of each archive.
    slices: for each sliced file its slices in order, its size and its SHA-256.
    """

    archives: list[dict[str, Any]]
    slices: dict[str, dict[str, Any]]


def write(root: Path, into: Path, name: str, limit: int) -> Written:
    """Write `root` to `into`/NAME-1.tar.xz and so on, of at most `limit` bytes.

    Stores files and symbolic links sorted by relative path, without times and owners. Raises BenchmarkError for a limit
    below SMALLEST.
    """
    if limit < SMALLEST:
        raise BenchmarkError(f"the limit is {limit} bytes, but must be at least {SMALLEST}; give --limit a larger one.")
    end = _compress(b"\0" * 2 * tarfile.BLOCKSIZE, binary=False)
    archives: list[list[bytes]] = [[]]
    slices: dict[str, list[str]] = {}
    for members, stream in _streams(_members(root), limit - len(end)):
        for member in members:
            if member.sliced:
                slices.setdefault(_relative_name(root, member), []).append(f"{member.name}{SLICE}{member.start}")
        if sum(map(len, archives[-1])) + len(stream) + len(end) > limit:
            archives.append([])
        archives[-1].append(stream)
    made = [_write_streams(into / f"{name}-{i}{SUFFIX}", [*streams, end]) for i, streams in enumerate(archives, 1)]
    joined = {file: {"slices": names, **_archive_entry(root / file)} for file, names in slices.items()}
    return Written(made, joined)


def _relative_name(root: Path, member: Member) -> str:
    return member.path.relative_to(root).as_posix()


def _members(root: Path) -> list[Member]:
    found = []
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or path.is_file():
            size = 0 if path.is_symlink() else path.stat().st_size
            found.append(Member(path.relative_to(root).as_posix(), path, 0, size))
    return found


def _streams(members: Sequence[Member], most: int) -> Iterator[tuple[list[Member], bytes]]:
    """Streams of at most `most` bytes."""
    block: list[Member] = []
    for member in members:
        if block and sum(m.size for m in block) + member.size > _BLOCK:
            yield from _split_to_fit(block, most)
            block = []
        block.append(member)
    if block:
        yield from _split_to_fit(block, most)


def _split_to_fit(block: list[Member], most: int) -> Iterator[tuple[list[Member], bytes]]:
    stream = _compress(b"".join(_tar_bytes(member) for member in block), any(_is_library(m.path) for m in block))
    if len(stream) <= most:
        yield block, stream
    elif len(block) > 1:
        yield from _split_to_fit(block[: len(block) // 2], most)
        yield from _split_to_fit(block[len(block) // 2 :], most)
    else:
        (member,) = block
        half = member.size // 2
        for start, size in ((member.start, half), (member.start + half, member.size - half)):
            yield from _split_to_fit([Member(member.name, member.path, start, size, sliced=True)], most)


def _tar_bytes(member: Member) -> bytes:
    """The member in tar format: header, content, padding."""
    info = tarfile.TarInfo(f"{member.name}{SLICE}{member.start}" if member.sliced else member.name)
    if member.path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(member.path)
        return info.tobuf(tarfile.PAX_FORMAT)
    info.size = member.size
    info.mode = 0o755 if os.access(member.path, os.X_OK) else 0o644
    with open(member.path, "rb") as file:
        file.seek(member.start)
        content = file.read(member.size)
    return info.tobuf(tarfile.PAX_FORMAT) + content + b"\0" * (-member.size % tarfile.BLOCKSIZE)


def _is_library(path: Path) -> bool:
    return path.suffix == ".so" or ".so." in path.name


def _compress(content: bytes, binary: bool) -> bytes:
    """One .xz stream. binary: apply the x86 filter."""
    filters: list[dict[str, Any]] = [{"id": lzma.FILTER_X86}] if binary else []
    filters.append({"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": _DICTIONARY})
    return lzma.compress(content, format=lzma.FORMAT_XZ, filters=filters)


def _write_streams(path: Path, streams: Sequence[bytes]) -> dict[str, Any]:
    path.write_bytes(b"".join(streams))
    return {"name": path.name, **_archive_entry(path)}


def _archive_entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
