"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network. Needs the package index.

    python -m benchmarks.gpu pack [--limit 60MiB] [--sm 90] [--python 3.12] [--into out/pack] [--only COMPONENT ...]

Writes .tar.xz files, and pack.json with their contents, sizes, SHA-256 and missing components. On the host: python3 -m
benchmarks.gpu --pack ARCHIVE ...

Exit code: 0 if every requested component was packed, else 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.archives import FORMAT, INDEX, SUFFIX, write
from benchmarks.gpu.fatbin import Kept, keep_only
from benchmarks.gpu.ways import TOKENS, record_tokens, requests
from topw_deploy import __version__
from topw_deploy.errors import BenchmarkError, ParameterError, TopWError
from topw_deploy.plugins import compile_native
from topw_deploy.text import parse_size

COMPONENTS = ("folders", "packages", "onnxruntime", "tensorrt")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Packed:
    """A staged component.

    python_path, linker_path: subfolders for PYTHONPATH and LD_LIBRARY_PATH, or ".".
    cuda_libraries: whether it needs CUDA's libraries from PyTorch's packages.
    gpu_code: the GPU code kept of each library.
    notes: for users.
    """

    version: str
    python_path: tuple[str, ...] = ()
    linker_path: tuple[str, ...] = ()
    cuda_libraries: bool = False
    gpu_code: dict[str, Kept] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self, name: str) -> dict[str, Any]:
        """The index entry, with paths relative to all components' folder."""
        found = asdict(self)
        for key in ("python_path", "linker_path"):
            found[key] = [name if place == "." else f"{name}/{place}" for place in found[key]]
        return found


_PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 16, -1)), "manylinux2014_x86_64", "linux_x86_64")
_LIMIT = 600  # seconds per wheel


@dataclass(frozen=True)
class Host:
    """An x86-64 Linux host with glibc 2.39 or newer. sm: 90 for sm_90. python: such as "3.12"."""

    sm: int
    python: str


