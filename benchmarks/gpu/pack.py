"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network. Needs the package index.

    python -m benchmarks.gpu pack [--sm 90] [--python 3.12] [--into out/pack] [--only COMPONENT ...]

Writes pack-COMPONENT.tar.xz files for x86-64 Linux, below 60 MiB each for one GPU. On the host: python3 -m
benchmarks.gpu --pack ARCHIVE ...

folders: exports of the bundled model with the CPU's tokens. packages: what the runtime needs beside numpy and
tokenizers. onnxruntime: with its CUDA provider. tensorrt: TensorRT-RTX under TensorRT's Python bindings, an unsupported
mix; that it has code for a GPU does not mean that its support matrix lists the GPU.

Exit code: 0 if every requested component was packed, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.archives import LIBRARIES, SUFFIX, write
from benchmarks.gpu.fatbin import keep_only
from benchmarks.gpu.models import TOKENS, record_tokens, requests
from benchmarks.gpu.runner import ROOT, say
from topw_deploy.errors import BenchmarkError, TopWError
from topw_deploy.plugins import compile_native

_PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 16, -1)), "manylinux2014_x86_64", "linux_x86_64")
_LIMIT = 600  # seconds per wheel
FORMS = {
    "float32-standard": ("--target", "tensorrt", "--max-length", "512"),
    "float16-gqa": ("--dtype", "fp16"),
    "int4-gqa": ("--dtype", "int4", "--compute-dtype", "fp16"),
    "float16-standard": ("--dtype", "fp16", "--target", "tensorrt", "--max-length", "512"),
}
"""Folder -> options of `topw export tiny`. float32 uses standard operators, as GroupQueryAttention on CUDA takes half
precision only."""

REHEARSED = "float16-gqa"
PACKAGES = ("msgspec==0.22.0", "minijinja==3.1.0")
ONNXRUNTIME = "onnxruntime-gpu==1.31.1"
_PROVIDER, _SHARED = "libonnxruntime_providers_cuda.so", "libonnxruntime_providers_shared.so"
_UNUSED = ("transformers", "tools", "quantization", "datasets", "backend")
RTX = "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0"
BINDINGS = "tensorrt-cu13-bindings==11.4.0.106"
_BUILDER, _PARSER = "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"
_NO_PLUGINS = 'extern "C" bool initLibNvInferPlugins(void *, const char *) { return true; }\n'


@dataclass(frozen=True)
class Host:
    """The host. sm: 90 for sm_90. python: such as "3.12". rehearse: pack one folder, unverified and with few tokens."""

    sm: int = 90
    python: str = "3.12"
    rehearse: bool = False


def fetch(requirement: str, host: Host, into: Path) -> str:
    """Extract a wheel, which pip downloads, into a folder. Returns its version. Raises BenchmarkError."""
    with tempfile.TemporaryDirectory(prefix="topw-wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", host.python, "-d", scratch]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        _run([*command, requirement], f"pip does not fetch {requirement} for Python {host.python}")
        (wheel,) = Path(scratch).glob("*.whl")
        try:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(into)
        except zipfile.BadZipFile as error:
            raise BenchmarkError(f"{wheel.name} is not a wheel ({error}); fetch it again.") from None
        return wheel.name.split("-")[1]


def _run(command: Sequence[str], failure: str, given: str = "") -> None:
    """Run a command. Raises BenchmarkError with the last line of its output."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, errors="replace", timeout=_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{failure}: {error}") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchmarkError(f"{failure}: {words[-1][:500]}")


def stage_folders(tree: Path, host: Host) -> str:
    """Export the bundled model in every form, and record the CPU's tokens of each."""
    names = [REHEARSED] if host.rehearse else list(FORMS)
    for name in names:
        options = [*FORMS[name], "--quiet", *(["--no-verify"] if host.rehearse else [])]
        command = [sys.executable, "-m", "topw_deploy", "export", "tiny", str(tree / name), *options]
        _run(command, f"topw export tiny {' '.join(options)} failed")
        try:
            record_tokens(tree / name, requests(1, 16) if host.rehearse else requests(3, TOKENS))
        except TopWError as error:
            raise BenchmarkError(f"the packed folder {name} does not run on this CPU: {error}") from None
    return ", ".join(names)


