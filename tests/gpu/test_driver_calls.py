"""Driver functions called through ctypes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from topw_deploy.plugins import compile_native, library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CALLED = ("cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemsetD8Async")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, emulated_library: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver_stand_in.cpp")
    compile_native.run_compiler(
        [*compile_native.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(folder / library.DRIVER_NAME)]
    )
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def test_the_rows_for_the_sanitizer_reach_the_device_through_the_driver(
    environment: dict[str, str], emulated_library: Path
) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu.small_rows", str(emulated_library)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ANSWERED" in done.stdout


def test_the_driver_has_the_functions() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name in CALLED:
        assert hasattr(bindings, name)
