"""A component's index entry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu.packing.fatbin import Kept


@dataclass(frozen=True)
class Packed:
    """A staged component.

    python_path, linker_path: subfolders for PYTHONPATH and LD_LIBRARY_PATH, or ".".
    variables: environment variables, each set to a subfolder.
    cuda_libraries: whether it needs CUDA's libraries from PyTorch's packages.
    gpu_code: the GPU code kept of each library.
    notes: for users.
    """

    version: str
    python_path: tuple[str, ...] = ()
    linker_path: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    cuda_libraries: bool = False
    gpu_code: dict[str, Kept] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self, name: str) -> dict[str, Any]:
        """The index entry, with paths relative to all components' folder."""
        found = asdict(self)
        for key in ("python_path", "linker_path"):
            found[key] = [name if place == "." else f"{name}/{place}" for place in found[key]]
        found["variables"] = {key: f"{name}/{place}" for key, place in self.variables.items()}
        return found
