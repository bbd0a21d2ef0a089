"""Nested phases, steps from several threads, reporting errors."""

from __future__ import annotations

import threading

import pytest

from topw_deploy.tensorrt.build import Phases


def test_phases_within_phases_make_one_growing_number() -> None:
    shown: list[int] = []
    phases = Phases(shown.append)
    phases.start("all", None, 4)
    phases.step("all", 0)
    phases.start("part", "all", 2)
    phases.step("part", 0)
    phases.start("part of part", "part", 5)
    phases.step("part of part", 4)
    phases.finish("part of part")
    phases.step("part", 1)
    phases.finish("part")
    phases.step("all", 3)
    assert shown == [25, 12, 13, 50]  # 1/4, half of the next, its rest, the end
    assert phases.stopped is None


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), BrokenPipeError()])
def test_an_exception_while_reporting_cancels_the_build_and_is_kept(raised: BaseException) -> None:
    def advance(part: int) -> None:
        raise raised

    phases = Phases(advance)
    phases.start("all", None, 4)
    assert not phases.step("all", 0)
    assert not phases.step("all", 0)
    assert phases.stopped is raised


def test_threads_may_report_at_once() -> None:
    shown: list[int] = []
    phases = Phases(shown.append)
    phases.start("all", None, 8)

    def work(number: int) -> None:
        phases.start(f"thread {number}", "all", 50)
        for step in range(50):
            phases.step(f"thread {number}", step)
        phases.finish(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    phases.step("all", 7)
    assert sum(shown) == 100
    assert all(part > 0 for part in shown)