def stage_packages(tree: Path, host: Host) -> str:
    for requirement in PACKAGES:
        fetch(requirement, host, tree)
    return ", ".join(PACKAGES)


def stage_onnxruntime(tree: Path, host: Host) -> str:
    """Without other providers, the C library, and subpackages that inference does not import."""
    version = fetch(ONNXRUNTIME, host, tree)
    package = tree / "onnxruntime"
    for name in _UNUSED:
        shutil.rmtree(package / name, ignore_errors=True)
    for library in (package / "capi").glob("libonnxruntime*"):
        if library.name not in (_PROVIDER, _SHARED):
            library.unlink()
    return f"{version}; {keep_only(package / 'capi' / _PROVIDER, host.sm)}"


def stage_tensorrt(tree: Path, host: Host) -> str:
    """Bindings in `tree`, libraries in its LIBRARIES."""
    folder = tree / LIBRARIES
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="topw-rtx-", dir=tree.parent) as scratch:
        fetch(RTX, host, Path(scratch))
        found = {name: next(Path(scratch).rglob(f"{name}.*"), None) for name in (_BUILDER, _PARSER)}
        for name, library in found.items():
            if library is None:
                raise BenchmarkError(f"{RTX} has no {name}.*; its layout changed, so nothing of it is packed.")
            library.rename(folder / library.name)
            links = {_BUILDER: (_BUILDER, "libnvinfer.so.11"), _PARSER: ("libnvonnxparser.so.11",)}[name]
            for link in links:
                (folder / link).symlink_to(library.name)
    code = keep_only((folder / _BUILDER).resolve(), host.sm)
    plugins = folder / "libnvinfer_plugin.so.11"  # which the bindings load
    try:
        compiler = compile_native.find_compiler()
    except compile_native.NotBuiltError as error:
        raise BenchmarkError(f"the empty {plugins.name} does not compile: {error}") from None
    command = [*compiler, "-xc++", "-", "-shared", "-fPIC", "-o", str(plugins)]
    _run(command, f"the empty {plugins.name} does not compile", _NO_PLUGINS)
    return f"bindings {fetch(BINDINGS, host, tree)}; {code}"


COMPONENTS: dict[str, Callable[[Path, Host], str]] = {
    "folders": stage_folders,
    "packages": stage_packages,
    "onnxruntime": stage_onnxruntime,
    "tensorrt": stage_tensorrt,
}
"""Component -> a function that fills a folder and returns what is in it, or raises BenchmarkError."""


def pack(into: Path, names: Sequence[str], host: Host) -> int:
    """Pack the named components. Returns the exit code."""
    into.mkdir(parents=True, exist_ok=True)
    code = 0
    for name in names:
        started, archive = time.monotonic(), into / f"pack-{name}{SUFFIX}"
        archive.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="topw-pack-") as folder:
            tree = Path(folder, "tree")
            tree.mkdir()
            try:
                contents = COMPONENTS[name](tree, host)
            except BenchmarkError as error:
                say(f"NOT PACKED {name}: {error}")
                code = 1
                continue
            write(tree, archive)
        size = archive.stat().st_size / 2**20
        say(f"{archive}: {size:.1f} MiB, {time.monotonic() - started:.0f} s: {contents}")
    return code


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sm", type=int, default=90, help="the host's GPU; default: 90, an H100's or H200's sm_90")
    parser.add_argument("--python", default="3.12", help="the host's Python; default: 3.12")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "pack", help="default: out/pack of the checkout")
    parser.add_argument("--only", nargs="+", choices=tuple(COMPONENTS), default=list(COMPONENTS), metavar="COMPONENT")
    parser.add_argument("--rehearse", action="store_true", help="pack only one folder, unverified: takes a minute")
    given = parser.parse_args(words)
    return pack(given.into, given.only, Host(given.sm, given.python, given.rehearse))
