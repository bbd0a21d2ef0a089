"""Running nvcc on the kernels: which architectures are being assembled, and which are done.

With --verbose nvcc prints every command before it runs it. ptxas takes nearly all of the time; it is called once for
each architecture, and its output file appears when it is done.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from topw_deploy.plugins import build as native_build

_PTXAS = re.compile(r'^#\$ \S*ptxas\S* .*?-arch=sm_(\d+)\b.* -o "([^"]+)"')
_COMMAND = "#$ "  # how nvcc begins a line with what it runs
_INTERVAL = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Compiling:
    """running and done: architectures (87 is sm_87) in the order of their beginning. total: of this compilation."""

    running: tuple[int, ...]
    done: tuple[int, ...]
    total: int
    seconds: float


Watch: TypeAlias = Callable[[Compiling], object]


def unwatched(_state: Compiling) -> None:
    """For those who do not look."""


class _Reader(threading.Thread):
    """Collects nvcc's messages; `outputs` has the file of each architecture whose ptxas began."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.messages: list[str] = []
        self.outputs: dict[int, Path] = {}
        self._stream = stream

    def run(self) -> None:
        for line in self._stream:
            begun = _PTXAS.match(line)
            if begun:
                self.outputs[int(begun[1])] = Path(begun[2])
            elif not line.startswith(_COMMAND):
                self.messages.append(line)


def run(command: Sequence[str], total: int, watch: Watch) -> None:
    """Run nvcc and tell `watch` twice a second how far it is. total: the architectures that it compiles for.

    Raises NotBuiltError with nvcc's words.
    """
    started = time.perf_counter()
    try:
        process = subprocess.Popen(
            [*command, "--verbose"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise native_build.NotBuiltError(f"{command[0]} cannot be run ({error})") from None
    with process:
        assert process.stdout is not None
        reader = _Reader(process.stdout)
        reader.start()
        done: list[int] = []
        try:
            while not _ended(process):
                _look(reader, done)
                watch(_state(reader, done, total, started))
                if time.perf_counter() - started > native_build.LONGEST:
                    raise native_build.NotBuiltError(f"{command[0]} did not end within {native_build.LONGEST} s")
        except BaseException:
            process.terminate()
            raise
        reader.join()
    if process.returncode:
        raise native_build.NotBuiltError(native_build.complaint(command, "".join(reader.messages)))
    done += [number for number in reader.outputs if number not in done]
    watch(_state(reader, done, total, started))


def _ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(_INTERVAL)
    except subprocess.TimeoutExpired:
        return False
    return True


def _look(reader: _Reader, done: list[int]) -> None:
    """Add to `done` the architectures whose file is there: ptxas writes it at its end."""
    for number, path in list(reader.outputs.items()):
        if number not in done and path.is_file() and path.stat().st_size:
            done.append(number)


def _state(reader: _Reader, done: Sequence[int], total: int, started: float) -> Compiling:
    running = tuple(number for number in list(reader.outputs) if number not in done)
    return Compiling(running, tuple(done), total, time.perf_counter() - started)
