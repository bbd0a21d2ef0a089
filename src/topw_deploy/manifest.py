"""`topw_manifest.json`: what an exported folder is, and the proof that it is whole.

The manifest is written last, so a folder without a valid one was never finished and does not load. Reading it
is the first thing the runtime does with a folder, hence this module needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from topw_deploy.errors import ManifestError
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

MANIFEST_NAME = "topw_manifest.json"
FORMAT_VERSION = 2
"""2 added the fields of `DecoderInfo` from `attention` on; a manifest of format 1 loads with their defaults."""
_READABLE = (1, 2)
KV_FORMS = ("concat", "static", "shared")
TARGETS = ("onnxruntime", "tensorrt")
STATUSES = ("provisional", "passed", "partial", "skipped")
_MAX_BYTES = 16 << 20  # a manifest is a few KB; a larger file is not one, and must not fill memory
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file beside the manifest: SHA-256 in hexadecimal and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output: ONNX element type in lower case (`float`, `int64`), dimensions or their names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInfo:
    """The decoder around the sampler, as the runtime must drive it (docs/graph.md, section 8).

    kv_form: `concat`, past in and past + new tokens out; `static`, one buffer for both, with lengths per row; `shared`,
    such a buffer in another exporter's graph, which takes an attention_mask.
    attention: the operator that reads the cache, for people. ragged_chunks: whether rows of a batch may take several
    tokens each behind a past; if not, they take them into an empty cache, one at a time, or each row alone.
    buffer_step: 0 if a step's cost does not depend on the buffer's length; otherwise the runtime keeps the buffer just
    above what is needed, at a multiple of this. buffer_least: fewest tokens that a buffer must hold, 0 for any: an
    operator that keeps a sliding window in it refuses a shorter one. left_padding, right_padding: whether rows of one
    batch may have different lengths, padded on that side (`concat` on the left, `shared` on the right; `static` has
    lengths per row and needs neither). weights: bytes of initializers by element type.
    quantisation: how this package quantised the weights (export.quantise.Quantisation's fields), {} if it did not.
    """

    model_type: str
    kv_form: str  # one of KV_FORMS
    num_layers: int
    num_kv_heads: tuple[int, ...]  # one per layer: they may differ
    head_dim: tuple[int, ...]  # one per layer
    kv_dtype: str  # ONNX element type of the cache, "float" or "float16"
    context_length: int  # most tokens a sequence may have
    left_padding: bool
    weights_dtype: str = "float"
    attention: str = ""  # "GroupQueryAttention" | "Attention" | ""
    right_padding: bool = False
    ragged_chunks: bool = True
    buffer_step: int = 0
    buffer_least: int = 0
    target: str = "onnxruntime"  # one of TARGETS
    weights: dict[str, int] = field(default_factory=dict)
    quantisation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """The one `topw::TopWSample` node: its baked options and form."""

    tail: str  # "portable" | "onnxruntime" | "static"
    vocab_size: int
    hidden_size: int | None  # None: the uniform metric has no embeddings
    table_form: str  # "" for the uniform metric
    options: TopWOptions
    outputs: tuple[str, ...]
    neighbour_bound: bool = False  # whether node input 13 holds one

    @property
    def geometry(self) -> tuple[str, int | None]:
        """The metric and the width of the embeddings."""
        return self.options.metric, self.hidden_size


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verification: the largest difference seen and the bound it must stay under."""

    name: str
    passed: bool
    difference: float
    bound: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`status` is "provisional" (being verified, does not load), "passed", "partial" (something could not be run where
    it was exported; `checks` says what was) or "skipped" (asked for); a failed export has no folder."""

    status: str
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole contract of one exported folder. `decoder` is None for a sampler-only model."""

    kind: str  # "decoder" | "sampler"
    source: dict[str, str]  # id, revision, route
    libraries: dict[str, str]  # topw_deploy and what it exported with
    opset: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sampler: SamplerInfo
    defaults: TopWParameters
    decoder: DecoderInfo | None = None
    verification: Verification = field(default_factory=lambda: Verification(status="skipped"))
    files: dict[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check every field; ManifestError names the first one that is wrong."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{MANIFEST_NAME} is not JSON ({error}); export the model again.") from None
        if not isinstance(data, dict):
            raise ManifestError(
                f"{MANIFEST_NAME} holds a {type(data).__name__}, not an object; export the model again."
            )
        version = data.get("format_version")
        if version not in _READABLE:
            raise ManifestError(
                f"{MANIFEST_NAME} has format version {version!r}, this topw_deploy reads "
                f"{' and '.join(map(str, _READABLE))}; "
                "export the model again or install the version that wrote it."
            )
        try:
            return _parse(data)
        except ManifestError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ManifestError(f"{MANIFEST_NAME} is malformed ({reason}); export the model again.") from None


def load_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of `folder` and check that every file it lists is there with its size.

    Hashes are left to `check_hashes`: a multi-gigabyte read has no place in loading.
    Raises ManifestError for a missing or malformed manifest, a listed file that is missing, of another size,
    a symbolic link, or outside the folder.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {MANIFEST_NAME}: it is not a finished export; run topw-export.") from None
    except NotADirectoryError:
        raise ManifestError(f"{folder} is a file; give the folder around it, which holds {MANIFEST_NAME}.") from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(raw) > _MAX_BYTES:
        raise ManifestError(
            f"{path} is larger than {_MAX_BYTES} bytes, so it is not a manifest; export the model again."
        )
    try:
        manifest = Manifest.from_json(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ManifestError(f"{path} is not UTF-8; export the model again.") from None
    for name, entry in manifest.files.items():
        _check_entry(folder, name, entry)
    return manifest


def check_hashes(folder: str | Path, manifest: Manifest) -> None:
    """Compare the SHA-256 of every listed file; ManifestError names the first that differs."""
    for name, entry in manifest.files.items():
        found = sha256_of(Path(folder) / name)
        if found != entry.sha256:
            raise ManifestError(
                f"{name} has SHA-256 {found[:16]}…, the manifest says {entry.sha256[:16]}…: "
                "the file was changed; export or copy the folder again."
            )


def describe_files(
    folder: str | Path, names: Iterable[str], known: dict[str, str] | None = None
) -> dict[str, FileEntry]:
    """Hash and size of each named file of `folder`, for a new manifest. known: hashes that need not be taken again."""
    folder, known = Path(folder), known or {}
    return {
        name: FileEntry(known.get(name) or sha256_of(folder / name), (folder / name).stat().st_size)
        for name in sorted(names)
    }


def save_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest by an atomic replace: a reader sees the old one, the new one or none, never half."""
    folder = Path(folder)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".topw_manifest-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(manifest.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / MANIFEST_NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as stream:  # hashlib.file_digest needs Python 3.11
        while size := stream.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def _check_entry(folder: Path, name: str, entry: FileEntry) -> None:
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise ManifestError(
            f"{name} is reached through a symbolic link, which onnxruntime refuses; copy the file itself into {folder}."
        )
    try:
        size = path.stat().st_size
    except OSError:
        raise ManifestError(
            f"{name} is listed in {MANIFEST_NAME} but missing from {folder}; export or copy it again."
        ) from None
    if size != entry.size:
        raise ManifestError(
            f"{name} has {size} bytes, the manifest says {entry.size}: "
            "it was changed or cut short; export or copy the folder again."
        )


def _parse(data: dict[str, Any]) -> Manifest:
    files = {
        _safe_name(name): FileEntry(_sha256(entry["sha256"]), _size(name, entry["size"]))
        for name, entry in data["files"].items()
    }
    if "model.onnx" not in files:
        raise ManifestError(f"{MANIFEST_NAME} does not list model.onnx; export the model again.")
    sampler, decoder, verification = data["sampler"], data["decoder"], data["verification"]
    kind = data["kind"]
    if kind not in ("decoder", "sampler") or (kind == "decoder") != (decoder is not None):
        raise ManifestError(
            f"{MANIFEST_NAME} has kind {kind!r} that does not fit its other fields; export the model again."
        )
    return Manifest(
        kind=kind,
        source=_strings(data["source"]),
        libraries=_strings(data["libraries"]),
        opset={str(domain): int(version) for domain, version in data["opset"].items()},
        inputs=tuple(_tensor(t) for t in data["inputs"]),
        outputs=tuple(_tensor(t) for t in data["outputs"]),
        sampler=_sampler(sampler),
        defaults=TopWParameters(**data["defaults"]),
        decoder=None if decoder is None else _decoder(decoder),
        verification=Verification(
            status=_status(verification["status"]), checks=tuple(_check(check) for check in verification["checks"])
        ),
        files=files,
        format_version=int(data["format_version"]),
    )


def _sampler(data: dict[str, Any]) -> SamplerInfo:
    _whole("vocab_size", data["vocab_size"])
    if data["hidden_size"] is not None:
        _whole("hidden_size", data["hidden_size"])
    if not isinstance(data.get("neighbour_bound", False), bool):
        raise ValueError(f"neighbour_bound is {data['neighbour_bound']!r}, not true or false")
    return SamplerInfo(**{**data, "options": TopWOptions(**data["options"]), "outputs": tuple(data["outputs"])})


def _decoder(data: dict[str, Any]) -> DecoderInfo:
    layers, _ = _whole("num_layers", data["num_layers"]), _whole("context_length", data["context_length"])
    heads = tuple(_whole("num_kv_heads", n) for n in data["num_kv_heads"])
    dims = tuple(_whole("head_dim", n) for n in data["head_dim"])
    if not len(heads) == len(dims) == layers:
        raise ValueError(f"decoder has {layers} layers but {len(heads)} head counts and {len(dims)} head sizes")
    for name in ("left_padding", "right_padding", "ragged_chunks"):
        if not isinstance(data.get(name, True), bool):
            raise ValueError(f"{name} is {data[name]!r}, not true or false")
    if not isinstance(data.get("attention", ""), str):
        raise ValueError(f"attention is {data['attention']!r}, not a name")
    if data.get("target", TARGETS[0]) not in TARGETS:
        raise ValueError(f"target is {data['target']!r}, not one of {', '.join(TARGETS)}")
    for name in ("buffer_step", "buffer_least"):
        _size(name, data.get(name, 0))
    if not isinstance(data.get("quantisation", {}), dict):
        raise ValueError(f"quantisation is {data['quantisation']!r:.60}, not an object")
    for kind, count in data.get("weights", {}).items():
        _size(f"weights {kind}", count)
    return DecoderInfo(**{**data, "num_kv_heads": heads, "head_dim": dims})


def _status(value: object) -> str:
    if value not in STATUSES:
        raise ValueError(f"verification status is {value!r}, not one of {', '.join(STATUSES)}")
    return str(value)


def _check(data: dict[str, Any]) -> Check:
    check = Check(**data)
    numbers = isinstance(check.difference, (int, float)) and isinstance(check.bound, (int, float))
    texts = isinstance(check.name, str) and isinstance(check.detail, str)
    if not (numbers and texts and isinstance(check.passed, bool)):
        raise ValueError(f"the check {check.name!r:.60} has a value of the wrong type")
    return check


def _tensor(data: dict[str, Any]) -> TensorSpec:
    return TensorSpec(str(data["name"]), str(data["dtype"]), tuple(data["shape"]))


def _strings(data: dict[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in data.items()}


def _safe_name(name: str) -> str:
    """A plain file name in the folder or in a subfolder of it: no way out by `..`, an absolute path or a drive."""
    parts = name.split("/")
    if not name or "\\" in name or ":" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ManifestError(
            f"{MANIFEST_NAME} lists the file {name!r}, which is not a plain path inside the folder; "
            "do not use this folder."
        )
    return name


def _sha256(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is not a SHA-256 in hexadecimal")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, not an integer >= 1")
    return value


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"size of {name} is {value!r}")
    return value
