"""Methods that templates may call, with bounds on results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

from topw_deploy.runtime.template.meter import Meter

_SEARCHES = frozenset({"count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "startswith"})
_BACKWARDS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"})  # stripping looks up each one
_PLAIN = frozenset({
    "capitalize", "casefold", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "splitlines", "swapcase", "title", "upper",
})  # fmt: skip
_OF_CONTAINERS = frozenset({"copy", "count", "get", "index", "items", "keys", "values"})
_GROWS = 3  # maximum growth in upper case
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PIECE = 16  # size of each piece of text besides its characters


def call(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a plain value's bound `method`. Raises SecurityError for an unknown one."""
    owner, name = method.__self__, method.__name__
    meter.read(owner, *args, *kwargs.values())
    if isinstance(owner, str):
        given = [*args, *kwargs.values()]
        if name == "join" and len(given) == 1:
            return join(meter, owner, given[0])
        size = _size(meter, owner, name, given)
    elif isinstance(owner, (list, tuple, dict)) and name in _OF_CONTAINERS:
        return meter.make(method(*args, **kwargs)) if name == "copy" else method(*args, **kwargs)
    else:
        size = None
    if size is None:
        raise SecurityError(f"a template may not call {name!r} of a {type(owner).__name__}")
    meter.expect(size)
    return meter.make(method(*args, **kwargs))


def join(meter: Meter, separator: str, values: Any) -> str:
    """`separator.join(values)` after a length check."""
    items = list(meter.each(values))
    meter.expect(sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(separator))
    text: str = meter.make(separator.join(items))
    return text


def replaced(meter: Meter, text: str, old: Any, new: Any, count: Any = -1) -> int:
    """Upper bound on the length of `text.replace(old, new, count)`."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    meter.search(text, old, forward=True)
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(text) + times * len(new)


def _size(meter: Meter, text: str, name: str, given: list[Any]) -> int | None:
    """Upper bound on the size of the result; None for an unknown method."""
    first = given[0] if given else None
    if name in _SEARCHES or name in _BACKWARDS:
        for pattern in first if isinstance(first, tuple) else [first]:
            meter.search(text, pattern, forward=name in _SEARCHES)
    elif name not in _PLAIN:
        bound = _BOUNDS.get(name)
        return None if bound is None else bound(meter, text, given)
    lines = sum(map(text.count, _LINE_ENDS)) if name == "splitlines" else 0
    return _GROWS * len(text) + _PIECE * (lines + 1)


def _padded(meter: Meter, text: str, given: list[Any]) -> int:
    return max(len(text), given[0] if given and isinstance(given[0], int) else 0)


def _expanded(meter: Meter, text: str, given: list[Any]) -> int:
    width = given[0] if given and isinstance(given[0], int) else 8
    return len(text) + text.count("\t") * max(0, width)


def _replaced(meter: Meter, text: str, given: list[Any]) -> int:
    return replaced(meter, text, *given[:3]) if len(given) >= 2 else len(text)


def _split(meter: Meter, text: str, given: list[Any]) -> int:
    separator = next((value for value in given if isinstance(value, str)), None)
    if not separator:
        return len(text) + _PIECE * (len(text) // 2 + 1)
    meter.search(text, separator, forward=False)
    return len(text) + _PIECE * (text.count(separator) + 1)


_BOUNDS: dict[str, Callable[[Meter, str, list[Any]], int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "replace": _replaced,
    "rsplit": _split,
    "split": _split,
}
