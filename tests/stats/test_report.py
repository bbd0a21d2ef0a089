"""The summary, table and picture of a few steps, with numbers counted by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling import RuleParameters, TopWParameters
from topw_lab.stats import report as plot
from topw_lab.stats.collect import AnalysedText, CollectedRuns, StepAnalysis
from topw_lab.stats.report import (
    MovedToken,
    SettingSummary,
    equal_ranges,
    report_lines,
    summarise,
    token_text,
    verdict,
)

TEXTS = {1: " the", 2: "\n\t", 3: "�", 4: "$x^$", 5: "é"}


def step(kept: int = 1, certified: bool = True, **changes: Any) -> StepAnalysis:
    given = {
        "mass": 0.5, "entropy": 2.0, "kept_entropy": 0.0, "added": (), "dropped": (),
    }  # fmt: skip
    return StepAnalysis(kept=kept, certified=certified, **{**given, **changes})


def uncertified_step(kept: int, added: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> StepAnalysis:
    return step(kept, False, added=added, dropped=dropped)


def summaries(*sequences: list[StepAnalysis], label: str = "") -> list[SettingSummary]:
    request: Any = SimpleNamespace(params=SimpleNamespace(top_w=TopWParameters(), rule=RuleParameters()))
    result: Any = None
    found = [AnalysedText(request, result, steps, len(steps)) for steps in sequences]
    return summarise(CollectedRuns([(RuleSetting(label, {}), found)], TEXTS, len(sequences)))


def summary_of_changes() -> list[SettingSummary]:
    return summaries(
        [step(), uncertified_step(4, (1,), (2, 3)), uncertified_step(2)], [uncertified_step(9, dropped=(2,))]
    )


def test_steps_are_counted_by_setting_and_by_position() -> None:
    (summary,) = summary_of_changes()
    assert (summary.sequences, summary.whole.steps, summary.whole.certified, summary.whole.changed) == (2, 4, 1, 2)
    first, second, third = summary.ranges
    assert (first.first, first.steps, first.certified, first.changed, first.single) == (1, 2, 1, 1, 1)
    assert [first.kept[name] for name in ("mean", "least", "median", "most")] == [5, 1, 5, 9]
    assert (second.steps, third.steps) == (1, 1)
    assert summary.whole.kept["mean"] == np.mean([1, 4, 2, 9])


def test_tokens_are_counted_once_per_step_and_the_most_frequent_come_first() -> None:
    (summary,) = summary_of_changes()
    assert summary.added == (MovedToken(1, " the", 1),)
    assert summary.dropped == (MovedToken(2, "\n\t", 2), MovedToken(3, "�", 1))


@pytest.mark.parametrize("positions", [0, 1, 3, 16, 17, 64, 1000])
def test_ranges_cover_every_position_once(positions: int) -> None:
    ranges = equal_ranges(positions)
    assert [at for first, last in ranges for at in range(first, last + 1)] == list(range(1, positions + 1))
    assert len(ranges) <= 8


def test_the_report_names_what_geometry_moved_with_readable_tokens() -> None:
    text = "\n".join(report_lines(summary_of_changes()))
    assert "Geometry changed the kept set at 50.0 % of the steps (2 of 4)" in text
    assert "tokens dropped 3, kept 1, 2.0 per changed step" in text
    assert "kept only because of geometry (steps): ' the' 1" in text
    assert r"dropped only because of geometry (steps): '\n\t' 2, <token 3> 1" in text
    assert token_text(MovedToken(5, "é", 1)) == "'é'"


def test_the_report_states_that_geometry_never_acted() -> None:
    (certified,) = summaries([step(), step()])
    assert verdict(certified).startswith("Geometry never acted: all 2 steps were certified")
    (unchanged,) = summaries([step(), uncertified_step(3)])
    assert verdict(unchanged) == ("Geometry never acted: at the 1 uncertified of 2 steps, distances changed nothing.")
    (nothing,) = summaries([])
    assert "no steps" in "\n".join(report_lines([nothing]))


@pytest.mark.slow
def test_the_picture_shows_moved_tokens_or_says_that_there_are_none_also_of_many_settings(tmp_path: Path) -> None:
    pairs = [summaries([uncertified_step(200 * n + 1, added=(4,)), step()], label=f"lam {n}") for n in range(8)]
    texts = []
    for found in (summary_of_changes(), summaries([step(), step(30)]), [summary for (summary,) in pairs]):
        plot.save_plot(found, tmp_path / "a.svg", "title")  # its comments hold the text
        texts.append((tmp_path / "a.svg").read_text("utf-8"))
    moved, certified, many = texts
    assert "' the'" in moved
    assert "Geometry never acted" not in moved
    assert "Geometry never acted: all 2 steps were" in certified
    assert "'$x^$'" in many, "as mathematics it would be an error"
    plot.save_plot(summaries([]), tmp_path / "c.png", "title")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
