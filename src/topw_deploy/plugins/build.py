"""Compiling the native library. setup.py runs this by its path while the package itself is not importable yet, and
`python -m topw_deploy.plugins.build` builds it anew in a source tree. Standard library only."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
LIBRARY_NAME = {"darwin": "libtopw.dylib", "win32": "topw.dll"}.get(sys.platform, "libtopw.so")

# One set for every file: those that need an instruction set ask for it themselves, and it is chosen at run time.
# No contraction to fused operations: what decides is rounded alike on every processor.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off")
# Nothing of the C++ library is left to find at run time, and none of it is shown to other libraries of the process.
_LINUX = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")

LONGEST = 3600  # seconds that a compiler may take: kernels for ten GPUs on a busy machine are a quarter of it
_COMPILERS = ("c++", "g++", "clang++")


class NotBuiltError(Exception):
    """Why there is no library now, in one line."""


def build(output: Path) -> None:
    """Compile the library to `output`, with the compiler that CXX names (a command line) or the system's.

    Raises NotBuiltError where that is not wanted (TOPW_BUILD_NATIVE=0) or not possible; no file is at `output` then.
    """
    try:
        _build(output)
    except NotBuiltError:
        output.unlink(missing_ok=True)  # of an earlier build: its sources may have been others
        raise


def _build(output: Path) -> None:
    if os.environ.get("TOPW_BUILD_NATIVE") == "0":
        raise NotBuiltError("TOPW_BUILD_NATIVE=0")
    sources = sorted(str(file) for file in SOURCES.glob("*.cpp"))
    if not sources:
        raise NotBuiltError(f"the sources are not in {SOURCES}")
    if sys.platform == "win32":
        raise NotBuiltError("it is not built on Windows")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="topw-build-") as scratch:
        made = Path(scratch) / output.name
        run([*compiler, *FLAGS, *linker_flags(compiler), "-shared", *sources, "-lm", "-o", str(made)])
        if not made.is_file() or not made.stat().st_size:
            raise NotBuiltError(f"{compiler[0]} said nothing and wrote no library")
        put(made, output)


def check_place(output: Path) -> None:
    """Raises NotBuiltError where no file can be made at `output`: better said before minutes of compiling than after.

    Folders on the way to it are made later, by `put`."""
    above = next(folder for folder in (output.parent, *output.parents) if os.path.lexists(folder))
    try:
        if output.is_dir():  # so is the empty path
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise NotBuiltError(f"{output} cannot be written ({error.strerror or error})") from None


def put(made: Path, output: Path) -> None:
    """In one piece, and as a new file: a process that has the old one loaded keeps it."""
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, beside)
        beside.replace(output)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise NotBuiltError(f"{output} cannot be written ({error.strerror or error})") from None


def find_compiler() -> list[str]:
    """The C++ compiler's command line. Raises NotBuiltError where there is none."""
    named = os.environ.get("CXX")
    if named:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise NotBuiltError(f"CXX is {named!r}, which is no command line ({error})") from None
        if not words or not shutil.which(words[0]):
            raise NotBuiltError(f"CXX is {named!r}, and there is no such program; name another, or unset it")
        return words
    for name in _COMPILERS:
        path = shutil.which(name)
        if path:
            return [path]
    raise NotBuiltError("there is no C++ compiler (install one, or name it with CXX)")


def linker_flags(compiler: Sequence[str]) -> list[str]:
    """Those of the linker's flags that this compiler takes."""
    if sys.platform != "linux":
        return []
    taken = []
    with tempfile.TemporaryDirectory(prefix="topw-probe-") as scratch:
        probe = Path(scratch) / "probe.cpp"
        probe.write_text('extern "C" int topw_probe() { return 0; }\n', encoding="ascii")
        for flag in _LINUX:
            try:
                run([*compiler, *FLAGS, flag, "-shared", str(probe), "-o", str(probe.with_suffix(".so"))])
                taken.append(flag)
            except NotBuiltError:
                continue
    return taken


def run(command: Sequence[str]) -> None:
    """Run a compiler. Raises NotBuiltError with the first line of what it complained of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST)
    except (OSError, ValueError) as error:
        raise NotBuiltError(f"{command[0]} cannot be run ({error})") from None
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{command[0]} did not end within {LONGEST} s") from None
    if done.returncode != 0:
        raise NotBuiltError(complaint(command, done.stderr or done.stdout))


def complaint(command: Sequence[str], said: str) -> str:
    """The first line of what a compiler that failed complained of, after its name."""
    lines = said.splitlines()
    words = [line for line in lines if "error" in line] or lines or ["?"]
    return f"{command[0]} failed ({words[0].strip()[:200]})"


def main() -> int:
    """Build the library into this source tree; 1 and the reason on stderr where that fails."""
    output = SOURCES.with_name(LIBRARY_NAME)
    try:
        build(output)
    except NotBuiltError as reason:
        sys.stderr.write(f"the native sampler was not built: {reason}\n")
        return 1
    sys.stderr.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
