"""Text for the reports of `topw stats`, `topw compare` and `topw bench`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from topw_deploy.errors import ParameterError


def count_text(number: int, word: str) -> str:
    """Return a number with its noun: `1 prompt`, `2 prompts`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def aligned_columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield the lines of a table. The first `left` columns are aligned to the left, the others to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()


def require_matplotlib() -> None:
    """Raises ParameterError if matplotlib is missing. Call before long runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ParameterError("a picture needs matplotlib; run: pip install matplotlib, or omit --plot.") from None
