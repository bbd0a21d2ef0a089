"""Jinja's filters, tests and string formatting, with their work counted on the current meter."""

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

from topw_deploy.runtime.template.meter import Meter, current_meter, is_container
from topw_deploy.runtime.template.methods import replaced_bound

_WIDE_FIELD = re.compile(r"[0-9]{4,}")
_WIDE_CONVERSION = re.compile(r"[%)][#0\- +]*(?:[1-9][0-9]{3,}|\*|[0-9]*\.(?:[0-9]{4,}|\*))")  # also after %(name)
_WIDTH_LIMIT = 1000
Guard = Callable[[Meter, Any, "list[Any]", "dict[str, Any]"], Any]
"""Counts and checks a filter's (meter, value, other positional arguments, keyword arguments) before the filter runs.

Returns the value to filter.
"""

_FILTER_STEPS = 6
_COMPARISONS_PER_ITEM = 20  # by a sort
_MAX_INDENTATION = 32  # characters of indentation and separators of JSON
_MAX_COUNT = 100_000  # of slices, or of the items of a batch; Jinja's `range` has the same bound
_MAX_DIGITS = 308  # decimal digits of the largest float


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters by name, except those for HTML."""
    found = {name: _guard_filter(FILTERS[name], guard) for name, guard in _GUARDS.items()}
    return {**found, **{name: FILTERS[name] for name in _UNGUARDED}, "tojson": _tojson, "format": _format}


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """Those of Jinja's tests, by name, that read whole values."""
    return {name: _guard_test(TESTS[name]) for name in _READING_TESTS}


