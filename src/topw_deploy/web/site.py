"""Write a static site: a page, the exported model, and the JavaScript libraries that run it.

The page loads the libraries from a CDN, whose files browsers check by their hashes, or from copies in the site.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.folders import atomic_folder, open_regular
from topw_deploy.install import major_minor
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, check_hashes, load_decoder_manifest, open_listed
from topw_deploy.text import decimal_size

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
_LICENCES = "".join(
    f"{file.package} {file.version}: {licence}, https://www.npmjs.com/package/{file.package}\n"
    for file, licence in ((SCRIPT, "MIT"), (TOKENIZERS, "Apache-2.0"))
)


def read_packages(folder: Path) -> Iterator[tuple[LibraryFile, bytes]]:
    """Yield (file, its bytes) of the packages that npm installed.

    folder: a `node_modules` folder, or the folder that contains it.

    Raises ParameterError, with the command to run, for a file that is missing or of another version.
    """
    root = folder / "node_modules" if (folder / "node_modules").is_dir() else folder
    wanted = " ".join(sorted({f"{file.package}@{file.version}" for file in FILES}))
    for file in FILES:
        path = root / file.package / file.path
        why = f"is not the file of {file.package} {file.version}"
        try:
            with open_regular(path, follow=True) as stream:
                data = stream.read()
        except OSError as error:
            data, why = b"", f"cannot be read ({error.strerror})"
        if integrity(data) != file.integrity:
            raise ParameterError(
                f"runtime is {str(folder)!r}, but {path} {why}; run `npm install {wanted}` and give its node_modules.",
                "runtime",
            )
        yield file, data


def integrity(data: bytes) -> str:
    """The hash of `data`, in the form of `LibraryFile.integrity`."""
    return f"sha384-{base64.b64encode(hashlib.sha384(data).digest()).decode()}"


MODEL = "model"
MARKER = "topw_site.json"
"""Name of the file that marks a folder as a site. It is written last."""
_SITE_FOLDER = Path(__file__).parent / "site"
_STYLE = Path(__file__).parents[1] / "serve" / "page" / "style.css"  # of the page of `topw serve`
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "worker-src": "'self'",
    "style-src": "'self'",
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A written site.

    bytes: size of all files.
    model_bytes: size of the graph and its weights.
    outside: whether the page loads libraries from a CDN.
    notes: warnings about speed and tokens, one sentence each.
    """

    folder: Path
    bytes: int
    model_bytes: int
    outside: bool
    notes: tuple[str, ...]