def download_wheel(requirement: str, host: Host, into: Path) -> Path:
    """Download a wheel with pip. Raises BenchmarkError with pip's message."""
    before = set(into.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", host.python, "-d", str(into)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    try:
        done = subprocess.run([*command, requirement], capture_output=True, text=True, errors="replace", timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"pip did not fetch {requirement} within {_LIMIT} s; try again.") from None
    found = set(into.glob("*.whl")) - before
    if done.returncode != 0 or len(found) != 1:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchmarkError(f"pip does not fetch {requirement} for Python {host.python}: {words[-1][:300]}")
    return found.pop()


def extract_wheel(wheel: Path, into: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Extract the wanted files of a wheel. Raises BenchmarkError for a file that is not a wheel."""
    try:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into, [name for name in file.namelist() if wanted(name)])
    except zipfile.BadZipFile as error:
        raise BenchmarkError(f"{wheel.name} is not a wheel ({error}); fetch it again.") from None


def version(wheel: Path) -> str:
    """The version in a wheel's name."""
    return wheel.name.split("-")[1]


FORMS = {
    "float32-standard": ("--target", "tensorrt", "--max-length", "512"),
    "float16-gqa": ("--dtype", "fp16"),
    "int4-gqa": ("--dtype", "int4", "--compute-dtype", "fp16"),
    "float16-standard": ("--dtype", "fp16", "--target", "tensorrt", "--max-length", "512"),
}
"""Folder -> options of `topw export tiny`. float32 uses standard operators, as GroupQueryAttention on CUDA takes half
precision only."""


def stage_folders(
    tree: Path, names: Sequence[str], *, verify: bool = True, seeds: int = 3, new_tokens: int = TOKENS
) -> Packed:
    """Export the named forms into `tree` and record the CPU's tokens of each.

    verify: verify the exports.
    seeds, new_tokens: of the recorded requests.

    Raises BenchmarkError with the exporter's message.
    """
    tree.mkdir(parents=True)
    for name in names:
        _export(tree / name, [*FORMS[name], *([] if verify else ["--no-verify"])])
        try:
            record_tokens(tree / name, requests(seeds, new_tokens))
        except TopWError as error:
            raise BenchmarkError(f"the packed folder {name} does not run on this CPU: {error}") from None
    return Packed(f"topw-deploy {__version__}", notes=() if verify else ("These exports were not verified.",))


def _export(folder: Path, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "topw_deploy", "export", "tiny", str(folder), *options, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchmarkError(f"topw export tiny {' '.join(options)} failed: {words[-1][:500]}")


REQUIREMENT = "onnxruntime-gpu==1.31.1"
_PROVIDER = "libonnxruntime_providers_cuda.so"
_SHARED = "libonnxruntime_providers_shared.so"
_UNUSED = ("transformers", "tools", "quantization", "datasets", "backend")


def stage_onnxruntime(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage the component, without other providers, the C library, and subpackages that inference does not import.

    Raises BenchmarkError if the package is unavailable or has no code for the host's GPU.
    """
    wheel = download_wheel(REQUIREMENT, host, scratch)
    extract_wheel(wheel, tree)
    package = tree / "onnxruntime"
    for name in _UNUSED:
        shutil.rmtree(package / name, ignore_errors=True)
    for library in (package / "capi").glob("libonnxruntime*"):
        if library.name not in (_PROVIDER, _SHARED):
            library.unlink()
    kept = keep_only(package / "capi" / _PROVIDER, host.sm)
    return Packed(version(wheel), python_path=(".",), cuda_libraries=True, gpu_code={_PROVIDER: kept})


REQUIREMENTS = ("msgspec==0.22.0", "minijinja==3.1.0")


def stage_packages(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage the component. Raises BenchmarkError if a package is unavailable."""
    for requirement in REQUIREMENTS:
        extract_wheel(download_wheel(requirement, host, scratch), tree)
    return Packed(", ".join(REQUIREMENTS), python_path=(".",))


LIBRARIES = "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0"
BINDINGS = "tensorrt-cu13-bindings==11.4.0.106"
_BUILDER, _PARSER = "libtensorrt_rtx.so.", "libtensorrt_onnxparser_rtx.so."
_NOTE = "The library has code for this GPU, which does not mean that its support matrix lists the GPU."
_PLUGINS = 'extern "C" bool initLibNvInferPlugins(void *, const char *) { return true; }\n'


def stage_tensorrt(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage bindings in `tree` and libraries in its `lib`.

    Raises BenchmarkError if a package is unavailable or has no code for the host's GPU.
    """
    wheel = download_wheel(LIBRARIES, host, scratch)
    unpacked, folder = scratch / "rtx", tree / "lib"
    extract_wheel(wheel, unpacked, lambda name: _BUILDER in name or _PARSER in name)
    folder.mkdir(parents=True)
    found = {}
    for prefix in (_BUILDER, _PARSER):
        library = next(unpacked.rglob(f"{prefix}*"), None)
        if library is None:
            raise BenchmarkError(f"{LIBRARIES} has no {prefix}*; its layout changed, so nothing of it is packed.")
        found[prefix] = library.rename(folder / library.name)
    builder = found[_BUILDER]
    kept = keep_only(builder, host.sm)
    links = {"libtensorrt_rtx.so": builder, "libnvinfer.so.11": builder, "libnvonnxparser.so.11": found[_PARSER]}
    for name, library in links.items():
        (folder / name).symlink_to(library.name)
    _empty_plugins(folder / "libnvinfer_plugin.so.11")
    bindings = download_wheel(BINDINGS, host, scratch)
    extract_wheel(bindings, tree)
    versions = f"TensorRT-RTX {builder.name.removeprefix(_BUILDER)}, bindings {version(bindings)}"
    return Packed(versions, python_path=(".",), linker_path=("lib",), gpu_code={builder.name: kept}, notes=(_NOTE,))


def _empty_plugins(path: Path) -> None:
    """Compile an empty plugin library, which the bindings load. Raises BenchmarkError if that fails."""
    try:
        command = [*compile_native.find_compiler(), "-xc++", "-", "-shared", "-fPIC", "-o", str(path)]
        subprocess.run(command, input=_PLUGINS, capture_output=True, text=True, check=True)
    except (compile_native.NotBuiltError, OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or error
        raise BenchmarkError(f"the empty {path.name} does not compile: {words}") from None


_PACKAGES: dict[str, Callable[[Path, Path, Host], Packed]] = {
    "packages": stage_packages,
    "onnxruntime": stage_onnxruntime,
    "tensorrt": stage_tensorrt,
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", default="60MiB", help="maximum size of an archive; default: 60MiB")
    parser.add_argument("--sm", type=int, default=90, help="the host's GPU; default: 90, an H100's or H200's sm_90")
    parser.add_argument("--python", default="3.12", help="the host's Python; default: 3.12")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "pack", help="default: out/pack of the checkout")
    parser.add_argument("--only", nargs="+", choices=COMPONENTS, default=list(COMPONENTS), metavar="COMPONENT",
                        help=", ".join(COMPONENTS))  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="pack only one folder, unverified: takes a minute")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    given = arguments().parse_args(words)
    try:
        limit = parse_size(given.limit)
        return pack(given.into, given.only, limit, Host(given.sm, given.python), rehearse=given.rehearse)
    except (BenchmarkError, ParameterError) as error:
        raise SystemExit(str(error)) from None


def pack(into: Path, names: Sequence[str], limit: int, host: Host, *, rehearse: bool = False) -> int:
    """Pack the named components. Returns the exit code. Raises BenchmarkError for a bad folder or limit."""
    _clear(into)
    index: dict[str, Any] = {
        "format": FORMAT, "sm": host.sm, "python": host.python, "limit": limit, "rehearsal": rehearse,
        "archives": [], "components": {}, "slices": {}, "absent": {},
    }  # fmt: skip
    for name in [name for name in COMPONENTS if name in names]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="topw-pack-") as folder:
            tree = Path(folder, "tree")
            tree.mkdir()
            try:
                packed = _stage(name, tree / name, Path(folder), host, rehearse)
            except BenchmarkError as error:
                index["absent"][name] = str(error)
                _say(f"NOT PACKED {name}: {error}")
                continue
            _add(index, name, packed, tree, into, limit)
        _say(f"{name}: {_sizes(index, name)}, {time.monotonic() - started:.0f} s")
    (into / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    _say(f"{into / INDEX}")
    return 1 if index["absent"] else 0


def _stage(name: str, tree: Path, scratch: Path, host: Host, rehearse: bool) -> Packed:
    if name != "folders":
        return _PACKAGES[name](tree, scratch, host)
    if rehearse:
        return stage_folders(tree, ["float16-gqa"], verify=False, seeds=1, new_tokens=16)
    return stage_folders(tree, list(FORMS))


def _add(index: dict[str, Any], name: str, packed: Packed, tree: Path, into: Path, limit: int) -> None:
    written = write(tree, into, f"pack-{name}", limit)
    files = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
    index["archives"] += written.archives
    index["slices"] |= written.slices
    index["components"][name] = {
        **packed.as_json(name),
        "archives": [archive["name"] for archive in written.archives],
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "contents": sorted({path.relative_to(tree / name).parts[0] for path in files}),
    }


def _clear(into: Path) -> None:
    """Delete an earlier call's files. Raises BenchmarkError if the folder has other files."""
    into.mkdir(parents=True, exist_ok=True)
    for path in into.iterdir():
        if path.name != INDEX and not (path.name.startswith("pack-") and path.name.endswith(SUFFIX)):
            raise BenchmarkError(
                f"{into} holds {path.name}, which this command did not write; give an empty folder with --into."
            )
    for path in into.iterdir():
        path.unlink()


def _sizes(index: dict[str, Any], name: str) -> str:
    mine = index["components"][name]["archives"]
    return ", ".join(f"{a['name']} {a['bytes'] / 2**20:.1f} MiB" for a in index["archives"] if a["name"] in mine)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
