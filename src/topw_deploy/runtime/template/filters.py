"""Jinja's filters, tests and formatting with bounds."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS

from topw_deploy.runtime.template.meter import Meter, current, is_container
from topw_deploy.runtime.template.methods import replaced

_WIDE_FIELD = re.compile(r"[0-9]{4,}")
_WIDE_CONVERSION = re.compile(r"[%)][#0\- +]*(?:[1-9][0-9]{3,}|\*|[0-9]*\.(?:[0-9]{4,}|\*))")  # also after (name)
_WIDTH = 1000
Guard = Callable[[Meter, Any, "list[Any]", "dict[str, Any]"], Any]
"""A function that checks a filter's value and arguments, and returns the value to filter."""

_FILTER = 6  # steps
_SORTS = 20  # comparisons per item
_WIDEST = 32  # JSON indentation
_COUNT = 100_000  # slices or batch items, as Jinja's `range`
_DIGITS = 308  # digits of a float


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Filters by name, except those for HTML."""
    found = {name: _bounded(FILTERS[name], guard) for name, guard in _GUARDS.items()}
    return {**found, **{name: FILTERS[name] for name in _FREE}, "tojson": _tojson, "format": _format}


def bounded_tests() -> dict[str, Callable[..., Any]]:
    return {name: _read_by(TESTS[name]) for name in _READING}


def _bounded(function: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's context is first

    @functools.wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        meter = current()
        meter.step(_FILTER)
        rest = list(args[place + 1 :])
        value = guard(meter, args[place], rest, kwargs)
        result = function(*args[:place], value, *rest, **kwargs)
        if isinstance(result, Iterator):
            return meter.each(result, _cost_of_names(rest, kwargs))
        return meter.make(result)

    return filter_


def _read_by(test: Any) -> Callable[..., Any]:
    @functools.wraps(test)
    def test_(*args: Any) -> Any:
        meter = current()
        meter.read(*args)
        for value in args:
            meter.expect(meter.printed(value))
        return test(*args)

    return test_


def _cost_of_names(rest: list[Any], kwargs: dict[str, Any]) -> int:
    """Steps per item: an attribute name may be a path."""
    return 1 + sum(len(value) for value in (*rest, *kwargs.values()) if isinstance(value, str)) // 8


def _argument(rest: list[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return rest[place] if place < len(rest) else kwargs.get(name, default)


def _text(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    meter.read(value, *rest, *kwargs.values())
    meter.expect(meter.printed(value) * (12 if isinstance(value, str) else 1))
    return value


def _listed(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, str):
        meter.expect(len(value) * 16)
    if hasattr(type(value), "__len__"):
        meter.step(len(value) * _cost_of_names(rest, kwargs))
    return value


def _lazy(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    return meter.each(value) if isinstance(value, Iterator) else value


def _sorted(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _listed(meter, value, rest, kwargs)
    weight, _ = meter.measure(value)
    meter.step(_SORTS * (weight >> 4))
    return value


def _joined(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _listed(meter, value, rest, kwargs)
    meter.read(value)
    if is_container(value) or isinstance(value, str):
        separator = meter.printed(_argument(rest, kwargs, 0, "d", ""))
        meter.expect(sum(meter.printed(item) for item in value) + len(value) * separator)
    return value


def _centered(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    width = _argument(rest, kwargs, 0, "width", 80)
    meter.expect(max(meter.printed(value), width if isinstance(width, int) else 0))
    return value


def _indented(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    text, width = meter.text(value), _argument(rest, kwargs, 0, "width", 4)
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    meter.read(text)
    meter.expect(len(text) + (len(text.splitlines()) + 1) * max(1, size))
    return value


def _replaced(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    old, new = (_argument(rest, kwargs, place, name, "") for place, name in ((0, "old"), (1, "new")))
    count = _argument(rest, kwargs, 2, "count", None)
    meter.expect(replaced(meter, meter.text(value), meter.text(old), meter.text(new), count))
    return value


def _trimmed(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    meter.search(meter.text(value), _argument(rest, kwargs, 0, "chars", None), forward=False)
    return _text(meter, value, rest, kwargs)


def _rounded(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    digits = _argument(rest, kwargs, 0, "precision", 0)
    if isinstance(digits, int) and abs(digits) > _DIGITS:
        raise SecurityError(f"round: the precision is {meter.text(digits):.20}, but may be at most {_DIGITS}")
    return _text(meter, value, rest, kwargs)


def _cut(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    for number in (*rest, *kwargs.values()):
        if isinstance(number, int) and number > _COUNT:
            raise SecurityError(f"batch and slice take numbers up to {_COUNT:,}, not {meter.text(number):.20}")
        meter.step(number if isinstance(number, int) else 1)
    return _listed(meter, value, rest, kwargs)


def _summed(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _listed(meter, value, rest, kwargs)
    start = _argument(rest, kwargs, 1, "start", 0)
    if is_container(start):  # each sum copies both lists
        weight = meter.measure(value)[0] + meter.measure(start)[0]
        meter.step(len(value) * weight >> 6)
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's filter escapes HTML, which is wrong in a prompt.
    meter = current()
    widths = [len(given) if isinstance(given, str) else given or 0 for given in (indent, *(separators or ()))]
    if max(widths) > _WIDEST:
        raise SecurityError(f"tojson: indent and separators may have at most {_WIDEST} characters")
    weight, depth = meter.measure(value)
    meter.read(value)
    meter.expect(weight * (12 if ensure_ascii else 6) + weight // 16 * (depth + 1) * sum(map(abs, widths)))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.use(len(text))
    return text


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    meter = current()
    return percent(meter, meter.text(value), kwargs or args)


_FREE = ("attr", "count", "d", "default", "first", "last", "length", "random")
"""Filters that take constant time and make no new values."""

_GUARDS: dict[str, Guard] = {
    **dict.fromkeys(
        (
            *("abs", "capitalize", "e", "escape", "float", "int", "lower", "safe", "string", "title", "truncate"),
            *("upper", "urlencode", "wordcount"),
        ),
        _text,
    ),
    **dict.fromkeys(("list", "items", "reverse"), _listed),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _sorted),
    **dict.fromkeys(("batch", "slice"), _cut),
    "center": _centered,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "trim": _trimmed,
}

_READING = frozenset({
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
})  # fmt: skip
"""Tests that read whole values."""


def percent(meter: Meter, form: str, values: Any) -> str:
    """`form % values`. Raises SecurityError for widths above 999."""
    if _WIDE_CONVERSION.search(form):
        raise SecurityError(f"a format may not have a width of {_WIDTH} or more, or given by '*'")
    conversions = form.count("%")
    times = conversions if isinstance(values, Mapping) else 1  # mapping values can repeat
    meter.read(form, values)
    meter.expect(len(form) + conversions * _WIDTH + (meter.printed(values) * times if conversions else 0))
    text: str = meter.make(form % values)
    return text


class BoundedFormatter(SandboxedFormatter):
    """`str.format` for templates."""

    def format_field(self, value: Any, format_spec: str) -> str:
        meter = current()
        if _WIDE_FIELD.search(format_spec):
            raise SecurityError(f"a format may not have a width of {_WIDTH} or more")
        meter.expect(meter.printed(value))
        text: str = super().format_field(value, format_spec)
        meter.use(len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter = current()
        meter.expect(meter.printed(value))
        return super().convert_field(value, conversion)


class BoundedEscapeFormatter(BoundedFormatter, SandboxedEscapeFormatter):
    """`Markup.format` for templates."""
