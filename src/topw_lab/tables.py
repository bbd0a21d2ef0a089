"""The tables and numbers in the reports of all measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table. The first `left` columns are aligned to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(4, *map(len, column)) for column in zip(*cells, strict=True)]
    is_left = [column < left for column in range(len(widths))]
    lines = [
        " | ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        )
        for row in cells
    ]
    rule = "|".join(
        "-" * (width + 2) if left else "-" * (width + 1) + ":" for width, left in zip(widths, is_left, strict=True)
    )
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def significant(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and without an exponent: 0.0123, 17.4, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - len(str(int(abs(rounded)))))}f}"
    exponent = int(f"{rounded:e}".split("e")[1])
    return f"{rounded:.{digits - 1 - exponent}f}"


def duration(*seconds: float) -> str:
    """Seconds in a fitting unit: 17.4 us, 1.23 ms. With quartiles (low, median, high): 17.1 us (16.9-17.6)."""
    middle = seconds[len(seconds) // 2]
    unit, factor = next((unit for unit in _UNITS if middle * unit[1] >= 1), _UNITS[-1])
    ends = "-".join(significant(end * factor) for end in (seconds[0], seconds[-1]))
    return f"{significant(middle * factor)} {unit}" + (f" ({ends})" if len(seconds) > 1 else "")


def percentage(count: int, total: int) -> str:
    """`count` / `total` in per cent. 100.0 % and 0.0 % are exact: other shares round to 99.9 % and 0.1 % at most."""
    if not total:
        return "-"
    share = 100 * count / total
    return f"{min(max(share, 0.1), 99.9) if 0 < count < total else share:.1f} %"
