"""Order, budget, continuing, and children that hang or crash."""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.job import Job
from benchmarks.gpu.record import JSON, TABLES, Record
from benchmarks.gpu.runner import Run
from tests.gpu.toy_part import EXPECTED, LIMIT, ran
from tests.support.waiting import until
from topw_deploy.errors import BenchmarkError

pytestmark = pytest.mark.slow

PART = "tests.gpu.toy_part"


def run(out: Path, *steps: str, base: str = "kernels", budget: float = float("inf")) -> Record:
    out.mkdir(exist_ok=True)
    (out / "steps").write_text(" ".join(steps))
    record = Record(out, rehearse=False)
    Run(record, Job(out, out / "library.so"), base, time.monotonic() + budget).part(PART)
    return record


def entry(out: Path, step: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / JSON).read_text())["steps"][f"{PART}/{step}"]
    return found


def runs(out: Path) -> bool:
    """Whether the process that a hanging step has started runs."""
    try:
        stat = Path(f"/proc/{(out / 'sleeper').read_text()}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def end_time_when(monkeypatch: pytest.MonkeyPatch, holds: Callable[[], bool]) -> None:
    """Let a step's time be over as soon as a condition holds, instead of after its limit."""

    def wait(reading: list[int], writing: list[int], wrong: list[int], seconds: float) -> Any:
        until(lambda: select.select(reading, [], [], 0)[0] or holds())
        return select.select(reading, writing, wrong, 0)

    monkeypatch.setattr(runner, "select", SimpleNamespace(select=wait))


def test_a_finished_step_is_repeated_only_when_the_kernels_changed(tmp_path: Path) -> None:
    run(tmp_path, "passes")
    run(tmp_path, "passes", "also_passes")
    assert ran(tmp_path) == ["passes", "also_passes"]
    run(tmp_path, "passes", base="other kernels")
    assert ran(tmp_path) == ["passes", "also_passes", "passes"]


def test_a_step_that_does_not_fit_the_budget_waits(tmp_path: Path) -> None:
    run(tmp_path, "passes", budget=EXPECTED)  # the parent reserves part of it
    assert entry(tmp_path, "passes")["state"] == "waiting"
    assert ran(tmp_path) == []
    run(tmp_path, "passes", budget=EXPECTED + 60)
    assert entry(tmp_path, "passes")["state"] == "done"


def test_steps_share_a_process_until_one_fails(tmp_path: Path) -> None:
    run(tmp_path, "passes", "absent", "also_passes")
    assert entry(tmp_path, "passes")["data"] == entry(tmp_path, "also_passes")["data"]
    other = tmp_path / "other"
    run(other, "passes", "raises", "also_passes")
    assert entry(other, "passes")["data"] != entry(other, "also_passes")["data"]


def test_a_step_that_hangs_is_killed_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_time_when(monkeypatch, lambda: runs(tmp_path))
    run(tmp_path, "hangs", "passes")
    assert f"killed after {LIMIT:.0f} s" in entry(tmp_path, "hangs")["failed"]
    assert entry(tmp_path, "passes")["state"] == "done"
    until(lambda: not runs(tmp_path))


def test_a_step_that_crashes_is_recorded_with_its_signal_and_last_words(tmp_path: Path) -> None:
    run(tmp_path, "crashes", "passes")
    failed = entry(tmp_path, "crashes")["failed"]
    assert "SIGABRT" in failed
    assert "last words" in failed
    assert entry(tmp_path, "passes")["state"] == "done"


def test_an_interrupted_command_kills_what_it_started_at_once(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        if (tmp_path / "sleeper").is_file():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "hangs")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: not runs(tmp_path))


def test_a_killed_step_continues_from_the_data_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_kept() -> bool:
        return (tmp_path / JSON).is_file() and entry(tmp_path, "counts_and_hangs")["state"] == "partial"

    with monkeypatch.context() as patch:
        end_time_when(patch, has_kept)
        run(tmp_path, "counts_and_hangs")
    assert entry(tmp_path, "counts_and_hangs")["state"] == "failed"
    run(tmp_path, "counts_and_hangs")
    found = entry(tmp_path, "counts_and_hangs")
    assert (found["state"], found["data"]) == ("done", {"count": 2})


def test_a_part_that_cannot_list_its_steps_is_recorded_as_failed(tmp_path: Path) -> None:
    run(tmp_path, "no_such_step")
    assert "KeyError" in entry(tmp_path, "steps")["failed"]
    run(tmp_path, "passes")
    assert f"{PART}/steps" not in Record(tmp_path, rehearse=False).steps


def test_an_absence_is_in_the_tables_and_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "absent")
    assert entry(tmp_path, "absent")["state"] == "absent"
    assert "FlashInfer is not here" in (tmp_path / TABLES).read_text()
    assert "NOT RUN" in capfd.readouterr().err
    run(tmp_path, "absent")
    assert ran(tmp_path) == ["absent", "absent"]


def test_a_rehearsal_is_not_mixed_with_results_of_a_gpu(tmp_path: Path) -> None:
    Record(tmp_path, rehearse=True).write()
    assert "REHEARSAL" in (tmp_path / TABLES).read_text()
    with pytest.raises(BenchmarkError, match="does not hold a GPU's results"):
        Record(tmp_path, rehearse=False)
