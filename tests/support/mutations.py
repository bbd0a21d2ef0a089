"""Every single-place error in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MARK = "\x00the place\x00"
_DEEP = 500  # levels that json still parses; code that recurses afterwards may fail

VALUES = (
    "null", "true", "false", "0", "-1", "1", "2", "2.0", "0.5", "-0.5", "1e-50", "1e300", "1e400", "-1e400",
    "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "1000000000000000", "1" + "0" * 300,
    "1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000, "NaN", "Infinity", "-Infinity",
    '""', '"x"', '"\\ud800"', '"a\\u0000b"', '"../x"', '"/dev/zero"', json.dumps("x" * 70_000),
    json.dumps("é\n\x1b[2J"),
    "[]", "{}", "[0]", "[1, 1]", "[1, 1, 1]", '["x"]', "[null]", "[[]]", "[{}]",
    '{"x": 1}', '{"x": []}', '{"x": {"y": null}}',
    '{"\\ud800": 1}', '{"x": 1, "x": 2}', "[" * _DEEP + "]" * _DEEP, '{"x":' * _DEEP + "1" + "}" * _DEEP,
)  # fmt: skip
"""JSON values of every type, with extremes, and texts that only a lenient parser accepts."""

Path = tuple[str | int, ...]


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values, containers included."""
    yield path
    if isinstance(data, dict):
        for name, value in data.items():
            yield from places(value, (*path, name))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from places(value, (*path, number))


def mutations(data: Any, values: tuple[str, ...] = VALUES) -> Iterator[tuple[str, str]]:
    """(change, JSON): each place replaced by each of `values`, omitted, and duplicated."""
    for path in places(data):
        where = ".".join(map(str, path)) or "all of it"
        marked = json.dumps(_replaced(data, path, _MARK))
        for value in values:
            yield f"{where} = {value[:40]}", marked.replace(json.dumps(_MARK), value)
        for what, changed in (("left out", _without(data, path)), ("doubled", _doubled(data, path))):
            if changed is not None:
                yield f"{where} {what}", changed


def with_value(data: Any, path: Path, value: str) -> str:
    """The JSON of `data` with the text `value` at a place."""
    return json.dumps(_replaced(data, path, _MARK)).replace(json.dumps(_MARK), value)


def _replaced(data: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    copy[first] = _replaced(data[first], tuple(rest), value)
    return copy


def _around(data: Any, path: Path) -> Any:
    for part in path[:-1]:
        data = data[part]
    return data


def _without(data: Any, path: Path) -> str | None:
    if not path:
        return ""
    outer = _around(data, path)
    rest = (
        {name: value for name, value in outer.items() if name != path[-1]}
        if isinstance(outer, dict)
        else [value for number, value in enumerate(outer) if number != path[-1]]
    )
    return json.dumps(_replaced(data, path[:-1], rest))


def _doubled(data: Any, path: Path) -> str | None:
    if not path:
        return json.dumps(data) * 2
    outer = _around(data, path)
    if isinstance(outer, list):
        return json.dumps(_replaced(data, path[:-1], [*outer, outer[int(path[-1])]]))
    pairs = [*outer.items(), (path[-1], outer[path[-1]])]
    twice = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}"
    return json.dumps(_replaced(data, path[:-1], _MARK)).replace(json.dumps(_MARK), twice)
