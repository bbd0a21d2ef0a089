"""Counts the work of one rendering, and enforces its bounds: steps, characters, and the size of each value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AnySet
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NoReturn

from topw_deploy.errors import TokenizerError

STEPS, STEPS_PER_ITEM, STEPS_PER_INPUT = 2_000_000, 5_000, 2
"""Maximum steps of a rendering: a constant, plus so many per value and per character of the messages.

A step is one template node or 64 characters read; calls, filters and operators take several. Published templates take
about 1,000 steps per message.
"""
CHARACTERS, CHARACTERS_PER_INPUT = 2**27, 256
"""Maximum characters of all new values together: a constant, plus so many per character of the messages."""
LONGEST, LONGEST_PER_INPUT = 2**24, 16
"""Maximum characters of one value: a constant, or so many per character of the messages if that is more."""
DEPTH = 100
"""Maximum nesting of lists and mappings: hashing and comparing them recurses in C without limit."""
MAX_INTEGER_BITS = 4096
"""Maximum bits of an integer."""

_ITEM_SIZE = 16  # characters that count for an item besides its own
_PRINTED_PER_CHARACTER = 10  # a character in a printed list takes at most so many: \U0001f600
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Any = (list, tuple, dict, set, frozenset, *_VIEWS)

_METER: ContextVar[Meter] = ContextVar("meter")


class Meter:
    """Counts the work of one rendering. Its methods raise TokenizerError, naming the template, above a bound.

    name: the template's file.
    data: the values passed to the template. They must not change.
    """

    def __init__(self, name: str, data: Collection[Any]) -> None:
        self._name = name
        self._measured: dict[int, tuple[int, int]] = {}  # id of a container -> (weight, depth)
        self._alive: list[Any] = []  # the measured containers, so that their ids are not used again
        self._steps = self._characters = 0
        self._step_limit = self._character_limit = self._longest = 2**62
        weight = sum(self.measure(value)[0] for value in data)
        self._step_limit = STEPS + STEPS_PER_ITEM * self._steps + STEPS_PER_INPUT * weight
        self._character_limit = CHARACTERS + CHARACTERS_PER_INPUT * weight
        self._longest = max(LONGEST, LONGEST_PER_INPUT * weight)
        self._steps = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this meter the current one within a `with` block."""
        token = _METER.set(self)
        try:
            yield
        finally:
            _METER.reset(token)

    def count_steps(self, count: int) -> None:
        """Count `count` steps."""
        self._steps += max(0, count)
        if self._steps > self._step_limit:
            self.refuse(f"takes more than {self._step_limit:,} steps")

    def check_size(self, size: int) -> None:
        """Refuse to create a value of `size` characters if it would exceed the bound."""
        if size > self._longest:
            self.refuse(f"makes a value of {size:,} characters, but may make at most {self._longest:,}")

    def count_characters(self, size: int) -> None:
        """Count `size` characters of a new value."""
        self.check_size(size)
        self._characters += size
        if self._characters > self._character_limit:
            self.refuse(f"makes more than {self._character_limit:,} characters")

    def count_new(self, value: Any) -> Any:
        """Count a new value. Returns `value`."""
        weight, _ = self.measure(value)
        self.count_steps(2)
        self.check_size(weight)
        self.count_characters(_ITEM_SIZE * len(value) if isinstance(value, _CONTAINERS) else weight)
        return value

    def count_read(self, *values: Any) -> None:
        """Count the steps of reading `values` completely."""
        self.count_steps(2 + (sum(self.measure(value)[0] for value in values) >> 6))

    def count_search(self, text: str, pattern: Any, *, forward: bool) -> None:
        """Count the steps of a search in Python's worst case: the text's length times the pattern's.

        forward: whether the search goes forward, for which Python's algorithm limits the second factor.
        """
        size = len(pattern) if isinstance(pattern, str) else 1
        self.count_steps(len(text) * (min(size, 128) if forward else size) >> 8)

    def measure(self, value: Any) -> tuple[int, int]:
        """Returns (weight of `value` in characters, nesting depth). An item that occurs twice counts twice."""
        if isinstance(value, (str, bytes)):
            return len(value) + _ITEM_SIZE, 0
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                self.refuse(
                    f"makes an integer of {value.bit_length():,} bits, but may make at most {MAX_INTEGER_BITS:,}"
                )
            return _ITEM_SIZE, 0
        if isinstance(value, range):
            return _ITEM_SIZE * len(value), 0
        if not isinstance(value, _CONTAINERS):
            return _ITEM_SIZE, 0
        if (known := self._measured.get(id(value))) is None:
            known = self._measure(value)
            self._measured[id(value)] = known
            self._alive.append(value)
        return known

    def _measure(self, value: Collection[Any]) -> tuple[int, int]:
        self.count_steps(len(value) + 1)
        weight, depth = _ITEM_SIZE, 0
        for item in _items(value):
            item_weight, item_depth = self.measure(item)
            weight += item_weight
            depth = max(depth, item_depth)
        if depth >= DEPTH:
            self.refuse(f"nests more than {DEPTH} lists")
        return weight, depth + 1

    def printed_bound(self, value: Any) -> int:
        """Upper bound on the length of `value` when it is printed."""
        if isinstance(value, str):
            return len(value)
        return self.measure(value)[0] * _PRINTED_PER_CHARACTER + MAX_INTEGER_BITS

    def to_text(self, value: Any) -> str:
        """`value` as Jinja prints it, after a check of its size."""
        if not isinstance(value, str):
            self.check_size(self.printed_bound(value))
        return str(value)

    def join(self, parts: Iterable[str]) -> str:
        """Join `parts`, after a check of the total length."""
        total, kept = 0, []
        for part in parts:
            total += len(part)
            if total > self._longest:
                self.check_size(total)
            kept.append(part)
        self.count_characters(total)
        return "".join(kept)

    def count_each(self, values: Iterable[Any], cost: int = 1) -> Iterator[Any]:
        """Yield `values`, and count `cost` steps for each."""
        for value in values:
            self.count_steps(cost)
            yield value

    def refuse(self, what: str) -> NoReturn:
        """Raise the error of a template that exceeds a bound. what: a clause such as "takes more than 5 steps"."""
        raise TokenizerError(
            f"{self._name}: the chat template {what}, which no chat template should need; correct it and "
            "export the model again, or use a plain prompt."
        )


def current_meter() -> Meter:
    """The meter of the rendering in progress.

    Raises LookupError if there is none: Jinja tries to compute constants while it compiles a template, and gives up on
    any error.
    """
    return _METER.get()


def is_container(value: Any) -> bool:
    """Whether `value` is a list, tuple, mapping, set or view of a mapping."""
    return isinstance(value, _CONTAINERS)


def _items(value: Collection[Any]) -> Iterable[Any]:
    """The items of a container; the keys and values of a mapping."""
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, _VIEWS[2]) and isinstance(value, AnySet):
        return chain.from_iterable(value)
    return value
