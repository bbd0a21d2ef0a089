"""The program of a `bench.process.Worker`: `PYTHON serve.py FILE`, with JSON lines on stdin and stdout.

FILE defines `start(settings: dict) -> dict[str, function]`. The first request is {"settings": ...}; later ones, {"do":
NAME, "with": {...}}, call a function. Answers are {"value": ...} or {"error": "Type: message"}. FILE's output goes to
stderr.

It imports only the standard library, because topw_deploy may be missing.
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


def load(path: Path) -> Callable[[dict[str, Any]], Handlers]:
    spec = importlib.util.spec_from_file_location(f"topw_bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it
    spec.loader.exec_module(module)
    start: Callable[[dict[str, Any]], Handlers] = module.start
    return start


def peak_bytes() -> int | None:
    """Peak resident memory; None if the system does not report it.

    On Linux it does not come from getrusage, which would start from the parent's peak.
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
    """Answer requests until stdin ends."""
    handlers: Handlers = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "settings" in request:
                handlers = {"peak_bytes": peak_bytes, **load(file)(request["settings"])}
                answer: dict[str, Any] = {"value": sorted(handlers)}
            else:
                answer = {"value": handlers[request["do"]](**request.get("with", {}))}
        except Exception as error:  # noqa: BLE001  # the other end handles it
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # Libraries write to file descriptor 1: reserve the real stdout for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Python puts this folder on the path; its files must not shadow libraries.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    serve(sys.stdin, answers, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
