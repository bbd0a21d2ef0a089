"""Processes that are forked from one that has already imported torch and transformers.

A new process takes several seconds to import them: most of the verification of a tiny model. The server starts no
thread, so that it can be forked. `cold_verification` (tests/export/conftest.py) starts processes as the exporter does.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

from topw_deploy.export.verification import run as in_subprocess

start_new = in_subprocess.start
_PYTHON = sys.executable
_IMPORTED = (
    "topw_deploy.export.verification.worker",
    "topw_deploy.export.verification.decoder",
    "topw_deploy.export.traced_decoder",
    "transformers.models.auto.modeling_auto",
)


class Forked:
    """What tests and `in_subprocess` use of a Popen."""

    def __init__(self, process: Any, output: Connection) -> None:
        self._process = process
        self.stdout = os.fdopen(os.dup(output.fileno()), encoding="utf-8")
        output.close()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def fork(function: Callable[..., object], *arguments: object, errors: IO[Any] = sys.__stderr__) -> Forked:
    """Run `function` of an importable module in a fork. The exit code is what it returns.

    errors: an open file for its standard error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    receiver, sender = context.Pipe(duplex=False)
    words = Connection(os.dup(errors.fileno()), readable=False)  # carries the file descriptor
    given = (function, arguments, sender, words, dict(os.environ))
    process = context.Process(target=_run, args=given, daemon=True)
    process.start()
    sender.close()
    words.close()
    return Forked(process, receiver)


def start(task: str, errors: IO[str]) -> Any:
    """Like `in_subprocess.start`."""
    if sys.executable != _PYTHON:  # a test replaced the interpreter
        return start_new(task, errors)
    return fork(_verify, task, errors=errors)


def _verify(task: str) -> int:
    from topw_deploy.export.verification.worker import main

    return main(task)


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    output: Connection,
    words: Connection,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(words.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    sys.exit(function(*arguments))
