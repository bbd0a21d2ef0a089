"""Verdicts on compute-sanitizer's output and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import sanitize
from benchmarks.gpu.job import Job

HEAD = "========= COMPUTE-SANITIZER\n"
ROWS = "READY\n\nANSWERED candidates 6\n"


def test_no_errors_and_all_answers_pass() -> None:
    found = sanitize.verdict("memcheck", 0, f"{HEAD}{ROWS}========= ERROR SUMMARY: 0 errors\n")
    assert not found.failed
    assert not found.absent
    assert "ANSWERED candidates 6" in found.table


def test_an_error_fails_with_the_tools_message() -> None:
    said = (
        f"{HEAD}READY\n========= Invalid __global__ read of size 4 bytes\n"
        "=========     at topw::certify\n========= ERROR SUMMARY: 2 errors\n"
    )
    found = sanitize.verdict("memcheck", sanitize._FOUND, said)
    assert "found 2 errors: Invalid __global__ read of size 4 bytes / at topw::certify" in found.failed


def test_a_hazard_fails_even_with_the_rows_exit_code() -> None:
    said = f"{HEAD}{ROWS}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
    assert "found 1 errors" in sanitize.verdict("racecheck", 0, said).failed


@pytest.mark.parametrize(
    "said",
    [
        f"{HEAD}========= Error: Device not supported\nTraceback\ntopw_deploy.errors.PluginError: no 256 bytes\n",
        f"{HEAD}========= Error: Device not supported\n========= ERROR SUMMARY: 1 error\n",
    ],
)
def test_a_tool_that_refuses_the_device_has_neither_passed_nor_failed(said: str) -> None:
    found = sanitize.verdict("initcheck", 1, said)
    assert not found.failed
    assert not found.table
    assert "initcheck could not run: Error: Device not supported" in found.absent[0]


def test_a_tool_without_a_summary_has_not_passed() -> None:
    found = sanitize.verdict("synccheck", -11, f"{HEAD}READY\n========= Internal error\n")
    assert "ended with SIGSEGV and no summary: READY / Internal error" in found.absent[0]


def test_rows_that_fail_under_a_tool_fail() -> None:
    found = sanitize.verdict("memcheck", 1, f"{HEAD}READY\nrow 1: token\n========= ERROR SUMMARY: 0 errors\n")
    assert "the rows ended with exit code 1" in found.failed


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


@pytest.mark.slow
def test_the_rows_reach_every_stage_and_are_right(emulated_library: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu.small_rows", str(emulated_library), "--emulated"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == "ANSWERED candidates 6, geometry 6, greedy 3, invalid 3, literal 3, pool 3"
