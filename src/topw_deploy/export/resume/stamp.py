"""Stamps: short texts that differ when what a stage of an export was made from differs.

A small file counts with its SHA-256. A large one counts with its place on the disk (device and inode), its size, its
times of modification and of change, and the SHA-256 of its first megabyte, where safetensors and ONNX keep names and
shapes. Hashing gigabytes would take as long as writing them, which is what going on is to spare; and a program can set
a file's time of modification back, but not its time of change, so no writing to the file passes unnoticed. What merely
touches the file (a copy, a new hard link) makes a stage start over, which costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from topw_deploy.export.source.resolve import Source

_HASHED_WHOLE = 16 << 20
_HEAD = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin")
_MAKING = ("config.json", "*.index.json", "genai_config.json", "tokenizer.json", "*.py")


def stamp_of(*parts: object) -> str:
    """One text for all `parts` (anything that JSON or str can say)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def stamp_of_source(source: Source, also: Iterable[Path] = ()) -> str:
    """Of all files that the decoder's graph and weights are made from. also: data files of an ONNX decoder."""
    files = [path for pattern in (*_WEIGHTS, *_MAKING) for path in source.folder.glob(pattern)]
    if source.onnx is not None:
        files = [path for pattern in _MAKING for path in source.folder.glob(pattern)] + [source.onnx, *also]
    return stamp_of_files(files)


def stamp_of_files(files: Iterable[Path]) -> str:
    """Of what the files hold, and of their names."""
    return stamp_of([_file(path) for path in sorted(set(files)) if path.is_file()])


def _file(path: Path) -> list[object]:
    about = path.stat()
    with path.open("rb") as stream:
        if about.st_size <= _HASHED_WHOLE:
            return [path.name, hashlib.file_digest(stream, "sha256").hexdigest()]
        head = hashlib.sha256(stream.read(_HEAD)).hexdigest()
    return [path.name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, head]
