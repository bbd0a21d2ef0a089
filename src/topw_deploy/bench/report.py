"""What a measurement prints: a table of columns that line up (and that Markdown renders), or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.printable import json_text


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with padded columns, so that it can be read in a terminal too."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits and no exponent: 0.0123, 17.4, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    magnitude = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 1
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - magnitude)}f}"
    return f"{rounded:.{digits - 1 - int(f'{rounded:e}'.split('e')[1])}f}"


def duration(value: float) -> str:
    """Seconds in the unit that fits: 17.4 us, 1.23 ms, 2.00 s."""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if value * f >= 1 or u == "us")
    return f"{significant(value * factor)} {unit}"


def comparison(factors: Mapping[str, float]) -> str:
    """Their time in units of ours, by name, in words: 560x faster than a, 12x than b, 1.5x slower than c."""
    faster = [(name, factor) for name, factor in factors.items() if factor >= 1]
    slower = [(name, 1 / factor) for name, factor in factors.items() if factor < 1]
    parts = []
    for word, pairs in (("faster ", faster), ("slower ", slower)):
        for index, (name, factor) in enumerate(pairs):
            parts.append(f"{significant(factor, 2)}x {'' if index else word}than {name}")
    return ", ".join(parts)


def left_out(absent: Iterable[tuple[str, str]]) -> list[str]:
    """Lines on the sides that are not there, given as (label, why); those with one reason share a line."""
    labels: dict[str, list[str]] = {}
    for label, why in absent:
        labels.setdefault(why, []).append(label)
    return [""] * bool(labels) + [f"Left out: {'; '.join(same)} - {why}" for why, same in labels.items()]


def write_json(document: Any, target: str) -> None:
    """Write `document` to the file `target`. Raises ParameterError if it cannot be written."""
    try:
        Path(target).write_text(json_text(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"{target} cannot be written: {error.strerror or error}; name another file.") from None
