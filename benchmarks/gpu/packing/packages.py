"""The component `packages`: what the runtime imports and a GPU host lacks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.packing import wheels
from benchmarks.gpu.packing.component import Packed
from benchmarks.gpu.packing.wheels import Host

REQUIREMENTS = ("msgspec==0.22.0", "minijinja==3.1.0")


def stage(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage the component. Raises BenchmarkError if a package is unavailable."""
    for requirement in REQUIREMENTS:
        wheels.extract_wheel(wheels.download_wheel(requirement, host, scratch), tree)
    return Packed(", ".join(REQUIREMENTS), python_path=(".",))
