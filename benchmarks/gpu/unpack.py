"""Unpack the archives of `python -m benchmarks.gpu pack` on a GPU host, with only the standard library.

`pack.json`, beside them, has their SHA-256. Archives with another hash are refused. They may arrive one by one; a
component needs all of its archives.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from topw_deploy.errors import BenchmarkError

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


def why_missing(folder: Path, component: str) -> str:
    """Why the component is missing; empty without an index or a reason."""
    known = unusable_components(folder) if (folder / INDEX).is_file() else []
    return next((sentence for sentence in known if sentence.split(" ", 1)[0] == component), "")


def components(folder: Path) -> dict[str, dict[str, Any]]:
    """Index entries of the complete components."""
    if not (folder / INDEX).is_file():
        return {}
    done = _unpacked_archives(folder)
    every: dict[str, dict[str, Any]] = _index(folder / INDEX)["components"]
    return {name: entry for name, entry in every.items() if all(archive in done for archive in entry["archives"])}


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the complete components before everything installed.

    Sets PYTHONPATH, LD_LIBRARY_PATH and the components' variables. Adds PyTorch's library folders, as onnxruntime finds
    CUDA through the loader.
    """
    found = dict(base)
    for entry in components(folder).values():
        libraries = [str((folder / place).absolute()) for place in entry["linker_path"]]
        libraries += cuda_libraries() if entry["cuda_libraries"] else []
        packages = [str((folder / place).absolute()) for place in entry["python_path"]]
        for variable, paths in (("PYTHONPATH", packages), ("LD_LIBRARY_PATH", libraries)):
            found[variable] = os.pathsep.join([*paths, *filter(None, [found.get(variable)])])
        for variable, place in entry["variables"].items():
            found[variable] = str((folder / place).absolute())
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


def _sha256(path: Path) -> str:
    file: BinaryIO
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpacked_archives(folder: Path) -> dict[str, str]:
    """SHA-256 of the unpacked archives, by name."""
    path = folder / _DONE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_json(path: Path, value: Any) -> None:
    """Write atomically, because a run can be killed."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
