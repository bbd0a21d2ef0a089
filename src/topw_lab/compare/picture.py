"""Draw accuracy over temperature, a line per rule, as a picture for `topw compare --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.text import count_text
from topw_lab.compare.comparison import CONFIDENCE, Comparison, RuleTexts
from topw_lab.plots import COLOURS, MUTED, TEXT, finish_axes, new_figure, save_figure

_WIDTH, _HEIGHT = 7.2, 4.3  # inches
_OTHERS = (*COLOURS[1:], "#56b4e9", "#8c6d31", "#cc3366", TEXT)
_DASHES = ("-", "--", ":", "-.")  # of Top-W's lines, which have one colour
_MARK_SHIFT = 0.012  # share of the axis between the marks of two rules at the same temperature
_LABEL_DISTANCE = 4.6  # points of accuracy between two labels


def save_plot(comparison: Comparison, path: Path) -> None:
    """Draw accuracy with its intervals. The name of each rule stands at the end of its line.

    Raises ParameterError without matplotlib, or if `path` cannot be written.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    low, high = min(comparison.temperatures), max(comparison.temperatures)
    ends: list[tuple[float, str, str]] = []  # accuracy at the last temperature, name, colour
    for place, (rule, colour, dashes) in enumerate(_styles(comparison.rules)):
        cells = [cell for cell in comparison.cells if cell.rule == rule]
        shift = (place - (len(comparison.rules) - 1) / 2) * _MARK_SHIFT * (high - low) / 2
        is_fixed = "temperature" in rule.parameters
        _draw_line(axes, cells, 0 if is_fixed else shift, colour, dashes, is_fixed=is_fixed)
        ends.append((_percent(cells[-1].values["accuracy"].value), rule.title, colour))
    _write_labels(axes, ends, high + 0.03 * (high - low))
    axes.set_xticks(comparison.temperatures)
    highest = max(_percent(cell.values["accuracy"].high or cell.values["accuracy"].value) for cell in comparison.cells)
    axes.set_ylim(-2, min(102, highest + 6))
    finish_axes(axes, "Right answers by sampling rule", grid="y", x="temperature", y="questions answered correctly, %")
    asked = sum(bool(each) for each in comparison.answers)
    size = f"{count_text(asked, 'question')}, {count_text(comparison.samples, 'text')} each"
    save_figure(figure, path, f"{size}, {CONFIDENCE:.0%} intervals.")


def _styles(rules: Sequence[RuleSetting]) -> list[tuple[RuleSetting, str, Any]]:
    """(rule, colour, dashes) of each line. Greedy decoding is grey."""
    found: list[tuple[RuleSetting, str, Any]] = []
    ours = others = 0
    for rule in rules:
        if "temperature" in rule.parameters:
            found.append((rule, MUTED, (0, (1, 1))))
        elif rule.parameters["rule"] == TOP_W.name:
            found.append((rule, COLOURS[0], _DASHES[ours % len(_DASHES)]))
            ours += 1
        else:
            found.append((rule, _OTHERS[others % len(_OTHERS)], "-"))
            others += 1
    return found


def _draw_line(
    axes: Any, cells: Sequence[RuleTexts], shift: float, colour: str, dashes: Any, *, is_fixed: bool
) -> None:
    values = [cell.values["accuracy"] for cell in cells]
    at = [cell.temperature + shift for cell in cells]
    heights = [_percent(value.value) for value in values]
    if is_fixed:
        axes.plot(at, heights, color=colour, lw=2.2, ls=dashes, zorder=3)  # above a line of the same heights
        return
    spread = [[height - _percent(value.low) for height, value in zip(heights, values, strict=True)],
              [_percent(value.high) - height for height, value in zip(heights, values, strict=True)]]  # fmt: skip
    marks = {"marker": "o", "ms": 3.5, "capsize": 2, "elinewidth": 1, "ecolor": f"{colour}70"}  # whiskers are pale
    axes.errorbar(at, heights, yerr=spread, color=colour, lw=1.8, ls=dashes, **marks)


def _write_labels(axes: Any, ends: Sequence[tuple[float, str, str]], at: float) -> None:
    """Write the names at the ends of the lines, from the highest down, apart from each other."""
    ordered = sorted(ends, reverse=True)
    places = [height for height, _, _ in ordered]
    for place in range(1, len(places)):  # down from the highest
        places[place] = min(places[place], places[place - 1] - _LABEL_DISTANCE)
    places[-1] = max(places[-1], 0.0)
    for place in reversed(range(len(places) - 1)):  # and up from the axis
        places[place] = max(places[place], places[place + 1] + _LABEL_DISTANCE)
    for (_, name, colour), height in zip(ordered, places, strict=True):
        axes.annotate(name, (at, height), color=colour, fontsize=9, va="center", annotation_clip=False)


def _percent(share: float | None) -> float:
    return 100 * (share or 0.0)
