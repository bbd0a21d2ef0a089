"""What the benchmarks here share with `topw bench`, and the lines that they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from topw_deploy.bench.authors import load_processor
from topw_deploy.bench.machine import describe
from topw_deploy.bench.report import table
from topw_deploy.bench.timing import Spread, interleave, ratio, seconds
from topw_deploy.errors import BenchmarkError

__all__ = ["Spread", "interleave", "machine", "ratio", "released_processor", "say", "seconds", "table"]


def machine() -> str:
    """One line on where this ran: processor, cores, Python and the versions that matter."""
    return str(describe())


def say(text: str) -> None:
    """Progress, on stderr: stdout carries the tables."""
    print(text, file=sys.stderr, flush=True)


def released_processor(path: Path) -> Any:
    """The class in the authors' file; a file without it ends the program with a sentence."""
    try:
        return load_processor(path)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
