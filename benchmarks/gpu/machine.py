"""Describe the GPU and the installed packages.

`python -m benchmarks.gpu.machine` queries the driver and prints JSON.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu.children import ROOT, environment

PACKAGES = (
    "torch", "numpy", "triton", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "tensorrt", "cuda-bindings", "cupy-cuda13x", "safetensors", "tokenizers",
)  # fmt: skip
_LIMIT = 60  # seconds; a driver may hang


@dataclass(frozen=True)
class Machine:
    """A machine and its GPU.

    architecture: 90 for sm_90; 0 without a GPU.
    why_none: a clause on why there is no GPU; empty with one.
    cuda: the newest CUDA version that the driver supports.
    """

    gpu: str
    architecture: int
    why_none: str
    cuda: str
    versions: dict[str, str]

    def as_table(self) -> dict[str, Any]:
        return {
            "GPU": self.gpu or f"none: {self.why_none}",
            "architecture": f"sm_{self.architecture}" if self.gpu else "",
            "driver's CUDA": self.cuda,
            "processor": platform.processor() or platform.machine(),
            "Python": platform.python_version(),
            "packages": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }


def describe_machine() -> Machine:
    """Describe this machine. A child process queries the driver and is killed if it hangs."""
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, errors="replace", timeout=_LIMIT
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Machine("", 0, f"the NVIDIA driver did not answer within {_LIMIT} s", "", versions)
    except ValueError:
        return Machine("", 0, f"the driver could not be queried ({done.stderr.strip()[-300:]})", "", versions)
    return Machine(found["gpu"], found["architecture"], found["why_none"], found["cuda"] or "", versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    from topw_deploy.plugins import library

    found = library.query_driver()
    first = found.devices[0] if found.devices else library.Device("", 0)
    json.dump({"gpu": first.name, "architecture": first.architecture, "why_none": found.why_none, "cuda": found.cuda},
              sys.stdout)  # fmt: skip


if __name__ == "__main__":
    main()
