"""The program of a worker process: `PYTHON serve.py FILE` answers requests on stdin, as JSON lines on stdout.

FILE defines `start(settings: dict) -> dict[str, function]`. The first request is {"settings": ...} and calls `start`;
later ones are {"do": NAME, "with": {...}} and call one of the functions. Answers are {"value": ...} or {"error": "Type:
message"}. What FILE prints goes to stderr.

This file imports only the standard library, because topw_deploy may be missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

Handlers = Mapping[str, Callable[..., Any]]


def load_start(path: Path) -> Callable[[dict[str, Any]], Handlers]:
    """Import the file and return its function `start`."""
    spec = importlib.util.spec_from_file_location(f"topw_bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it
    spec.loader.exec_module(module)
    start: Callable[[dict[str, Any]], Handlers] = module.start
    return start


def peak_bytes() -> int | None:
    """Peak resident bytes of this process; None if the system does not report them.

    Linux: from /proc, because the peak of getrusage starts at that of the parent process.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(requests: IO[str], answers: IO[str], file: Path) -> None:
    """Answer requests until they end. file: the worker's file."""
    handlers: Handlers = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "settings" in request:
                handlers = {"peak_bytes": peak_bytes, **load_start(file)(request["settings"])}
                answer: dict[str, Any] = {"value": sorted(handlers)}
            else:
                answer = {"value": handlers[request["do"]](**request.get("with", {}))}
        except Exception as error:  # noqa: BLE001  # WorkerProcess raises it
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # Libraries write to file descriptor 1, so only answers go to the real stdout.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Python puts this folder on the path, where its files could hide libraries of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    serve(sys.stdin, answers, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
