"""Bytes for people."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size_text(count: float) -> str:
    """`3.0 GiB`, `17 bytes`."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count} {_UNITS[0]}"
