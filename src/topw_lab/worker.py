"""Run one side of a comparison in a process of its own, with its own environment, thread pools and memory.

`Worker` starts `PYTHON worker.py FILE`, which answers requests on stdin with JSON lines on stdout. FILE defines
`start(settings: dict) -> dict[str, function]`. The first request is {"settings": ...} and calls `start`; later ones are
{"do": NAME, "with": {...}} and call one of the functions. Answers are {"value": ...} or {"error": "Type: message"}.
What FILE prints goes to stderr.

Only the standard library is imported at the top: the other interpreter may have no topw_deploy.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

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


class Worker:
    """A process that serves the functions of one file. A context manager that ends the process.

    name: the worker's name, for error messages.
    file: an absolute path.
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
        self._python = str(Path(python).absolute()) if python else sys.executable
        environment = {**os.environ, **_ENVIRONMENT, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        try:
            self._process = subprocess.Popen(
                [self._python, __file__, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._stderr.close()
            raise _error(f"{name} cannot start: {self._python} {error.strerror}; give a Python interpreter.") from None
        try:
            self._exchange({"settings": settings})
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def call(self, do: str, **arguments: Any) -> Any:
        """Call the function `do` of the worker. Returns its answer."""
        return self._exchange({"do": do, "with": arguments})

    def close(self) -> None:
        """Close stdin, which ends the worker. Kill the process if it does not exit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()  # the worker may be in a long call
        self.close()

    def _exchange(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the value of its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            end = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            self._stderr.seek(0)
            printed = self._stderr.read().decode("utf-8", "replace").strip().splitlines() or ["it printed no message"]
            raise _error(f"{self.name} ended {end}: {printed[-1].strip().rstrip('.')[:300]}; omit it or repair it.")
        answer = json.loads(line)
        if "error" in answer:
            kind, _, message = answer["error"].partition(": ")
            text = f"{self.name} failed: {answer['error'].rstrip('.')}; omit it or repair it."
            raise _error(text, kind, message)
        return answer["value"]


def _error(text: str, kind: str = "", message: str = "") -> Exception:
    """The error `kind` of topw_deploy with `message`, if there is such an error; else BenchmarkError with `text`."""
    from topw_deploy import errors

    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.TopWError):
        return known(message)
    return errors.BenchmarkError(text)


def serve(requests: IO[str], answers: IO[str], file: Path) -> None:
    """Answer requests until they end. file: the worker's file."""
    functions: dict[str, Callable[..., Any]] = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "settings" in request:
                start = runpy.run_path(str(file), run_name=f"topw_lab_worker_{file.stem}")["start"]
                functions, value = start(request["settings"]), None
            else:
                value = functions[request["do"]](**request["with"])
            answer: dict[str, Any] = {"value": value}
        except Exception as error:  # noqa: BLE001  # `Worker` raises it
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Libraries write to file descriptor 1, so only answers go to the real stdout.
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Python puts this folder on the path, where its files could hide libraries of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    serve(sys.stdin, answer_stream, Path(sys.argv[1]))
