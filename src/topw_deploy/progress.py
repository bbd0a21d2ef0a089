"""Progress and memory of long calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

_PROCESS_STATUS, _RESET_PEAK, _MACHINE_MEMORY = (
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
    Path("/proc/meminfo"),
)

Advance = Callable[[int], object]
"""A function that is called with the number of parts done since its last call."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks of a long call. By default they do nothing.

    say: called with a line of text for each phase.
    bar: called with the number of parts and their unit ("B" for bytes). Returns a context manager that yields an
    Advance.
    """

    say: Callable[[str], object] = lambda _line: None
    bar: Callable[[int, str], AbstractContextManager[Advance]] = lambda _total, _unit: nullcontext(lambda _parts: None)


SILENT = Progress()


def resident_bytes() -> int:
    """Return the resident memory of this process, including mapped pages that were read; 0 if unknown."""
    return _kilobyte_field(_PROCESS_STATUS, "VmRSS")


def peak_bytes() -> int:
    """Return the peak resident memory of this process; on Linux, since the start of the last stage."""
    peak = _kilobyte_field(_PROCESS_STATUS, "VmHWM")
    if peak or sys.platform == "win32":
        return peak
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def available_bytes() -> int:
    """Return the memory that Linux can give to processes without swapping; 0 on other systems."""
    return _kilobyte_field(_MACHINE_MEMORY, "MemAvailable")


class StageMemory:
    """Measures the memory of stages. peaks: peak resident bytes by stage."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the peak of the block as stage `name`, or the peak of the process if the system cannot reset it."""
        with contextlib.suppress(OSError):
            _RESET_PEAK.write_text("5")
        try:
            yield
        finally:
            self.peaks[name] = peak_bytes()


def _kilobyte_field(file: Path, name: str) -> int:
    """Return a field of a file in /proc, which counts in units of 1024 bytes, in bytes; 0 if it is missing."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
