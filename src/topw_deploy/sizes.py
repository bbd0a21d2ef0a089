"""Parse and format numbers of bytes."""

from __future__ import annotations

import re

from topw_deploy.errors import ParameterError

_DECIMAL = ("bytes", "kB", "MB", "GB", "TB")
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST = float(1 << 63)  # bytes; offsets in files have 63 bits
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]b|[kmg]ib|)", re.IGNORECASE)


def parse_size(size: int | str, name: str = "the size") -> int:
    """Return the bytes of a size: a number, `500MB` (10^6), `2GB` (10^9), `2GiB` (2^30), ...

    name: the parameter in messages.
    Raises ParameterError for anything else, and from 2^63 bytes on.
    """
    match = _SIZE.fullmatch(str(size).strip())
    found = 0.0 if match is None else float(match[1]) * _UNITS[match[2].upper()]
    if not 0.5 < found < _MOST:
        raise ParameterError(
            f"{name} is {size!r:.60}, but must be a positive number of bytes below 2^63, such as 500MB, 2GB or 2GiB.",
            name,
        )
    return round(found)


def decimal_size(count: float, digits: int = 1) -> str:
    """Format a size in powers of 1000, with `digits` decimals: `17 bytes`, `20.3 MB`, `1.2 GB`."""
    unit = 0
    while round(count, digits) >= 1000 and unit < len(_DECIMAL) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{digits}f} {_DECIMAL[unit]}" if unit else f"{count:.0f} {_DECIMAL[0]}"


def binary_size(count: float) -> str:
    """Format a size in powers of 1024: `17 bytes`, `3.0 GiB`."""
    unit = 0
    while round(count, 1) >= 1024 and unit < len(_BINARY) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_BINARY[unit]}" if unit else f"{count} {_BINARY[0]}"
