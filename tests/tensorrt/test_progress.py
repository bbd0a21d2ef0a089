"""Nested phases, steps from several threads, reporting errors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from topw_deploy.tensorrt.build import Phases


def test_phases_within_phases_make_one_growing_number() -> None:
    shown: list[int] = []
    phases = Phases(shown.append)
    phases.phase_start("all", None, 4)
    phases.step_complete("all", 0)
    phases.phase_start("part", "all", 2)
    phases.step_complete("part", 0)
    phases.phase_start("part of part", "part", 5)
    phases.step_complete("part of part", 4)
    phases.phase_finish("part of part")
    phases.step_complete("part", 1)
    phases.phase_finish("part")
    phases.step_complete("all", 3)
    assert shown == [25, 12, 13, 50]  # 1/4, half of the next, its rest, the end
    assert phases.stopped is None


def test_threads_advance_one_after_the_other_and_never_beyond_the_end() -> None:
    shown, busy = list[int](), threading.Lock()

    def advance(part: int) -> None:
        assert busy.acquire(blocking=False), "two threads advance at once"
        time.sleep(0)  # lets another thread run
        shown.append(part)
        busy.release()

    phases = Phases(advance)
    phases.phase_start("all", None, 8)

    def work(number: int) -> None:
        name = f"part {number}"
        for _ in range(20):
            phases.phase_start(name, "all", 50)
            for step in range(50):
                phases.step_complete(name, step)
            phases.phase_finish(name)
        phases.step_complete("all", number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    phases.phase_finish("all")
    assert phases.stopped is None
    assert min(shown) > 0
    assert sum(shown) == 100


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), BrokenPipeError()])
def test_an_exception_while_reporting_cancels_the_build_and_is_kept(raised: BaseException) -> None:
    def advance(part: int) -> None:
        raise raised

    phases = Phases(advance)
    phases.phase_start("all", None, 4)
    assert not phases.step_complete("all", 0)
    assert not phases.step_complete("all", 0)
    assert phases.stopped is raised
