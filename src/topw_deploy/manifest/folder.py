"""Read and write the manifest of a folder, and compare the folder's files with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from topw_deploy.errors import ManifestError
from topw_deploy.files import NotRegularError, open_inside, open_regular, replace_file, special_files
from topw_deploy.manifest.contents import MANIFEST_NAME, DecoderManifest, FileEntry, Manifest, SamplerManifest
from topw_deploy.manifest.parse import manifest_from_json

_MOST_BYTES = 16 << 20  # of a manifest, which has a few KB
_ENGINES = "engines"  # a subfolder whose files are checked when they are used (tensorrt/engines.py)


def load_manifest(folder: str | Path) -> DecoderManifest | SamplerManifest:
    """Read the manifest of `folder`, which may be a link, and check the sizes of the files that it lists.

    Hashes are not checked, because loading must not read gigabytes; use `check_hashes`.
    Raises ManifestError for a missing or malformed manifest, for a listed file that is missing, not regular, linked,
    outside the folder or of another size, and for any pipe, socket or device in the folder.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        with open_inside(folder, MANIFEST_NAME) as stream:
            raw = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {MANIFEST_NAME}: it is not a finished export; run topw-export.") from None
    except NotADirectoryError:
        raise ManifestError(f"{folder} is a file; give the folder that holds {MANIFEST_NAME}.") from None
    except NotRegularError as error:
        raise ManifestError(
            f"{path} is {error.kind}, not a regular file; copy the file itself there, or export the model again."
        ) from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # a path that no system call accepts, such as one with a zero byte
        raise ManifestError(f"{str(path)!r} is not a path ({error}); give the folder that topw-export wrote.") from None
    if len(raw) > _MOST_BYTES:
        raise ManifestError(
            f"{path} is larger than {_MOST_BYTES} bytes, so it is not a manifest; export the model again."
        )
    try:
        manifest = manifest_from_json(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ManifestError(f"{path} is not UTF-8; export the model again.") from None
    for name, entry in manifest.files.items():
        with open_listed(folder, name, entry):
            pass
    _refuse_special_files(folder)
    return manifest


def load_decoder_manifest(folder: str | Path) -> DecoderManifest:
    """Read the manifest like `load_manifest`. Raises its errors, and ManifestError if the folder has no decoder."""
    manifest = load_manifest(folder)
    if not isinstance(manifest, DecoderManifest):
        raise ManifestError(f"{folder} holds a sampler without a decoder; give the folder of an exported model.")
    return manifest


def open_listed(folder: Path, name: str, entry: FileEntry) -> BinaryIO:
    """Open the file `name` of a manifest, and check its kind and size.

    Raises ManifestError if the file is missing, unreadable, not regular, linked, or of another size than in `entry`.
    """
    try:
        stream = open_inside(folder, name)
    except NotRegularError as error:
        if error.kind == "a symbolic link":
            raise ManifestError(
                f"{name} is reached through a symbolic link, which onnxruntime refuses; copy the file itself into "
                f"{folder}."
            ) from None
        raise ManifestError(
            f"{name} in {folder} is {error.kind}, not a regular file; export or copy the folder again."
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(
            f"{name} is listed in {MANIFEST_NAME} but missing from {folder}; export or copy it again."
        ) from None
    except OSError as error:
        raise ManifestError(f"{folder / name} cannot be read: {error.strerror or error}.") from None
    size = os.fstat(stream.fileno()).st_size
    if size != entry.size:
        stream.close()
        raise ManifestError(
            f"{name} has {size} bytes, the manifest says {entry.size}: "
            "it was changed or cut short; export or copy the folder again."
        )
    return stream


def check_hashes(folder: str | Path, manifest: Manifest) -> None:
    """Compare each listed file with its SHA-256. Raises ManifestError for the first that differs or cannot be read."""
    for name, entry in manifest.files.items():
        try:
            with open_listed(Path(folder), name, entry) as stream:
                found = sha256_of_stream(stream)
        except OSError as error:
            raise ManifestError(f"{Path(folder) / name} cannot be read: {error.strerror or error}.") from None
        if found != entry.sha256:
            raise ManifestError(
                f"{name} has SHA-256 {found[:16]}…, the manifest says {entry.sha256[:16]}…: "
                "the file was changed; export or copy the folder again."
            )


def describe_files(
    folder: str | Path, names: Iterable[str], known: dict[str, str] | None = None
) -> dict[str, FileEntry]:
    """Return the hash and the size of each named file. known: hashes that are already computed, by name."""
    folder, known = Path(folder), known or {}
    return {
        name: FileEntry(known.get(name) or sha256_of(folder / name), (folder / name).stat().st_size)
        for name in sorted(names)
    }


def save_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest into `folder` in one step, so that readers never see half of it."""
    with replace_file(Path(folder) / MANIFEST_NAME) as stream:
        stream.write(manifest.to_json().encode("utf-8"))


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a regular file. Raises OSError for links and other kinds of file."""
    with open_regular(path) as stream:
        return sha256_of_stream(stream)


def sha256_of_stream(stream: BinaryIO) -> str:
    """Return the hexadecimal SHA-256 of an open file, from its current position on."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO has readinto


def _refuse_special_files(folder: Path) -> None:
    """Raise ManifestError for a pipe, socket or device: a graph can name any file as its weights, and some versions of
    onnxruntime open any kind.
    """
    try:
        for path, kind in special_files(folder, deep=True, without=_ENGINES):
            raise ManifestError(
                f"{path} is {kind}, and a model folder holds regular files only; remove it, or copy the folder's files "
                "elsewhere."
            )
    except OSError as error:
        raise ManifestError(f"{error.filename or folder} cannot be read: {error.strerror or error}.") from None
