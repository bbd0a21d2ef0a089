"""Check the types and ranges of JSON values.

Each function returns the value, or raises a ValueError that names the value and the bound.
name: what the value is called in the message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from topw_deploy.plain_text import short_repr

_MOST_TEXT = 1 << 16  # characters
_MOST_DIGITS = 400  # of an integer: parsing takes quadratic time, and no field holds longer ones
_SHA256 = re.compile(r"[0-9a-f]{64}")


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for NaN, infinities, integers of over 400 digits and names given twice."""
    return json.loads(text, parse_constant=_no_number, parse_int=_bounded_integer, object_pairs_hook=_unique)


def integer(name: str, value: object, least: int, most: int) -> int:
    """Check for an integer in [least, most]; true and 2.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {short_repr(value)}, not an integer in [{least}, {most}]")
    return value


def finite_number(name: str, value: object) -> float:
    """Check for a number that is finite as a float."""
    try:
        finite = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # integer too large for float
        finite = False
    if not finite:
        raise ValueError(f"{name} is {short_repr(value)}, not a finite number")
    return value  # type: ignore[return-value]


def boolean(name: str, value: object) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {short_repr(value)}, not true or false")
    return value


def text(name: str, value: object) -> str:
    """Check for a string of at most 65,536 characters that UTF-8 can encode."""
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"{name} is {short_repr(value)}, not a text of at most {_MOST_TEXT} characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {short_repr(value)}, which has half of a surrogate pair") from None
    return value


def sha256(name: str, value: object) -> str:
    """Check for a SHA-256 in hexadecimal."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{name} is {short_repr(value)}, which is not a SHA-256 in hexadecimal")
    return value


def array(name: str, value: object) -> list[Any]:
    """Check for a list."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {short_repr(value)}, not a list")
    return value


def mapping(name: str, value: object) -> dict[str, Any]:
    """Check for an object whose names UTF-8 can encode."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {short_repr(value)}, not an object")
    for key in value:
        text(f"a name in {name}", key)
    return value


class Fields:
    """The fields of a JSON object, whose types are checked when they are read. name: the object's name in messages."""

    def __init__(self, name: str, data: object) -> None:
        self._name, self._data = name, mapping(name, data)

    def refuse_others(self, known: Collection[str]) -> Fields:
        """Raise ValueError for a field outside `known`. Returns self."""
        for name in self._data:
            if name not in known:
                raise ValueError(f"{self._name} has the unknown field {short_repr(name)}")
        return self

    def has(self, name: str) -> bool:
        return name in self._data

    def value(self, name: str) -> Any:
        """Return the value of a field of any type. Raises ValueError if it is missing."""
        if name not in self._data:
            raise ValueError(f"{self._full(name)} is missing")
        return self._data[name]

    def fields(self, name: str) -> Fields:
        """Return the fields of the object in a field."""
        return Fields(self._full(name), self.value(name))

    def integer(self, name: str, least: int, most: int) -> int:
        return integer(self._full(name), self.value(name), least, most)

    def number(self, name: str) -> float:
        return finite_number(self._full(name), self.value(name))

    def boolean(self, name: str) -> bool:
        return boolean(self._full(name), self.value(name))

    def text(self, name: str) -> str:
        return text(self._full(name), self.value(name))

    def one_of(self, name: str, known: Collection[str]) -> str:
        """Return a string that is one of `known`."""
        found = self.value(name)
        if not isinstance(found, str) or found not in known:
            raise ValueError(f"{self._full(name)} is {short_repr(found)}, not one of {', '.join(known)}")
        return found

    def array(self, name: str) -> list[Any]:
        return array(self._full(name), self.value(name))

    def objects(self, name: str, known: Collection[str]) -> list[Fields]:
        """Return a list of objects that have no fields outside `known`."""
        full = self._full(name)
        return [Fields(f"{full}[{index}]", item).refuse_others(known) for index, item in enumerate(self.array(name))]

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(text(f"an item of {self._full(name)}", item) for item in self.array(name))

    def mapping(self, name: str) -> dict[str, Any]:
        return mapping(self._full(name), self.value(name))

    def _full(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _bounded_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {short_repr(name)} is given twice")
        found[name] = value
    return found
