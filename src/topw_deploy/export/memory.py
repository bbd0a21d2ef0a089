"""How much memory a stage takes: the highest resident set of this process while it ran."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident memory of this process now; pages of mapped files that it has touched count. 0 where unknown."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that was ever resident, or since the last stage began."""
    peak = _field("VmHWM")
    if peak or sys.platform == "win32":
        return peak
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def available_bytes() -> int:
    """Memory that this machine can still give without swapping, as Linux sees it; 0 where unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class StageMemory:
    """Peaks by stage, in bytes, in the order of the stages."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the peak of the block; where the system cannot forget earlier peaks, it is the highest so far."""
        with contextlib.suppress(OSError):
            _RESET.write_text("5")
        try:
            yield
        finally:
            self.peaks[name] = peak_bytes()


def _field(name: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
