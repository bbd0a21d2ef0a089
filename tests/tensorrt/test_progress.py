"""Nested phases, steps from several threads, reporting errors."""

from __future__ import annotations

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
