"""The whole manifest, from JSON and to JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import parse
from topw_deploy.manifest.checks import Fields, decoded, shown
from topw_deploy.manifest.parts import DecoderInfo, FileEntry, SamplerInfo, TensorSpec, Verification
from topw_deploy.sampling.parameters import TopWParameters

MANIFEST_NAME = "topw_manifest.json"
FORMAT_VERSION = 2
"""2 added the fields of `DecoderInfo` from `attention` on; a manifest of format 1 loads with their defaults."""
_READABLE = (1, 2)


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
        """Parse and check every field by type and range; ManifestError names the first one that is wrong."""
        try:
            data = decoded(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{MANIFEST_NAME} is not JSON ({error}); export the model again.") from None
        if not isinstance(data, dict):
            raise ManifestError(
                f"{MANIFEST_NAME} holds a {type(data).__name__}, not an object; export the model again."
            )
        version = data.get("format_version")
        if type(version) is not int or version not in _READABLE:  # true and 2.0 equal integers
            raise ManifestError(
                f"{MANIFEST_NAME} has format version {shown(version)}, this topw_deploy reads "
                f"{' and '.join(map(str, _READABLE))}; "
                "export the model again or install the version that wrote it."
            )
        try:
            return cls._of(Fields("", data), version)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ManifestError(f"{MANIFEST_NAME} is malformed ({reason}); export the model again.") from None

    @classmethod
    def _of(cls, data: Fields, version: int) -> Manifest:
        files = parse.files(data.mapping("files"))
        if "model.onnx" not in files:
            raise ManifestError(f"{MANIFEST_NAME} does not list model.onnx; export the model again.")
        kind, decoder = data.value("kind"), data.value("decoder")
        if kind not in ("decoder", "sampler") or (kind == "decoder") != (decoder is not None):
            raise ManifestError(
                f"{MANIFEST_NAME} has kind {shown(kind)} that does not fit its other fields; export the model again."
            )
        return cls(
            kind=kind,
            source=parse.texts("source", data.mapping("source")),
            libraries=parse.texts("libraries", data.mapping("libraries")),
            opset=parse.opset(data.mapping("opset")),
            inputs=parse.tensors("inputs", data.listing("inputs")),
            outputs=parse.tensors("outputs", data.listing("outputs")),
            sampler=parse.sampler(data.inner("sampler")),
            defaults=parse.defaults(data.inner("defaults")),
            decoder=None if decoder is None else parse.decoder(data.inner("decoder")),
            verification=parse.verification(data.inner("verification")),
            files=files,
            format_version=version,
        )
