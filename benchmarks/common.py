"""What the benchmarks here share with `topw bench`, and the lines that they print."""

from __future__ import annotations

import sys

from topw_deploy.bench.machine import describe
from topw_deploy.bench.report import table
from topw_deploy.bench.timing import Spread, interleave, ratio, seconds

__all__ = ["Spread", "interleave", "machine", "ratio", "say", "seconds", "table"]


def machine() -> str:
    """One line on where this ran: processor, cores, Python and the versions that matter."""
    return str(describe())


def say(text: str) -> None:
    """Progress, on stderr: stdout carries the tables."""
    print(text, file=sys.stderr, flush=True)