def _guard_filter(function: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # some filters get Jinja's context as first argument

    @functools.wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.count_steps(_FILTER_STEPS)
        rest = list(args[place + 1 :])
        value = guard(meter, args[place], rest, kwargs)
        result = function(*args[:place], value, *rest, **kwargs)
        if isinstance(result, Iterator):
            return meter.count_each(result, _steps_per_item(rest, kwargs))
        return meter.count_new(result)

    return filter_


def _guard_test(test: Any) -> Callable[..., Any]:
    @functools.wraps(test)
    def test_(*args: Any) -> Any:
        meter = current_meter()
        meter.count_read(*args)
        for value in args:
            meter.check_size(meter.printed_bound(value))
        return test(*args)

    return test_


def _steps_per_item(rest: list[Any], kwargs: dict[str, Any]) -> int:
    """Steps per item of a filter whose arguments name an attribute, which may be a path."""
    return 1 + sum(len(value) for value in (*rest, *kwargs.values()) if isinstance(value, str)) // 8


def _get_argument(rest: list[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return rest[place] if place < len(rest) else kwargs.get(name, default)


def _guard_text(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    meter.count_read(value, *rest, *kwargs.values())
    meter.check_size(meter.printed_bound(value) * (12 if isinstance(value, str) else 1))
    return value


def _guard_items(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, str):
        meter.check_size(len(value) * 16)
    if hasattr(type(value), "__len__"):
        meter.count_steps(len(value) * _steps_per_item(rest, kwargs))
    return value


def _guard_lazily(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    return meter.count_each(value) if isinstance(value, Iterator) else value


def _guard_sort(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _guard_items(meter, value, rest, kwargs)
    weight, _ = meter.measure(value)
    meter.count_steps(_COMPARISONS_PER_ITEM * (weight >> 4))
    return value


def _guard_join(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _guard_items(meter, value, rest, kwargs)
    meter.count_read(value)
    if is_container(value) or isinstance(value, str):
        separator = meter.printed_bound(_get_argument(rest, kwargs, 0, "d", ""))
        meter.check_size(sum(meter.printed_bound(item) for item in value) + len(value) * separator)
    return value


def _guard_center(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    width = _get_argument(rest, kwargs, 0, "width", 80)
    meter.check_size(max(meter.printed_bound(value), width if isinstance(width, int) else 0))
    return value


def _guard_indent(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    text, width = meter.to_text(value), _get_argument(rest, kwargs, 0, "width", 4)
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    meter.count_read(text)
    meter.check_size(len(text) + (len(text.splitlines()) + 1) * max(1, size))
    return value


def _guard_replace(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    old, new = (_get_argument(rest, kwargs, place, name, "") for place, name in ((0, "old"), (1, "new")))
    count = _get_argument(rest, kwargs, 2, "count", None)
    meter.check_size(replaced_bound(meter, meter.to_text(value), meter.to_text(old), meter.to_text(new), count))
    return value


def _guard_trim(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    meter.count_search(meter.to_text(value), _get_argument(rest, kwargs, 0, "chars", None), forward=False)
    return _guard_text(meter, value, rest, kwargs)


def _guard_round(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    digits = _get_argument(rest, kwargs, 0, "precision", 0)
    if isinstance(digits, int) and abs(digits) > _MAX_DIGITS:
        raise SecurityError(f"round: the precision is {meter.to_text(digits):.20}, but may be at most {_MAX_DIGITS}")
    return _guard_text(meter, value, rest, kwargs)


def _guard_batch(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    for number in (*rest, *kwargs.values()):
        if isinstance(number, int) and number > _MAX_COUNT:
            raise SecurityError(f"batch and slice take numbers up to {_MAX_COUNT:,}, not {meter.to_text(number):.20}")
        meter.count_steps(number if isinstance(number, int) else 1)
    return _guard_items(meter, value, rest, kwargs)


def _guard_sum(meter: Meter, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _guard_items(meter, value, rest, kwargs)
    start = _get_argument(rest, kwargs, 1, "start", 0)
    if is_container(start):  # each addition of two lists copies both
        weight = meter.measure(value)[0] + meter.measure(start)[0]
        meter.count_steps(len(value) * weight >> 6)
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Replaces Jinja's filter, which escapes HTML.
    meter = current_meter()
    widths = [len(given) if isinstance(given, str) else given or 0 for given in (indent, *(separators or ()))]
    if max(widths) > _MAX_INDENTATION:
        raise SecurityError(f"tojson: indent and separators may have at most {_MAX_INDENTATION} characters")
    weight, depth = meter.measure(value)
    meter.count_read(value)
    meter.check_size(weight * (12 if ensure_ascii else 6) + weight // 16 * (depth + 1) * sum(map(abs, widths)))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.count_characters(len(text))
    return text


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    meter = current_meter()
    return format_percent(meter, meter.to_text(value), kwargs or args)


_UNGUARDED = ("attr", "count", "d", "default", "first", "last", "length", "random")
"""Filters that take constant time and make no new values, so that nothing is counted."""

_GUARDS: dict[str, Guard] = {
    **dict.fromkeys(
        (
            *("abs", "capitalize", "e", "escape", "float", "int", "lower", "safe", "string", "title", "truncate"),
            *("upper", "urlencode", "wordcount"),
        ),
        _guard_text,
    ),
    **dict.fromkeys(("list", "items", "reverse"), _guard_items),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _guard_lazily),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _guard_sort),
    **dict.fromkeys(("batch", "slice"), _guard_batch),
    "center": _guard_center,
    "indent": _guard_indent,
    "join": _guard_join,
    "replace": _guard_replace,
    "round": _guard_round,
    "sum": _guard_sum,
    "trim": _guard_trim,
}

_READING_TESTS = frozenset({
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
})  # fmt: skip
"""The tests that read whole values."""


def format_percent(meter: Meter, form: str, values: Any) -> str:
    """Returns `form % values`. Raises SecurityError for widths above 999."""
    if _WIDE_CONVERSION.search(form):
        raise SecurityError(f"a format may not have a width of {_WIDTH_LIMIT} or more, or given by '*'")
    conversions = form.count("%")
    times = conversions if isinstance(values, Mapping) else 1  # a form can print each value of a mapping several times
    meter.count_read(form, values)
    meter.check_size(
        len(form) + conversions * _WIDTH_LIMIT + (meter.printed_bound(values) * times if conversions else 0)
    )
    text: str = meter.count_new(form % values)
    return text


class BoundedFormatter(SandboxedFormatter):
    """Formats like `str.format`, with bounds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        meter = current_meter()
        if _WIDE_FIELD.search(format_spec):
            raise SecurityError(f"a format may not have a width of {_WIDTH_LIMIT} or more")
        meter.check_size(meter.printed_bound(value))
        text: str = super().format_field(value, format_spec)
        meter.count_characters(len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter = current_meter()
        meter.check_size(meter.printed_bound(value))
        return super().convert_field(value, conversion)


class BoundedEscapeFormatter(BoundedFormatter, SandboxedEscapeFormatter):
    """Formats like `Markup.format`, with bounds."""
