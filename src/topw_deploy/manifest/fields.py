"""Check the types and ranges of JSON values. Raises ValueError naming the value and the bound."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

_MOST_TEXT = 1 << 16  # characters
_MOST_DIGITS = 400  # of an integer; longer ones take quadratic time to parse and fit no field
_SHOWN = 60
_SHA256 = re.compile(r"[0-9a-f]{64}")


def decoded(text: str) -> Any:
    """Parse JSON. Raises ValueError for NaN, infinities and duplicate names."""
    return json.loads(text, parse_constant=_no_number, parse_int=_bounded_integer, object_pairs_hook=_unique)


def shown(value: object) -> str:
    """Represent `value` in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def whole(name: str, value: object, least: int, most: int) -> int:
    """An integer in [least, most]. Refuses true and 2.0."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}, not an integer in [{least}, {most}]")
    return value


def real(name: str, value: object) -> float:
    """A number that is finite as a float."""
    try:
        finite = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # integer too large for float
        finite = False
    if not finite:
        raise ValueError(f"{name} is {shown(value)}, not a finite number")
    return value  # type: ignore[return-value]


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, not true or false")
    return value


def text(name: str, value: object) -> str:
    """A UTF-8 encodable string."""
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"{name} is {shown(value)}, not a text of at most {_MOST_TEXT} characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {shown(value)}, which has half of a surrogate pair") from None
    return value


def sha256(name: str, value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{name} is {shown(value)}, which is not a SHA-256 in hexadecimal")
    return value


def listing(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    return value


def mapping(name: str, value: object) -> dict[str, Any]:
    """An object with UTF-8 encodable names."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, not an object")
    for key in value:
        text(f"a name in {name}", key)
    return value


class Fields:
    """Typed access to the fields of a JSON object. name: for messages."""

    def __init__(self, name: str, data: object) -> None:
        self._name, self._data = name, mapping(name, data)

    def only(self, known: Collection[str]) -> Fields:
        """Refuse fields outside `known`."""
        for name in self._data:
            if name not in known:
                raise ValueError(f"{self._name} has the unknown field {shown(name)}")
        return self

    def has(self, name: str) -> bool:
        return name in self._data

    def value(self, name: str) -> Any:
        if name not in self._data:
            raise ValueError(f"{self._full(name)} is missing")
        return self._data[name]

    def inner(self, name: str) -> Fields:
        return Fields(self._full(name), self.value(name))

    def whole(self, name: str, least: int, most: int) -> int:
        return whole(self._full(name), self.value(name), least, most)

    def real(self, name: str) -> float:
        return real(self._full(name), self.value(name))

    def flag(self, name: str) -> bool:
        return flag(self._full(name), self.value(name))

    def text(self, name: str) -> str:
        return text(self._full(name), self.value(name))

    def one_of(self, name: str, known: Collection[str]) -> str:
        found = self.value(name)
        if not isinstance(found, str) or found not in known:
            raise ValueError(f"{self._full(name)} is {shown(found)}, not one of {', '.join(known)}")
        return found

    def listing(self, name: str) -> list[Any]:
        return listing(self._full(name), self.value(name))

    def objects(self, name: str, known: Collection[str]) -> list[Fields]:
        """A list of objects with fields in `known`."""
        full = self._full(name)
        return [Fields(f"{full}[{index}]", item).only(known) for index, item in enumerate(self.listing(name))]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(text(f"an item of {self._full(name)}", item) for item in self.listing(name))

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
            raise ValueError(f"the name {shown(name)} is given twice")
        found[name] = value
    return found
