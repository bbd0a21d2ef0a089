"""Shared by the reports of `topw stats` and `topw bench`."""

from __future__ import annotations

from topw_deploy.errors import ParameterError


def counted(number: int, word: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def require_matplotlib() -> None:
    """Raises ParameterError if matplotlib is missing. Call before long runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ParameterError("a picture needs matplotlib; run: pip install matplotlib, or omit --plot.") from None
