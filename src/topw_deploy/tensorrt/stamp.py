"""The stamp beside an engine: a JSON file with the engine's source, platform and hash.

An engine is code for one GPU model and one TensorRT version, and may be deserialized only if its stamp fits. The stamp
is written last, so an engine without a stamp is unfinished.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import TensorRTError
from topw_deploy.files import NotRegularError, open_regular, replace_file
from topw_deploy.manifest import MANIFEST_NAME, sha256_of
from topw_deploy.manifest.fields import parse_json
from topw_deploy.tensorrt.profiles import Profile, Range

FOLDER = "engines"
FORMAT_VERSION = 1
ENGINE_SUFFIX, STAMP_SUFFIX = ".engine", ".json"
PLUGINS, PRECISIONS = ("python", "library", "none"), ("as exported", "fp16")
_MAX_BYTES = 1 << 20  # a stamp has about 2 KB; a hostile file must not fill the memory
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.engine")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTStamp:
    """A stamp's fields.

    engine: name of the engine's file in engines/.
    size, sha256: bytes and hash of that file.
    manifest: SHA-256 of the folder's manifest.
    tensorrt, gpu, sm: the platform; sm is 87 for sm_87.
    plugin: one of PLUGINS; "none" for the graph's function.
    plugin_version: "" without a plugin.
    precision: one of PRECISIONS.
    cache_length: tokens.
    workspace: bytes of scratch memory; None for no limit.
    topw_deploy: version of this package.
    """

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


def read_stamp(path: Path) -> TensorRTStamp:
    """Read and check a stamp. Raises TensorRTError for a file that is not readable or not a stamp."""
    try:
        with open_regular(path) as stream:
            raw = stream.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        return _parse_stamp(_checked_object("it", _parse_json(raw)))
    except NotRegularError:
        raise TensorRTError(f"{path} is not an engine's stamp (it is not a file in the folder).") from None
    except OSError as error:
        raise TensorRTError(f"{path} cannot be read: {error.strerror or error}.") from None
    except KeyError as error:
        raise TensorRTError(f"{path} is not an engine's stamp (field {error} is missing).") from None
    except ValueError as error:
        raise TensorRTError(f"{path} is not an engine's stamp ({error}).") from None


def write_stamp(folder: Path, stamp: TensorRTStamp) -> Path:
    """Write the stamp atomically beside its engine."""
    path = (folder / stamp.engine).with_suffix(STAMP_SUFFIX)
    with replace_file(path) as stream:
        stream.write(stamp.to_json().encode("utf-8"))
    return path


def manifest_hash(out: Path) -> str:
    """SHA-256 of the folder's manifest. Raises TensorRTError if it cannot be read."""
    try:
        return sha256_of(out / MANIFEST_NAME)
    except OSError as error:
        raise TensorRTError(f"{out / MANIFEST_NAME} cannot be read: {error.strerror or error}.") from None


def _parse_json(raw: bytes) -> Any:
    try:
        return parse_json(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON: it was changed or truncated") from None


def _parse_stamp(data: dict[str, Any]) -> TensorRTStamp:
    version = data["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:  # true and 1.0 are equal to 1
        raise ValueError(f"it has format version {version!r:.60}, not {FORMAT_VERSION}")
    unknown = sorted(data.keys() - TensorRTStamp.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(f"it has the unknown field {unknown[0]!r:.60}")
    if not _NAME.fullmatch(_checked_text(data, "engine")):
        raise ValueError(f"engine is {data['engine']!r}, not the name of an .engine file in the same folder")
    for name in ("sha256", "manifest"):
        if not _SHA256.fullmatch(_checked_text(data, name)):
            raise ValueError(f"{name} is {data[name]!r:.80}, not a SHA-256 in hexadecimal")
    for name in ("tensorrt", "gpu", "plugin_version", "topw_deploy"):
        _checked_text(data, name)
    for name, known in (("plugin", PLUGINS), ("precision", PRECISIONS)):
        if _checked_text(data, name) not in known:
            raise ValueError(f"{name} is {data[name]!r:.60}, not one of {', '.join(known)}")
    for name, most in (("size", _INT64), ("sm", _INT32), ("cache_length", _INT32)):
        _checked_integer(name, data[name], 1, most)
    if data["workspace"] is not None:
        _checked_integer("workspace", data["workspace"], 1, _INT64)
    if not isinstance(data["profiles"], list):
        raise ValueError(f"profiles is {data['profiles']!r:.60}, not a list")
    profiles = tuple(
        Profile(_checked_text(p, "name"), *(_parse_range(name, p[name]) for name in ("batch", "sequence", "edits")))
        for p in (_checked_object("a profile", each) for each in data["profiles"])
    )
    if not profiles:
        raise ValueError("it has no profiles")
    return TensorRTStamp(**{**data, "profiles": profiles})


def _parse_range(name: str, data: object) -> Range:
    least, usual, most = (
        _checked_integer(name, _checked_object(name, data)[key], 0, _INT32) for key in ("least", "usual", "most")
    )
    if not least <= usual <= most:
        raise ValueError(f"{name} is {least}, {usual}, {most}, which is not ascending")
    return Range(least, usual, most)


def _checked_object(what: str, data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {data!r:.60}, not a JSON object")
    return data


def _checked_text(data: dict[str, Any], name: str) -> str:
    if not isinstance(data[name], str) or not data[name].isprintable():
        raise ValueError(f"{name} is {data[name]!r:.60}, not a line of text")
    return str(data[name])


def _checked_integer(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}, not an integer >= {least} and <= {most}")
    return value