def write_site(
    model: Path,
    output: Path,
    *,
    runtime: Path | None = None,
    title: str | None = None,
    prompt: str = "The sea is",
    overwrite: bool = False,
) -> Site:
    """Write a static site that runs the exported folder `model` in the browser.

    runtime: a `node_modules` with the libraries, which are copied into the site; None for a page that loads them from a
        CDN and checks their hashes.
    title: title of the page; None for the model's name.
    prompt: text in the page's field for the prompt.
    overwrite: replace an earlier site.

    Raises ManifestError, UnsupportedModelError for a model that browsers cannot run, ParameterError for an unusable
    `runtime`, ExportError if the site cannot be written.
    """
    manifest = load_decoder_manifest(model)
    check_runs(manifest, model)
    size = graph_bytes(manifest)
    found = list(read_packages(runtime)) if runtime is not None else []
    with atomic_folder(output, marker=MARKER, kind="a site of `topw web`", overwrite=overwrite) as folder:
        shutil.copytree(_SITE_FOLDER, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        shutil.copyfile(_STYLE, folder / _STYLE.name)
        for name, entry in manifest.files.items():
            (folder / MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            with open_listed(model, name, entry) as read, (folder / MODEL / name).open("wb") as write:
                shutil.copyfileobj(read, write)
        check_hashes(folder / MODEL, manifest)
        (folder / MODEL / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        name = manifest.source.get("id", "").rstrip("/").rpartition("/")[2] or manifest.decoder.model_type
        page = _page(manifest, size, title or name, prompt, outside=not found)
        (folder / "index.html").write_text(page, encoding="utf-8")
        if found:
            (folder / FOLDER).mkdir()
            (folder / FOLDER / "LICENCES.txt").write_text(_LICENCES, encoding="utf-8")
        for file, data in found:
            (folder / file.copy_path).write_bytes(data)

        def address(file: LibraryFile) -> dict[str, str]:
            return {"url": file.copy_path} if found else {"url": file.url, "integrity": file.integrity}

        libraries = {
            "onnxruntime": {"script": address(SCRIPT), "wasm": address(WASM)},
            "tokenizers": {"script": address(TOKENIZERS)},
        }
        loaded = sum(entry.size for entry in manifest.files.values())
        about = {"version": 1, "bytes": loaded, "libraries": libraries}
        (folder / MARKER).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Site(folder=output, bytes=total, model_bytes=size, outside=not found, notes=tuple(notes(manifest)))


def _page(manifest: DecoderManifest, size: int, title: str, prompt: str, *, outside: bool) -> str:
    """The HTML of the page, from the package's template.

    size: bytes of the graph and its weights.
    """
    policy = {**_POLICY, "connect-src": f"'self' {CDN}"} if outside else _POLICY
    bits = manifest.decoder.quantisation.get("bits")
    kind = f", {bits}-bit weights" if bits else ""
    about = f"A language model of {decimal_size(size)}{kind}. It runs in this browser; nothing that you type leaves it."
    values = {
        "POLICY": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "TITLE": title,
        "ABOUT": about,
        "PROMPT": prompt,
    }
    first, *rest = (_SITE_FOLDER / "index.html").read_text(encoding="utf-8").split("@")
    # In the template, @NAME@ stands for a value. Values are not searched for names.
    return first + "".join(html.escape(values[part]) if place % 2 == 0 else part for place, part in enumerate(rest))


MOST_BYTES = 2_000_000_000
"""Maximum bytes of a graph with its weights. WebAssembly has 4 GiB for weights, their packed copies, and the cache."""

_STATE_TYPES = ("float", "float16", "uint8", "int8", "int32", "int64", "bool")  # the JavaScript library can hold these


def graph_bytes(manifest: DecoderManifest) -> int:
    """Bytes of the graph and its weights: of all files but the configuration and the tokenizer."""
    return sum(entry.size for name, entry in manifest.files.items() if not name.endswith((".json", ".jinja")))


def check_runs(manifest: DecoderManifest, folder: Path) -> None:
    """Raises UnsupportedModelError for an export that browsers cannot run."""
    half = manifest.decoder.weights.get("float16", 0)  # onnxruntime converts them to float32 when it opens the graph
    size = graph_bytes(manifest) + half
    least = manifest.decoder.least_onnxruntime
    reason = ""
    if size > MOST_BYTES:
        reason = (
            f"has {decimal_size(size)} of weights{', as float32' if half else ''}, but a browser can hold at most "
            f"{decimal_size(MOST_BYTES)}; export with --dtype int8 or int4, or a smaller model."
        )
    elif "tokenizer.json" not in manifest.files:
        reason = "has no tokenizer.json, which the page needs; export the model again from a folder with a tokenizer."
    elif other := {state.dtype for state in manifest.decoder.states}.difference(_STATE_TYPES):
        reason = (
            f"has a cache of the element type {min(other)}, which JavaScript lacks; export with --dtype fp32 or fp16."
        )
    elif least and major_minor(least) > major_minor(ONNXRUNTIME_VERSION):
        reason = (
            f"needs onnxruntime {least}, but the page has onnxruntime-web {ONNXRUNTIME_VERSION}; export without what "
            "needs the newer one, such as with --no-window-cache."
        )
    elif manifest.source.get("route") == "import" and any(spec.name == "logits" for spec in manifest.outputs):
        reason = (
            "is an imported decoder with logits, whose sampler inputs have defaults, which onnxruntime for JavaScript "
            "cannot change; import it again without --with-logits."
        )
    if reason:
        raise UnsupportedModelError(f"{folder} {reason}")


def notes(manifest: DecoderManifest) -> list[str]:
    """Warnings about speed and tokens for the author of a site, one sentence each."""
    weights, quantisation = manifest.decoder.weights, manifest.decoder.quantisation
    packed = weights.get("uint8", 0) + weights.get("int8", 0)
    if not quantisation and packed <= sum(weights.values()) / 2:
        return []
    bits = quantisation.get("bits")
    what = "packed weights" if bits is None else f"{bits}-bit weights"
    found = [
        f"onnxruntime-web multiplies {what} 20 to 30 times slower than float32 ones; export with --dtype fp32 where "
        "speed matters more than the size of the download."
    ]
    if quantisation.get("accuracy_level", 4) == 4:
        found.append(
            "outside browsers onnxruntime may round the activations of these products to 8 bits, so the tokens differ "
            "from Python's; export with --accuracy-level 1 for equal ones."
        )
    return found
