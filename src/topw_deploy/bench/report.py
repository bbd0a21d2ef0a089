"""Tables, numbers and sentences that both reports use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topw_deploy.bench.measurement import Machine, Spread, median_interval


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A padded Markdown table."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def significant(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits, without an exponent: 0.0123, 17.4, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    magnitude = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 1
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - magnitude)}f}"
    return f"{rounded:.{digits - 1 - int(f'{rounded:e}'.split('e')[1])}f}"


def duration(value: float) -> str:
    """Seconds in a fitting unit: 17.4 us, 1.23 ms, 2.00 s."""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if value * f >= 1 or u == "us")
    return f"{significant(value * factor)} {unit}"


def comparison(factors: Mapping[str, float]) -> str:
    """A sentence on times relative to ours: 560x faster than a, 12x than b, 1.5x slower than c."""
    faster = [(name, factor) for name, factor in factors.items() if factor >= 1]
    slower = [(name, 1 / factor) for name, factor in factors.items() if factor < 1]
    parts = []
    for word, pairs in (("faster ", faster), ("slower ", slower)):
        for index, (name, factor) in enumerate(pairs):
            parts.append(f"{significant(factor, 2)}x {'' if index else word}than {name}")
    return ", ".join(parts)


def closing_lines(absent: Iterable[tuple[str, str]], machine: Machine) -> list[str]:
    """Lines that list the absent sides, (label, reason), by reason, and a note if the machine is busy."""
    labels: dict[str, list[str]] = {}
    for label, why in absent:
        labels.setdefault(why, []).append(label)
    lines = [""] * bool(labels) + [f"Left out: {'; '.join(same)} - {why}" for why, same in labels.items()]
    if machine.busy:
        lines.append(f"The load was {machine.load:.1f} at the start: other processes were running too.")
    return lines


def reference_side(kinds: Mapping[str, str]) -> str:
    """The side that ratios refer to: our first side, else the first. kinds: kind by side, in order."""
    return next((name for name, kind in kinds.items() if kind == "ours"), next(iter(kinds)))


def ratio_json(ratios: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the median's confidence interval."""
    return {**asdict(Spread.of(ratios)), "median_interval": median_interval(ratios)}


def request_json(request: Any) -> dict[str, Any]:
    """A request's fields as plain JSON types."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(request).items()}
