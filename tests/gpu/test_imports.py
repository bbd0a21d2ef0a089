"""The GPU command runs from a bare checkout, and parts import only what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.job import PARTS

ROOT = Path(__file__).parents[2]
EXPORTERS = (
    "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "topw_deploy.export", "topw_deploy.runtime",
)  # fmt: skip
NOT_ON_THE_HOST = ("scipy", "matplotlib", "pytest", "tqdm", "tensorrt", "msgspec", "minijinja")
MODULES_OF_STEPS = ("check", "capture", "speed")


def import_without(blocked: tuple[str, ...], statements: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n{statements}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_the_parent_imports_the_standard_library_alone() -> None:
    blocked = ("numpy", "torch", "topw_deploy.sampling", *EXPORTERS, *NOT_ON_THE_HOST)
    done = import_without(blocked, "import benchmarks.gpu.__main__")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", [part for part in PARTS if part not in MODULES_OF_STEPS])
def test_a_part_that_needs_packed_packages_lists_its_steps_without_them(part: str) -> None:
    listing = (
        "from pathlib import Path\nfrom benchmarks.gpu.job import Job, steps_of\n"
        f"assert steps_of({part!r}, Job(Path('out'), Path('out/library.so')))"
    )
    done = import_without(("numpy", "torch", *EXPORTERS, *NOT_ON_THE_HOST), listing)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_steps_on_the_kernels_need_numpy_and_torch_alone() -> None:
    modules = ", ".join(f"benchmarks.gpu.{module}" for module in MODULES_OF_STEPS)
    done = import_without((*EXPORTERS, *NOT_ON_THE_HOST), f"import {modules}, fuzz.rules")
    assert done.returncode == 0, done.stderr


def test_rows_for_the_sanitizer_need_numpy_alone() -> None:
    done = import_without(("torch", *EXPORTERS, *NOT_ON_THE_HOST), "import benchmarks.gpu.small_rows")
    assert done.returncode == 0, done.stderr
