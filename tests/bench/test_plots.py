"""Ticks of the bar charts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from topw_deploy.errors import ParameterError
from topw_lab.plots import KINDS, Bar, Panel, draw_panels


def panel(bars: int) -> Panel:
    kinds = list(KINDS)
    made = [Bar(f"side {i}", (m * 0.9, m, m * 1.2), kinds[i % 3], f"{i}") for i in range(bars)
            for m in [1e-6 * 4**i]]  # fmt: skip
    return Panel("a subtitle", "A title that says what came out, " * 4, made)


def test_every_tick_has_its_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: dict[str, list[str]] = {}
    save = Figure.savefig

    def kept(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        (ax,) = figure.axes
        seen[ax.get_xscale()] = [label.get_text() for label in ax.get_xticklabels(which="both") if label.get_text()]

    monkeypatch.setattr(Figure, "savefig", kept)
    draw_panels(tmp_path / "narrow.png", [panel(1)], "one step", "")
    draw_panels(tmp_path / "wide.png", [panel(6)], "one step", "")
    assert seen["linear"][0] == "0"
    assert {"200 ns", "1 us"} < set(seen["linear"])
    assert {"1 us", "10 us"} < set(seen["log"])
    assert all(text.endswith(("s", "ms", "us", "ns")) for text in [*seen["linear"][1:], *seen["log"]])


def test_without_matplotlib_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ParameterError, match=r"a picture needs matplotlib, which is not installed; run: .*\[plot\]"):
        draw_panels(tmp_path / "x.png", [panel(2)], "", "")
