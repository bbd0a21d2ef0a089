"""The GPU command runs from a bare checkout, and parts import only what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.job import PARTS
from tests.support.samples import slow

ROOT = Path(__file__).parents[2]
EXPORTERS = (
    "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "topw_deploy.export", "topw_deploy.runtime",
)  # fmt: skip
NOT_ON_THE_HOST = ("scipy", "matplotlib", "pytest", "tqdm", "tensorrt", "msgspec", "minijinja")
MODULES_OF_STEPS = ("check", "capture", "speed")


_EVERY = ("numpy", "torch", *EXPORTERS, *NOT_ON_THE_HOST)
LISTING = """
from pathlib import Path
from benchmarks.gpu.job import Job, steps_of
assert steps_of({!r}, Job(Path("out"), Path("out/library.so")))
"""
STEPS = ", ".join(f"benchmarks.gpu.{module}" for module in MODULES_OF_STEPS)
CASES = {
    "the parent: the standard library": (
        ("numpy", "torch", "topw_deploy.sampling", *EXPORTERS, *NOT_ON_THE_HOST), "import benchmarks.gpu.__main__",
    ),
    **{f"the steps of {part}": (_EVERY, LISTING.format(part)) for part in PARTS if part not in MODULES_OF_STEPS},
    "rows for the sanitizer: numpy": (("torch", *EXPORTERS, *NOT_ON_THE_HOST), "import benchmarks.gpu.small_rows"),
    "steps on the kernels: numpy and torch": ((*EXPORTERS, *NOT_ON_THE_HOST), f"import {STEPS}, fuzz.rules"),
}  # fmt: skip


@pytest.mark.parametrize("case", [slow(case) if "torch" in case else case for case in CASES])
def test_a_module_imports_nothing_but_what_its_host_has(case: str) -> None:
    blocked, statements = CASES[case]
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n{statements}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
