"""Write a folder as .tar.xz files of limited size.

.xz files may concatenate streams, and tar files are sequences of members. So each block of members is a stream, and an
archive takes blocks until the next does not fit. Blocks above the limit are halved, down to slices of a file, which
`unpack.py` joins. Any tar with xz reads the archives.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


INDEX = "pack.json"
FORMAT = 1
_DONE = "unpacked.json"


def unpack(archives: Sequence[Path], into: Path) -> list[str]:
    """Unpack those of `archives` that `into` does not have yet.

    Returns a sentence per unusable component. Raises BenchmarkError for an archive without an index, with another hash,
    or with a refused member; earlier archives stay unpacked.
    """
    for archive in archives:
        index = _index_beside(archive)
        _check_same_pack(index, into)
        entry = _entry(index, archive)
        done = _unpacked_archives(into)
        if done.get(archive.name) == entry["sha256"]:
            continue
        _extract(archive, into)
        _join(index, into)
        _write_json(into / _DONE, done | {archive.name: entry["sha256"]})
    return unusable_components(into)


def unusable_components(folder: Path) -> list[str]:
    """A sentence per unusable component of `folder`."""
    index = _index(folder / INDEX)
    done = _unpacked_archives(folder)
    found = [f"{name} was not packed: {why}" for name, why in index["absent"].items()]
    for name, component in index["components"].items():
        waiting = [archive for archive in component["archives"] if archive not in done]
        if waiting:
            found.append(f"{name} is not complete: unpack {', '.join(waiting)}, too.")
    return found


def add_why_missing(sentence: str, folder: Path, component: str) -> tuple[str, ...]:
    """The sentence, and why the component was not packed or is not complete, if the index says so."""
    known = unusable_components(folder) if (folder / INDEX).is_file() else []
    return (sentence, *(why for why in known if why.split(" ", 1)[0] == component))


def components(folder: Path) -> dict[str, dict[str, Any]]:
    """Index entries of the complete components."""
    if not (folder / INDEX).is_file():
        return {}
    done = _unpacked_archives(folder)
    every: dict[str, dict[str, Any]] = _index(folder / INDEX)["components"]
    return {name: entry for name, entry in every.items() if all(archive in done for archive in entry["archives"])}


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the complete components before everything installed.

    Sets PYTHONPATH and LD_LIBRARY_PATH. Adds PyTorch's library folders, as onnxruntime finds CUDA through the loader.
    """
    found = dict(base)
    for entry in components(folder).values():
        libraries = [str((folder / place).absolute()) for place in entry["linker_path"]]
        libraries += cuda_libraries() if entry["cuda_libraries"] else []
        packages = [str((folder / place).absolute()) for place in entry["python_path"]]
        for variable, paths in (("PYTHONPATH", packages), ("LD_LIBRARY_PATH", libraries)):
            found[variable] = os.pathsep.join([*paths, *filter(None, [found.get(variable)])])
    return {name: value for name, value in found.items() if value}


def cuda_libraries() -> list[str]:
    """CUDA library folders of this Python: `nvidia/cu13/lib`, `nvidia/cudnn/lib` and so on."""
    spec = find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations or []
    return [str(path) for place in places for path in sorted(Path(place).glob("*/lib"))]


def _index_beside(archive: Path) -> dict[str, Any]:
    path = archive.with_name(INDEX)
    if not path.is_file():
        raise BenchmarkError(f"{archive} has no {INDEX} beside it, which has its SHA-256; copy that file too.")
    return _index(path)


def _index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = index["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} is not an index of packed archives ({error}); pack again.") from None
    if version != FORMAT:
        raise BenchmarkError(f"{path} has format {version}, but this checkout reads {FORMAT}; pack again with it.")
    return index


def _check_same_pack(index: Mapping[str, Any], into: Path) -> None:
    """Raises BenchmarkError if `into` holds another pack's index."""
    path = into / INDEX
    if not path.is_file():
        into.mkdir(parents=True, exist_ok=True)
        _write_json(path, index)
    elif _index(path) != index:
        raise BenchmarkError(f"{into} holds the files of another pack; delete it, or give another --out.")


def _entry(index: Mapping[str, Any], archive: Path) -> dict[str, Any]:
    """The archive's index entry. Raises BenchmarkError if the archive does not match it."""
    entries: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in index["archives"]}
    if archive.name not in entries:
        raise BenchmarkError(f"{archive.name} is not in {INDEX} beside it, which lists {', '.join(entries) or 'none'}.")
    try:
        digest = _sha256(archive)
    except OSError as error:
        raise BenchmarkError(f"{archive} cannot be read ({error}); copy it again.") from None
    if digest != entries[archive.name]["sha256"]:
        raise BenchmarkError(
            f"{archive} has SHA-256 {digest[:16]}..., but {INDEX} says {entries[archive.name]['sha256'][:16]}...; "
            "copy it again."
        )
    return entries[archive.name]


def _extract(archive: Path, into: Path) -> None:
    """Extract an archive. Raises BenchmarkError if it is not readable, or has a member outside its folder."""
    try:
        with lzma.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(into, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise BenchmarkError(f"{archive.name} is not a readable .tar.xz file ({error}); pack again.") from None


def _join(index: Mapping[str, Any], into: Path) -> None:
    """Join the slices of files. Raises BenchmarkError if a joined file differs from the packed one."""
    for name, whole in index["slices"].items():
        target = into / name
        parts = [into / part for part in whole["slices"]]
        if not target.is_file():
            if not all(part.is_file() for part in parts):
                continue
            _concatenate(parts, target, whole["sha256"])
        for part in parts:  # even of an archive unpacked twice
            part.unlink(missing_ok=True)


def _concatenate(parts: Sequence[Path], target: Path, digest: str) -> None:
    scratch = target.with_name(target.name + ".new")
    with open(scratch, "wb") as file:
        for part in parts:
            with open(part, "rb") as content:
                shutil.copyfileobj(content, file)
    if _sha256(scratch) != digest:
        scratch.unlink()
        raise BenchmarkError(f"{target}, joined from {len(parts)} slices, differs from the packed file; pack again.")
    scratch.chmod(parts[0].stat().st_mode)
    scratch.replace(target)


def _unpacked_archives(folder: Path) -> dict[str, str]:
    """SHA-256 of the unpacked archives, by name."""
    path = folder / _DONE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_json(path: Path, value: Any) -> None:
    """Write atomically, because a run can be killed."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
