"""An exported folder: its manifest and listed files."""

from __future__ import annotations

import json
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import MANIFEST_NAME, MODEL_NAME, DecoderManifest, Manifest, load_manifest, open_listed

_MOST_TEXT, _MOST_JSON = 256 << 20, 16 << 20  # bytes; published tokenizers have up to 35 MB, other JSON files up to 2

M_co = TypeVar("M_co", bound=Manifest, covariant=True)


class ModelFolder(Generic[M_co]):
    """A folder that was checked against its manifest. Only regular files that the manifest lists are opened, no links.

    Raises ManifestError if the folder is missing, unfinished, changed, or not of kind `wanted`.
    """

    def __init__(self, path: str | Path, wanted: type[M_co], *, unfinished: bool = False) -> None:
        """unfinished: also open an export that is still being verified."""
        self.path = Path(path)
        if not self.path.exists():
            raise ManifestError(f"{self.path} does not exist; give the folder that topw-export wrote.")
        if not self.path.is_dir():
            raise ManifestError(f"{self.path} is a file; give the folder that holds {MANIFEST_NAME}.")
        manifest = load_manifest(self.path)
        if not isinstance(manifest, wanted):
            is_decoder = isinstance(manifest, DecoderManifest)
            other = "TopWModel (a whole decoder)" if is_decoder else "TopWSampler (a sampler-only model)"
            raise ManifestError(f"{self.path} holds a {manifest.kind!r} model; load it with {other}.")
        self.manifest: M_co = manifest
        if self.manifest.verification.status == "provisional" and not unfinished:
            raise ManifestError(f"{self.path} is an export whose verification did not finish; export the model again.")

    @property
    def model(self) -> Path:
        """The path of the ONNX file."""
        return self.path / MODEL_NAME

    def has(self, name: str) -> bool:
        """Whether the manifest lists a file."""
        return name in self.manifest.files

    def open(self, name: str) -> BinaryIO:
        """Open a listed file. Raises ManifestError if the file is not listed, or is not as the manifest says."""
        if not self.has(name):
            raise ManifestError(f"{name} is not listed in {self.path / MANIFEST_NAME}; export the model again.")
        return open_listed(self.path, name, self.manifest.files[name])

    def read_text(self, name: str, most: int = _MOST_TEXT) -> str:
        """Read a listed file. Raises ManifestError if the file is not listed, not UTF-8 or larger than `most` bytes."""
        if self.has(name) and self.manifest.files[name].size > most:
            raise ManifestError(
                f"{self.path / name} has {self.manifest.files[name].size} bytes, but may have at most {most}; "
                "do not use this folder."
            )
        try:
            with TextIOWrapper(self.open(name), encoding="utf-8") as stream:
                return stream.read()
        except UnicodeDecodeError:
            raise ManifestError(f"{self.path / name} is not UTF-8; export or copy the folder again.") from None
        except OSError as error:
            raise ManifestError(f"{self.path / name} cannot be read: {error.strerror or error}.") from None

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a file's JSON object; {} if the file is not listed. Raises ManifestError for anything else."""
        if not self.has(name):
            return {}
        try:
            data = json.loads(self.read_text(name, _MOST_JSON))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{self.path / name} is not JSON ({error}); export or copy the folder again.") from None
        if not isinstance(data, dict):
            raise ManifestError(f"{self.path / name} holds a {type(data).__name__}, not an object; export it again.")
        return data
