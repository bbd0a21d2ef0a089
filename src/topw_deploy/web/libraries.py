"""The JavaScript libraries of a site: their fixed versions and the hashes of their files.

A site loads the libraries from a CDN, whose files browsers check by the hashes, or has copies of them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.folders import open_regular

CDN = "https://cdn.jsdelivr.net"
FOLDER = "runtime"
ONNXRUNTIME_VERSION = "1.30.0"


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A file of an npm package.

    integrity: SHA-384 in base64, as in the attribute `integrity` of HTML.
    """

    package: str
    version: str
    path: str
    integrity: str

    @property
    def url(self) -> str:
        return f"{CDN}/npm/{self.package}@{self.version}/{self.path}"

    @property
    def copy_path(self) -> str:
        """Path of the file in a site that has copies."""
        return f"{FOLDER}/{self.path.rpartition('/')[2]}"


SCRIPT = LibraryFile(
    "onnxruntime-web",
    ONNXRUNTIME_VERSION,
    "dist/ort.wasm.bundle.min.mjs",
    "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
)
WASM = LibraryFile(
    "onnxruntime-web",
    ONNXRUNTIME_VERSION,
    "dist/ort-wasm-simd-threaded.wasm",
    "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
)
TOKENIZERS = LibraryFile(
    "@huggingface/tokenizers",
    "0.2.0",
    "dist/tokenizers.min.mjs",
    "sha384-Tl2lMbeE3RCGFLOUGQ7LhvaagysxiOw/9dulz2sD6jxNa1MckRJQBbYdVHhOoqEs",
)
FILES = (SCRIPT, WASM, TOKENIZERS)
LICENCES = {SCRIPT.package: "MIT", TOKENIZERS.package: "Apache-2.0"}


def library_addresses(*, from_copies: bool) -> dict[str, Any]:
    """Where the page finds the libraries, for topw_site.json.

    from_copies: whether the site has copies, which the page then loads instead of the CDN's files.
    """

    def of(file: LibraryFile) -> dict[str, str]:
        return {"url": file.copy_path} if from_copies else {"url": file.url, "integrity": file.integrity}

    return {"onnxruntime": {"script": of(SCRIPT), "wasm": of(WASM)}, "tokenizers": {"script": of(TOKENIZERS)}}


def read_packages(folder: Path) -> Iterator[tuple[LibraryFile, bytes]]:
    """Yield (file, its bytes) of the packages that npm installed.

    folder: a `node_modules` folder, or the folder that contains it.

    Raises ParameterError, with the command to run, for a file that is missing or of another version.
    """
    root = folder / "node_modules" if (folder / "node_modules").is_dir() else folder
    wanted = " ".join(sorted({f"{file.package}@{file.version}" for file in FILES}))
    for file in FILES:
        path = root / file.package / file.path
        try:
            with open_regular(path, follow=True) as stream:
                data = stream.read()
        except OSError as error:
            raise ParameterError(
                f"runtime is {str(folder)!r}, but {path} cannot be read ({error.strerror}); run `npm install {wanted}` "
                "and give its node_modules.",
                "runtime",
            ) from None
        if integrity(data) != file.integrity:
            raise ParameterError(
                f"runtime is {str(folder)!r}, but {path} is not the file of {file.package} {file.version}; run "
                f"`npm install {wanted}` and give its node_modules.",
                "runtime",
            )
        yield file, data


def integrity(data: bytes) -> str:
    """The hash of `data`, in the form of `LibraryFile.integrity`."""
    return f"sha384-{base64.b64encode(hashlib.sha384(data).digest()).decode()}"


def licence_notice() -> str:
    """The text that names the licences of the copied files."""
    versions = {file.package: file.version for file in FILES}
    return "".join(
        f"{package} {versions[package]}: {licence}, https://www.npmjs.com/package/{package}\n"
        for package, licence in LICENCES.items()
    )
