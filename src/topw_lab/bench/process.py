"""Start worker processes, so that each side has its own environment, thread pools and memory.

The workers measure the times, and this process decides the order of the calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from topw_deploy import errors
from topw_deploy.errors import BenchmarkError, ParameterError, TopWError

WORKERS = Path(__file__).with_name("workers")
"""Folder of the workers for other libraries, and of `serve.py`, the program of every worker."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # all models are local folders
    "TRANSFORMERS_OFFLINE": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TOPW_PRINT_PARAMS": "0",  # the authors' processor prints otherwise
    "TOPW_PRINT_KEPT": "0",
}
_EXIT_SECONDS = 10.0  # for a worker to end by itself
_MOST_THREADS = 1024  # some libraries start as many threads as requested


def require_few_threads(threads: Sequence[int]) -> None:
    """Raises ParameterError unless `threads` is a non-empty list of counts in [1, 1024]."""
    if not threads or min(threads) < 1 or max(threads) > _MOST_THREADS:
        raise ParameterError(f"threads are {list(threads)}, but must be integers in [1, {_MOST_THREADS}].", "threads")


class WorkerProcess:
    """A process that serves the functions of one file. A context manager that ends the process.

    name: the worker's name, for error messages.
    file: an absolute path, or a name in `WORKERS`; see workers/serve.py for the protocol.
    settings: argument of the file's `start`, in types that JSON has.
    python: the interpreter; this one by default.
    threads: number of threads for OpenMP and BLAS.

    Raises BenchmarkError, with the last line of stderr, if the process cannot start, dies or answers with an error.
    Errors of topw_deploy.errors keep their type.
    """

    def __init__(
        self,
        name: str,
        file: Path | str,
        settings: Mapping[str, Any],
        *,
        python: str | Path | None = None,
        threads: int = 1,
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe that nobody reads could fill up
        # Absolute, because Popen searches PATH for bare names. Not resolved, because an environment's python is a link.
        self._interpreter = str(Path(python).absolute()) if python else sys.executable
        command = [self._interpreter, str(WORKERS / "serve.py"), str(WORKERS / file)]
        environment = {**os.environ, **_ENVIRONMENT, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment
            )
        except OSError as error:
            self._stderr.close()
            raise BenchmarkError(
                f"{name} cannot start: {command[0]} {error.strerror}; give a Python interpreter."
            ) from None
        # Popen's type allows None, which it has only for streams that are not pipes.
        self._requests = cast("IO[str]", self._process.stdin)
        self._answers = cast("IO[str]", self._process.stdout)
        try:
            self._exchange({"settings": settings})
        except BaseException:
            self.close()
            raise

    def call(self, do: str, **arguments: Any) -> Any:
        """Call the function `do` of the worker. Returns its answer."""
        return self._exchange({"do": do, "with": arguments})

    def peak_bytes(self) -> int | None:
        """Peak resident memory; None if the system does not report it."""
        peak: int | None = self.call("peak_bytes")
        return peak

    def close(self) -> None:
        """Close stdin, which ends the worker. Kill the process if it does not exit."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._stderr.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()  # the worker may be in a long call
        self.close()

    def _exchange(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the value of its answer."""
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(
                f"{self.name} ended {self._exit_text()}: {self._last_error_line()}; omit it or repair it."
            )
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() & {"value", "error"}:  # not from serve.py
            raise BenchmarkError(f"{self.name}: {self._interpreter} is not Python; give a Python interpreter.")
        if "error" in answer:
            raise self._error_from(answer["error"])
        return answer["value"]

    def _error_from(self, text: str) -> TopWError:
        """The error of an answer such as "ParameterError: lam is -1."."""
        name, _, message = text.partition(": ")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TopWError):
            return kind(message)
        return BenchmarkError(f"{self.name} failed: {text.rstrip('.')}; omit it or repair it.")

    def _exit_text(self) -> str:
        code = self._process.wait()
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"

    def _last_error_line(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip().rstrip(".")[:300] if lines else "it printed no message"
