"""Download and unzip wheels for the host's Python."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import BenchmarkError

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
