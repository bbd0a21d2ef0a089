"""Compile the native library; `python -m topw_deploy.plugins.compile_native` rebuilds it in a source tree.

Imports only the standard library and modules that do the same, because setup.py imports this module.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from topw_deploy.folders import atomic_file
from topw_deploy.plugins.library import LIBRARY_NAME as LIBRARY_NAME

SOURCES = Path(__file__).with_name("native")

# No -march: a source file for an instruction set enables it itself, and one is chosen at run time. No fused
# multiply-adds, so that decisions round alike on every processor.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off")
# Link the C++ library statically, with hidden symbols.
_LINUX_LINKER_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")

TIMEOUT = 3600  # seconds per compiler: kernels for ten GPUs take a quarter of it on a busy machine
_COMPILERS = ("c++", "g++", "clang++")


class NotBuiltError(Exception):
    """Why the library was not built, in one line."""


def compile_native(output: Path) -> None:
    """Compile the library to `output` with CXX or the system's compiler.

    Raises NotBuiltError on failure or TOPW_BUILD_NATIVE=0, and then leaves no file at `output`.
    """
    try:
        _compile(output)
    except NotBuiltError:
        output.unlink(missing_ok=True)  # an earlier file may be built from other sources
        raise


def _compile(output: Path) -> None:
    if os.environ.get("TOPW_BUILD_NATIVE") == "0":
        raise NotBuiltError("TOPW_BUILD_NATIVE=0")
    sources = sorted(str(file) for file in SOURCES.glob("*.cpp"))
    if not sources:
        raise NotBuiltError(f"the sources are not in {SOURCES}")
    if sys.platform == "win32":
        raise NotBuiltError("it is not built on Windows")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="topw-build-") as scratch:
        library = Path(scratch) / output.name
        run_compiler([*compiler, *FLAGS, *linker_flags(compiler), "-shared", *sources, "-lm", "-o", str(library)])
        if not library.is_file() or not library.stat().st_size:
            raise NotBuiltError(f"{compiler[0]} reported no error but wrote no library")
        install_library(library, output)


def check_output(output: Path) -> None:
    """Raises NotBuiltError if `output` cannot be written. Saves minutes of compiling in vain."""
    above = next(folder for folder in (output.parent, *output.parents) if os.path.lexists(folder))
    try:
        if output.is_dir():  # includes the empty path
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise NotBuiltError(f"{output} cannot be written ({error.strerror or error})") from None


def install_library(library: Path, output: Path) -> None:
    """Replace `output` by a copy of `library`. Processes that have loaded the old file keep it."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with library.open("rb") as source, atomic_file(output) as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        raise NotBuiltError(f"{output} cannot be written ({error.strerror or error})") from None


def find_compiler() -> list[str]:
    """The C++ compiler's command line. Raises NotBuiltError."""
    named = os.environ.get("CXX")
    if named:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise NotBuiltError(f"CXX is {named!r}, which is not a command line ({error})") from None
        if not words or not shutil.which(words[0]):
            raise NotBuiltError(f"CXX is {named!r}, and there is no such program; correct or unset it")
        return words
    for name in _COMPILERS:
        path = shutil.which(name)
        if path:
            return [path]
    raise NotBuiltError("no C++ compiler was found (install one, or set CXX)")


def linker_flags(compiler: Sequence[str]) -> list[str]:
    """The flags of _LINUX_LINKER_FLAGS that this compiler accepts; none on other systems."""
    if sys.platform != "linux":
        return []
    accepted = []
    with tempfile.TemporaryDirectory(prefix="topw-probe-") as scratch:
        probe = Path(scratch) / "probe.cpp"
        probe.write_text('extern "C" int topw_probe() { return 0; }\n', encoding="ascii")
        for flag in _LINUX_LINKER_FLAGS:
            try:
                run_compiler([*compiler, *FLAGS, flag, "-shared", str(probe), "-o", str(probe.with_suffix(".so"))])
                accepted.append(flag)
            except NotBuiltError:
                continue
    return accepted


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler. Raises NotBuiltError with the first error that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, ValueError) as error:
        raise NotBuiltError(f"{command[0]} cannot be run ({error})") from None
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{command[0]} did not finish within {TIMEOUT} s") from None
    if done.returncode != 0:
        raise NotBuiltError(failure_clause(command, done.stderr or done.stdout))


def failure_clause(command: Sequence[str], output: str) -> str:
    """The compiler's name and the first error in its `output`, as a clause."""
    lines = output.splitlines()
    errors = [line for line in lines if "error" in line] or lines or ["?"]
    return f"{command[0]} failed ({errors[0].strip()[:200]})"


def main() -> int:
    output = SOURCES.with_name(LIBRARY_NAME)
    try:
        compile_native(output)
    except NotBuiltError as reason:
        sys.stderr.write(f"the native sampler was not built: {reason}\n")
        return 1
    sys.stderr.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
