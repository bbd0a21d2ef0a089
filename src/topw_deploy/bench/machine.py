"""Where a measurement ran: without this no figure means anything elsewhere."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")  # those that kernels choose by
DISTRIBUTIONS = ("topw-deploy", "numpy", "onnxruntime", "torch", "transformers")
_BUSY = 0.5  # of the cores


@dataclass(frozen=True)
class Machine:
    """processor: its name. flags: those of FLAGS that it has. cores: usable by this process. load: mean number of
    running processes over the last minute, None where the system does not say. versions: of DISTRIBUTIONS."""

    processor: str
    flags: tuple[str, ...]
    cores: int
    memory_gib: float | None
    system: str
    python: str
    versions: dict[str, str]
    load: float | None

    @property
    def busy(self) -> bool:
        """Whether something else seems to be running."""
        return self.load is not None and self.load > _BUSY * self.cores

    def __str__(self) -> str:
        flags = f" ({', '.join(self.flags)})" if self.flags else ""
        named = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.processor}{flags}, {self.cores} cores; Python {self.python}, {named}"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {**asdict(self), "flags": list(self.flags)}


def describe() -> Machine:
    """This machine, now."""
    processor, flags = _processor()
    affinity = hasattr(os, "sched_getaffinity")
    return Machine(
        processor=processor,
        flags=flags,
        cores=len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1,
        memory_gib=_memory(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: found for name in DISTRIBUTIONS if (found := _version(name)) is not None},
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> tuple[str, tuple[str, ...]]:
    """Name and flags, from /proc/cpuinfo where there is one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            first = stream.read().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine(), ()
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    has = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", platform.machine()), tuple(flag for flag in FLAGS if flag in has)


def _memory() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, OSError, ValueError):
        return None
