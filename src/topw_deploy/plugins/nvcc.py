"""Run nvcc on the kernels and track which architectures are being assembled or done.

nvcc --verbose prints commands before running them. ptxas takes most of the time, once per architecture, and writes its
output at its end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from topw_deploy.plugins.compile_native import TIMEOUT, NotBuiltError, failure_clause

_PTXAS_COMMAND = re.compile(r'^#\$ \S*ptxas\S* .*?-arch=sm_(\d+)\b.* -o "([^"]+)"')
_COMMAND_PREFIX = "#$ "  # prefix of commands in nvcc's output
_INTERVAL = 0.5  # seconds between checks


@dataclass(frozen=True)
class CompilationState:
    """The state of a compilation.

    running, done: architectures (87 for sm_87), in the order in which ptxas started.
    total: number of architectures.
    seconds: time since the start.
    """

    running: tuple[int, ...]
    done: tuple[int, ...]
    total: int
    seconds: float


Watch: TypeAlias = Callable[[CompilationState], object]


def ignore_state(_state: CompilationState) -> None:
    """A Watch that does nothing."""


class _Reader(threading.Thread):
    """The thread that reads nvcc's output.

    messages: its lines other than commands.
    outputs: architecture -> the output file of its ptxas, once that has started.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.messages: list[str] = []
        self.outputs: dict[int, Path] = {}
        self._stream = stream

    def run(self) -> None:
        for line in self._stream:
            started = _PTXAS_COMMAND.match(line)
            if started:
                self.outputs[int(started[1])] = Path(started[2])
            elif not line.startswith(_COMMAND_PREFIX):
                self.messages.append(line)


def run_nvcc(command: Sequence[str], total: int, watch: Watch) -> None:
    """Run nvcc for `total` architectures, and call `watch` twice a second. Raises NotBuiltError.

    An exception of `watch` ends nvcc and is raised.
    """
    started = time.perf_counter()
    try:
        process = subprocess.Popen(
            [*command, "--verbose"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # for `_terminate`
        )
    except OSError as error:
        raise NotBuiltError(f"{command[0]} cannot be run ({error})") from None
    with process:
        assert process.stdout is not None  # for mypy: it is a pipe
        reader = _Reader(process.stdout)
        reader.start()
        done: list[int] = []
        try:
            while not _has_ended(process):
                _add_finished(reader, done)
                watch(_state(reader, done, total, started))
                if time.perf_counter() - started > TIMEOUT:
                    raise NotBuiltError(f"{command[0]} did not finish within {TIMEOUT} s")
        except BaseException:
            _terminate(process)
            raise
        reader.join()
    if process.returncode:
        raise NotBuiltError(failure_clause(command, "".join(reader.messages)))
    done += [number for number in reader.outputs if number not in done]
    watch(_state(reader, done, total, started))


def _terminate(process: subprocess.Popen[str]) -> None:
    """End nvcc and the compilers that it started, because they all hold the pipe that the reader waits for."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def _has_ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(_INTERVAL)
    except subprocess.TimeoutExpired:
        return False
    return True


def _add_finished(reader: _Reader, done: list[int]) -> None:
    for number, path in list(reader.outputs.items()):
        if number not in done and path.is_file() and path.stat().st_size:
            done.append(number)


def _state(reader: _Reader, done: Sequence[int], total: int, started: float) -> CompilationState:
    running = tuple(number for number in list(reader.outputs) if number not in done)
    return CompilationState(running, tuple(done), total, time.perf_counter() - started)
