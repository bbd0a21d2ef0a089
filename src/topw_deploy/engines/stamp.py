"""The stamp beside a built engine: what it was built from, with and for, and proof that the file is whole.

An engine is a program for one model of GPU and one version of TensorRT, so it is deserialised only where its stamp
fits. The stamp is written last: an engine without one was never finished.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topw_deploy.engines.profiles import Profile, Range
from topw_deploy.errors import EngineError
from topw_deploy.manifest import MANIFEST_NAME, sha256_of

FOLDER = "engines"
FORMAT_VERSION = 1
ENGINE_SUFFIX, STAMP_SUFFIX = ".engine", ".json"
_MAX_BYTES = 1 << 20  # a stamp is 2 KB; a larger file is not one, and must not fill memory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.engine")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStamp:
    """engine: file name in engines/, with its size in bytes and SHA-256. manifest: SHA-256 of the manifest it was built
    from. gpu: its name; sm: its architecture, as 87 for sm_87. plugin: what answers the sampler's node, "python",
    "library" or "none" (the function in the file), and its version. precision: "as exported" or "fp16". cache_length:
    tokens of the cache. workspace: bytes allowed for building, None for the GPU's memory. topw_deploy: who built it."""

    engine: str
    size: int
    sha256: str
    manifest: str
    tensorrt: str
    gpu: str
    sm: int
    plugin: str
    plugin_version: str
    precision: str
    cache_length: int
    profiles: tuple[Profile, ...]
    workspace: int | None
    topw_deploy: str
    format_version: int = FORMAT_VERSION

    @property
    def most_batch(self) -> int:
        return max(profile.batch.most for profile in self.profiles)

    @property
    def most_sequence(self) -> int:
        return max(profile.sequence.most for profile in self.profiles)

    @property
    def most_edits(self) -> int:
        return max(profile.edits.most for profile in self.profiles)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def read(path: Path) -> EngineStamp:
    """The stamp in `path`, every field checked. Raises EngineError for one that is unreadable or malformed."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        data = json.loads(raw.decode("utf-8"))
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version!r}, not {FORMAT_VERSION}")
        return _parse(data)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{path} is no stamp of an engine ({reason})") from None


def write(folder: Path, stamp: EngineStamp) -> Path:
    """Put the stamp beside its engine by an atomic replace; `folder` is the one that holds both."""
    path = (folder / stamp.engine).with_suffix(STAMP_SUFFIX)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".stamp-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(stamp.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def manifest_hash(out: Path) -> str:
    """SHA-256 of the folder's manifest, which names every other file with its own."""
    return sha256_of(out / MANIFEST_NAME)


def _parse(data: dict[str, Any]) -> EngineStamp:
    if not _NAME.fullmatch(_text(data, "engine")):
        raise ValueError(f"engine is {data['engine']!r}, not the name of an .engine file in the same folder")
    for name in ("sha256", "manifest"):
        if not _SHA256.fullmatch(_text(data, name)):
            raise ValueError(f"{name} is {data[name]!r:.80}, not a SHA-256 in hexadecimal")
    for name in ("tensorrt", "gpu", "plugin", "plugin_version", "precision", "topw_deploy"):
        _text(data, name)
    for name in ("size", "sm", "cache_length"):
        _whole(name, data[name], 1)
    if data["workspace"] is not None:
        _whole("workspace", data["workspace"], 1)
    profiles = tuple(
        Profile(_text(p, "name"), *(_range(name, p[name]) for name in ("batch", "sequence", "edits")))
        for p in data["profiles"]
    )
    if not profiles:
        raise ValueError("it has no profiles")
    return EngineStamp(**{**data, "profiles": profiles})


def _range(name: str, data: dict[str, Any]) -> Range:
    least, usual, most = (_whole(name, data[key], 0) for key in ("least", "usual", "most"))
    if not least <= usual <= most:
        raise ValueError(f"{name} is {least}, {usual}, {most}, which do not rise")
    return Range(least, usual, most)


def _text(data: dict[str, Any], name: str) -> str:
    if not isinstance(data[name], str):
        raise ValueError(f"{name} is {data[name]!r:.60}, not a text")
    return str(data[name])


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r:.60}, not an integer >= {least}")
    return value
