"""The methods of plain values that templates may call, with bounds on their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

from topw_deploy.runtime.template.meter import Meter

_SEARCHES = frozenset({"count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "startswith"})
_BACKWARDS = frozenset(
    {"lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"}
)  # stripping looks each character up in the argument
_PLAIN = frozenset({
    "capitalize", "casefold", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "splitlines", "swapcase", "title", "upper",
})  # fmt: skip
_OF_CONTAINERS = frozenset({"copy", "count", "get", "index", "items", "keys", "values"})
_GROWTH = 3  # one character becomes at most so many in upper case
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PIECE_SIZE = 16  # characters that count for each piece of a split text besides its own


def call_method(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the bound `method` of a plain value. Raises SecurityError for a method that templates may not call."""
    owner, name = method.__self__, method.__name__
    meter.count_read(owner, *args, *kwargs.values())
    if isinstance(owner, str):
        given = [*args, *kwargs.values()]
        if name == "join" and len(given) == 1:
            return join_texts(meter, owner, given[0])
        size = _result_bound(meter, owner, name, given)
    elif isinstance(owner, (list, tuple, dict)) and name in _OF_CONTAINERS:
        return meter.count_new(method(*args, **kwargs)) if name == "copy" else method(*args, **kwargs)
    else:
        size = None
    if size is None:
        raise SecurityError(f"a template may not call {name!r} of a {type(owner).__name__}")
    meter.check_size(size)
    return meter.count_new(method(*args, **kwargs))


def join_texts(meter: Meter, separator: str, values: Any) -> str:
    """Returns `separator.join(values)`, after a check of its length."""
    items = list(meter.count_each(values))
    meter.check_size(sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(separator))
    text: str = meter.count_new(separator.join(items))
    return text


def replaced_bound(meter: Meter, text: str, old: Any, new: Any, count: Any = -1) -> int:
    """Upper bound on the length of `text.replace(old, new, count)`."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    meter.count_search(text, old, forward=True)
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(text) + times * len(new)


def _result_bound(meter: Meter, text: str, name: str, given: list[Any]) -> int | None:
    """Upper bound on the size of the result; None for an unknown method."""
    first = given[0] if given else None
    if name in _SEARCHES or name in _BACKWARDS:
        for pattern in first if isinstance(first, tuple) else [first]:
            meter.count_search(text, pattern, forward=name in _SEARCHES)
    elif name not in _PLAIN:
        bound = _BOUNDS.get(name)
        return None if bound is None else bound(meter, text, given)
    lines = sum(map(text.count, _LINE_ENDS)) if name == "splitlines" else 0
    return _GROWTH * len(text) + _PIECE_SIZE * (lines + 1)


def _padded_bound(meter: Meter, text: str, given: list[Any]) -> int:
    return max(len(text), given[0] if given and isinstance(given[0], int) else 0)


def _expanded_bound(meter: Meter, text: str, given: list[Any]) -> int:
    width = given[0] if given and isinstance(given[0], int) else 8
    return len(text) + text.count("\t") * max(0, width)


def _replaced_bound(meter: Meter, text: str, given: list[Any]) -> int:
    return replaced_bound(meter, text, *given[:3]) if len(given) >= 2 else len(text)


def _split_bound(meter: Meter, text: str, given: list[Any]) -> int:
    separator = next((value for value in given if isinstance(value, str)), None)
    if not separator:
        return len(text) + _PIECE_SIZE * (len(text) // 2 + 1)
    meter.count_search(text, separator, forward=False)
    return len(text) + _PIECE_SIZE * (text.count(separator) + 1)


_BOUNDS: dict[str, Callable[[Meter, str, list[Any]], int]] = {
    "center": _padded_bound,
    "ljust": _padded_bound,
    "rjust": _padded_bound,
    "zfill": _padded_bound,
    "expandtabs": _expanded_bound,
    "replace": _replaced_bound,
    "rsplit": _split_bound,
    "split": _split_bound,
}
