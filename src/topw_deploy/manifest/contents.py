"""The whole manifest, from JSON and to JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import parse
from topw_deploy.manifest.checks import Fields, decoded, shown
from topw_deploy.manifest.parts import DecoderInfo, FileEntry, SamplerInfo, TensorSpec, Verification
from topw_deploy.sampling.parameters import TopWParameters

MANIFEST_NAME = "topw_manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contract of one exported folder: a `DecoderManifest` or a `SamplerManifest`."""

    format_version: int = FORMAT_VERSION
    kind: str = ""
    source: dict[str, str]  # id, revision, route
    libraries: dict[str, str]  # topw_deploy and what it exported with
    opset: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sampler: SamplerInfo
    defaults: TopWParameters
    verification: Verification = field(default_factory=lambda: Verification(status="skipped"))
    files: dict[str, FileEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderManifest(Manifest):
    """The manifest of a decoder with the sampler in its graph."""

    kind: str = "decoder"
    decoder: DecoderInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerManifest(Manifest):
    """The manifest of a sampler alone."""

    kind: str = "sampler"


def manifest_from_json(text: str) -> DecoderManifest | SamplerManifest:
    """Parse and check every field by type and range.

    Raises ManifestError, which names the first field that is wrong.
    """
    try:
        data = decoded(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST_NAME} is not JSON ({error}); export the model again.") from None
    if not isinstance(data, dict):
        raise ManifestError(f"{MANIFEST_NAME} holds a {type(data).__name__}, not an object; export the model again.")
    version = data.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:  # true and 1.0 equal 1
        raise ManifestError(
            f"{MANIFEST_NAME} has format version {shown(version)}, this topw_deploy reads {FORMAT_VERSION}; "
            "export the model again or install the version that wrote it."
        )
    try:
        return _manifest(Fields("", data))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ManifestError(f"{MANIFEST_NAME} is malformed ({reason}); export the model again.") from None


def _manifest(data: Fields) -> DecoderManifest | SamplerManifest:
    files = parse.files(data.mapping("files"))
    if "model.onnx" not in files:
        raise ManifestError(f"{MANIFEST_NAME} does not list model.onnx; export the model again.")
    shared: dict[str, Any] = {
        "source": parse.texts("source", data.mapping("source")),
        "libraries": parse.texts("libraries", data.mapping("libraries")),
        "opset": parse.opset(data.mapping("opset")),
        "inputs": parse.tensors("inputs", data.listing("inputs")),
        "outputs": parse.tensors("outputs", data.listing("outputs")),
        "sampler": parse.sampler(data.inner("sampler")),
        "defaults": parse.defaults(data.inner("defaults")),
        "verification": parse.verification(data.inner("verification")),
        "files": files,
    }
    kind = data.one_of("kind", ("decoder", "sampler"))
    if kind == "decoder":
        return DecoderManifest(decoder=parse.decoder(data.inner("decoder")), **shared)
    if data.value("decoder", None) is not None:
        raise ValueError("kind is 'sampler', but there is a decoder")
    return SamplerManifest(**shared)
