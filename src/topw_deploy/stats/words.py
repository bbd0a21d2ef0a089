"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
