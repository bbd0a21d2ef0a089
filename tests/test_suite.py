"""Checks of the tests: which may import the benchmarks, and that none passes or fails by the time it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))

# Files that read a clock, and why no verdict depends on what they read.
CLOCKS = {
    "support/waiting.py": "the time after which a wait is a hang",
    "engine/test_delivery.py": "a clock that the test sets forward",
    "gpu/test_runner.py": "a clock that the test holds",
    "runtime/ort/test_device_binding.py": "the start that a model is given",
    "serve/test_lifecycle.py": "a clock that the test sets forward",
    "nvidia/worker.py": "seconds that are printed",
    "peers/run_builders.py": "seconds that are printed",
    "scale/__init__.py": "the time after which a wait is a hang",
    "scale/ray_cluster.py": "seconds that are printed, and the time after which a wait is a hang",
    "scale/triton_server.py": "seconds that are printed, and the time after which a wait is a hang",
}


def test_only_tests_of_the_measurements_import_them() -> None:
    other = "export/source/test_accounting.py"  # builds tiny models of architectures that only the coverage table has
    for path in FILES:
        place = path.relative_to(TESTS)
        if place.parts[0] not in ("benchmarks", "gpu", "training") and place.as_posix() != other:
            assert not re.search(r"^ *(from|import) benchmarks\b", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_no_other_file_reads_a_clock() -> None:
    reading = re.compile(r"\b(perf_counter|monotonic|process_time|thread_time|time\.time|time_ns)\b")
    found = {
        path.relative_to(TESTS).as_posix()
        for path in FILES
        if path != Path(__file__) and reading.search(path.read_text(encoding="utf-8"))
    }
    assert found - CLOCKS.keys() == set()
    assert CLOCKS.keys() <= found, "list only files that read one"


def test_hypothesis_has_no_deadline_by_its_profile_alone() -> None:
    for path in FILES:
        if path not in (Path(__file__), TESTS / "conftest.py"):
            assert "deadline=" not in path.read_text(encoding="utf-8"), path
