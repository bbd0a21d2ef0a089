"""Process and system memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

_STATUS, _RESET, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


def resident_bytes() -> int:
    """Resident memory, including mapped pages that were read; 0 if unknown."""
    return _field(_STATUS, "VmRSS")


def peak_bytes() -> int:
    """Peak resident memory; on Linux, since the start of the last stage."""
    peak = _field(_STATUS, "VmHWM")
    if peak or sys.platform == "win32":
        return peak
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def available_bytes() -> int:
    """Memory available without swapping (Linux); 0 if unknown."""
    return _field(_MACHINE, "MemAvailable")


class StageMemory:
    """Peak resident bytes by stage."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the block's peak, or the process's peak where the system cannot reset it."""
        with contextlib.suppress(OSError):
            _RESET.write_text("5")
        try:
            yield
        finally:
            self.peaks[name] = peak_bytes()


def _field(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
