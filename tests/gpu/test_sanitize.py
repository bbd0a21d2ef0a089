"""Verdicts on compute-sanitizer's output and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import sanitize
from benchmarks.gpu.job import Job
from topw_deploy.plugins import compile_native, library

HEAD = "========= COMPUTE-SANITIZER\n"
ROWS = "READY\n\nANSWERED candidates 6\n"


INVALID = "========= Invalid __global__ read of size 4 bytes\n=========     at topw::certify\n"
UNSUPPORTED = f"{HEAD}========= Error: Device not supported\n"


@pytest.mark.parametrize(
    ("code", "said", "failed"),
    [
        (0, f"{HEAD}{ROWS}========= ERROR SUMMARY: 0 errors\n", ""),
        (sanitize._FOUND, f"{HEAD}READY\n{INVALID}========= ERROR SUMMARY: 2 errors\n",
         "found 2 errors: Invalid __global__ read of size 4 bytes / at topw::certify"),
        # a hazard fails even with the rows' exit code
        (0, f"{HEAD}{ROWS}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", "found 1 errors"),
        (1, f"{HEAD}READY\nrow 1: token\n========= ERROR SUMMARY: 0 errors\n", "the rows ended with exit code 1"),
    ],
)  # fmt: skip
def test_a_tool_passes_without_errors_and_with_all_answers(code: int, said: str, failed: str) -> None:
    found = sanitize.verdict("memcheck", code, said)
    assert not found.absent
    assert failed in found.failed
    assert bool(found.failed) == bool(failed) != ("ANSWERED candidates 6" in found.table)


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (1, f"{UNSUPPORTED}Traceback\ntopw_deploy.errors.PluginError: no 256 bytes\n", "Error: Device not supported"),
        (1, f"{UNSUPPORTED}========= ERROR SUMMARY: 1 error\n", "Error: Device not supported"),
        (-11, f"{HEAD}READY\n========= Internal error\n", "SIGSEGV and no summary: READY / Internal error"),
    ],
)
def test_a_tool_that_refuses_the_device_or_gives_no_summary_has_neither_passed_nor_failed(
    code: int, said: str, reason: str
) -> None:
    found = sanitize.verdict("initcheck", code, said)
    assert (found.failed, found.table) == ("", "")
    assert "initcheck could not run: " in found.absent[0]
    assert reason in found.absent[0]


def test_a_tool_that_does_not_end_fails_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_LONGEST", 0.5)
    code, said = sanitize.run_limited([sys.executable, "-u", "-c", "import time; print('READY'); time.sleep(600)"])
    assert code is None
    assert "did not end within" in sanitize.verdict("racecheck", code, said).failed


def test_a_missing_tool_is_reported(tmp_path: Path, emulated_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda name: None)
    monkeypatch.setattr(sanitize, "_USUAL", tmp_path / "none")
    found = sanitize.run_under_tool(Job(tmp_path, emulated_library), "memcheck")
    assert found.absent == ("compute-sanitizer is missing on this machine: memcheck was not run",)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, emulated_library: Path) -> dict[str, str]:
    """An environment whose CUDA driver is the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    source, built = Path(__file__).with_name("driver_stand_in.cpp"), str(folder / library.DRIVER_NAME)
    compile_native.run_compiler([*compile_native.find_compiler(), "-shared", "-fPIC", str(source), "-o", built])
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--emulated",)], ids=["through the driver", "emulated"])
def test_the_rows_reach_every_stage_and_are_right(
    emulated_library: Path, driver: dict[str, str], options: tuple[str, ...]
) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu.small_rows", str(emulated_library), *options]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], env=driver, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == "ANSWERED candidates 6, geometry 6, greedy 3, invalid 3, literal 3, pool 3"
