"""Bounds of one rendering: steps, characters, and the size of each value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AnySet
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NoReturn

from topw_deploy.errors import TokenizerError

STEPS, STEPS_PER_ITEM, STEPS_PER_INPUT = 2_000_000, 5_000, 2
"""Maximum steps of a rendering, plus extra per value and character of the messages.

A step is one template node or 64 characters read; calls, filters and operators take several. Published templates take
about 1,000 per message.
"""
CHARACTERS, CHARACTERS_PER_INPUT = 2**27, 256
"""Maximum characters made, plus extra per character of the messages."""
LONGEST, LONGEST_PER_INPUT = 2**24, 16
"""Maximum characters of a value, or a multiple of the messages' characters."""
DEPTH = 100
"""Maximum nesting: hashing and comparing recurse in C without limit."""
BITS = 4096
"""Maximum bits of an integer."""

_ITEM = 16  # size of an item besides its characters
_PRINTED = 10  # characters that a character can take when a list is printed: \U0001f600
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Any = (list, tuple, dict, set, frozenset, *_VIEWS)

_METER: ContextVar[Meter] = ContextVar("meter")


class Meter:
    """Counts the work of one rendering. Raises TokenizerError, naming the template, above a bound.

    name: the template's file.
    data: the values given to the template, which must not change.
    """

    def __init__(self, name: str, data: Collection[Any]) -> None:
        self._name = name
        self._measured: dict[int, tuple[int, int]] = {}  # id -> (weight, depth)
        self._alive: list[Any] = []  # prevents reuse of ids
        self._steps = self._characters = 0
        self._step_limit = self._character_limit = self._longest = 2**62
        weight = sum(self.measure(value)[0] for value in data)
        self._step_limit = STEPS + STEPS_PER_ITEM * self._steps + STEPS_PER_INPUT * weight
        self._character_limit = CHARACTERS + CHARACTERS_PER_INPUT * weight
        self._longest = max(LONGEST, LONGEST_PER_INPUT * weight)
        self._steps = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the current meter."""
        token = _METER.set(self)
        try:
            yield
        finally:
            _METER.reset(token)

    def step(self, count: int) -> None:
        """Count steps."""
        self._steps += max(0, count)
        if self._steps > self._step_limit:
            self.refuse(f"takes more than {self._step_limit:,} steps")

    def expect(self, size: int) -> None:
        """Refuse a value of more than the allowed size before it is created."""
        if size > self._longest:
            self.refuse(f"makes a value of {size:,} characters, but may make at most {self._longest:,}")

    def use(self, size: int) -> None:
        """Count `size` new characters."""
        self.expect(size)
        self._characters += size
        if self._characters > self._character_limit:
            self.refuse(f"makes more than {self._character_limit:,} characters")

    def make(self, value: Any) -> Any:
        """Count and return the new `value`."""
        weight, _ = self.measure(value)
        self.step(2)
        self.expect(weight)
        self.use(_ITEM * len(value) if isinstance(value, _CONTAINERS) else weight)
        return value

    def read(self, *values: Any) -> None:
        """Count a full read of `values`."""
        self.step(2 + (sum(self.measure(value)[0] for value in values) >> 6))

    def search(self, text: str, pattern: Any, *, forward: bool) -> None:
        """Count a search at Python's worst case: text times pattern, which only a forward search reduces."""
        size = len(pattern) if isinstance(pattern, str) else 1
        self.step(len(text) * (min(size, 128) if forward else size) >> 8)

    def measure(self, value: Any) -> tuple[int, int]:
        """Returns (characters of `value`, with a repeated item counted each time; nesting depth)."""
        if isinstance(value, (str, bytes)):
            return len(value) + _ITEM, 0
        if isinstance(value, int):
            if value.bit_length() > BITS:
                self.refuse(f"makes an integer of {value.bit_length():,} bits, but may make at most {BITS:,}")
            return _ITEM, 0
        if isinstance(value, range):
            return _ITEM * len(value), 0
        if not isinstance(value, _CONTAINERS):
            return _ITEM, 0
        if (known := self._measured.get(id(value))) is None:
            known = self._measure(value)
            self._measured[id(value)] = known
            self._alive.append(value)
        return known

    def _measure(self, value: Collection[Any]) -> tuple[int, int]:
        self.step(len(value) + 1)
        weight, depth = _ITEM, 0
        for item in _items(value):
            item_weight, item_depth = self.measure(item)
            weight += item_weight
            depth = max(depth, item_depth)
        if depth >= DEPTH:
            self.refuse(f"nests more than {DEPTH} lists")
        return weight, depth + 1

    def printed(self, value: Any) -> int:
        """Upper bound on the printed length."""
        if isinstance(value, str):
            return len(value)
        return self.measure(value)[0] * _PRINTED + BITS

    def text(self, value: Any) -> str:
        """`value` as Jinja prints it."""
        if not isinstance(value, str):
            self.expect(self.printed(value))
        return str(value)

    def join(self, parts: Iterable[str]) -> str:
        """Join `parts` after a length check."""
        total, kept = 0, []
        for part in parts:
            total += len(part)
            if total > self._longest:
                self.expect(total)
            kept.append(part)
        self.use(total)
        return "".join(kept)

    def each(self, values: Iterable[Any], cost: int = 1) -> Iterator[Any]:
        """Iterate, counting `cost` steps per item."""
        for value in values:
            self.step(cost)
            yield value

    def refuse(self, what: str) -> NoReturn:
        raise TokenizerError(
            f"{self._name}: the chat template {what}, which no chat template should need; correct it and "
            "export the model again, or use a plain prompt."
        )


def current() -> Meter:
    """The current rendering's meter. Raises LookupError outside one, where Jinja folds constants."""
    return _METER.get()


def is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _items(value: Collection[Any]) -> Iterable[Any]:
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, _VIEWS[2]) and isinstance(value, AnySet):
        return chain.from_iterable(value)
    return value
