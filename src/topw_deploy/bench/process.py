"""A side of a measurement in a process of its own: its own environment, thread pools and memory.

Times are taken inside the process; this end only says when. So sides of several environments can take turns.
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
from typing import Any

from topw_deploy import errors
from topw_deploy.errors import BenchmarkError, ParameterError, TopWError

SIDES = Path(__file__).with_name("workers")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_QUIET = {
    "HF_HUB_OFFLINE": "1",  # a side measures a folder that is there; none may look for newer files
    "TRANSFORMERS_OFFLINE": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TOPW_PRINT_PARAMS": "0",  # the authors' processor
    "TOPW_PRINT_KEPT": "0",
}
_GRACE = 10.0  # seconds to end in
_MOST_THREADS = 1024  # some libraries start as many as they are told


def require_few_threads(threads: Sequence[int]) -> None:
    """Raises ParameterError unless there is a count, and every one is in [1, 1024]."""
    if not threads or min(threads) < 1 or max(threads) > _MOST_THREADS:
        raise ParameterError(f"threads are {list(threads)}, but must be integers in [1, {_MOST_THREADS}].", "threads")


class Worker:
    """A running process that serves one file of `bench/workers`. A context manager; leaving it ends the process.

    name: what errors call it. side: the file to serve. settings: plain JSON, passed to the side's `start`.
    python: the interpreter, this one by default. threads: what OpenMP and BLAS libraries may use.

    Raises BenchmarkError if it cannot start, dies, or answers with an error; the message has the process's last words.
    """

    def __init__(
        self,
        name: str,
        side: Path | str,
        settings: Mapping[str, Any],
        *,
        python: str | Path | None = None,
        threads: int = 1,
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process; a pipe could fill up
        # With its folder, as a bare name would be looked for in PATH; not resolved: an environment's python is a link.
        self._interpreter = str(Path(python).absolute()) if python else sys.executable
        command = [self._interpreter, str(SIDES / "serve.py"), str(SIDES / side)]
        environment = {**os.environ, **_QUIET, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment
            )
        except OSError as error:
            self._stderr.close()
            raise BenchmarkError(
                f"{name} cannot start: {command[0]} {error.strerror}; name a Python interpreter."
            ) from None
        try:
            self._exchange({"settings": settings})
        except BaseException:
            self.close()
            raise

    def call(self, do: str, **arguments: Any) -> Any:
        """What the side's function `do` answers to `arguments`."""
        return self._exchange({"do": do, "with": arguments})

    def peak_bytes(self) -> int | None:
        """Most memory that the process ever had resident."""
        peak: int | None = self.call("peak_bytes")
        return peak

    def close(self) -> None:
        """End the process, kindly at first."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()  # it may be in the middle of something long
        self.close()

    def _exchange(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(
                f"{self.name} ended {self._manner()}: {self._last_words()}; leave it out or repair it."
            )
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # not from serve.py
            raise BenchmarkError(f"{self.name}: {self._interpreter} is not Python; name an interpreter.")
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["value"]

    def _error(self, told: str) -> TopWError:
        """One of this package's errors as it was raised; any other as a failure of this side."""
        kind, _, message = told.partition(": ")
        own = getattr(errors, kind, None)
        if isinstance(own, type) and issubclass(own, TopWError):
            return own(message)
        return BenchmarkError(f"{self.name} failed: {told.rstrip('.')}; leave it out or repair it.")

    def _manner(self) -> str:
        code = self._process.wait()
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"

    def _last_words(self) -> str:
        """The last line that the process wrote on stderr."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip().rstrip(".")[:300] if lines else "it said nothing"
