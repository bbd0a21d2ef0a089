"""Values are read as json and Python read them."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from topw_deploy.runtime.tools.literals import JSON, PYTHON, Mismatch, parse_value
from topw_deploy.runtime.tools.parser import typed_value

Value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=Value, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_json_is_read_as_json_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    assert parse_value(json.dumps(value, ensure_ascii=ascii_only, indent=indent), JSON) == value


@given(value=Value)
def test_a_literal_is_read_as_python_reads_it(value: Any) -> None:
    assert parse_value(repr(value), PYTHON) == value


@settings(max_examples=examples(300))
@given(text=st.text(st.sampled_from('{}[]",:\\ntrue0123.eE+-u\n ')))
def test_a_text_is_refused_unless_it_is_json(text: str) -> None:
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        with pytest.raises(Mismatch):
            parse_value(text, JSON)
    else:
        assert parse_value(text, JSON) == expected


@pytest.mark.parametrize("text", ["'a\\'\\x41\\u00e9\\U0001f600\\n'", '"""a\n"b" """', "''", '"a\\\nb"', "'\\\\'"])
def test_escapes_are_read_as_python_reads_them(text: str) -> None:
    assert parse_value(text, PYTHON) == ast.literal_eval(text)


def test_an_unknown_escape_is_not_changed() -> None:
    assert parse_value("'\\d+'", PYTHON) == r"\d+"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "integer"}, 1),
        ("1", {"type": "string"}, "1"),
        ("1", None, "1"),
        ("True", {"type": "boolean"}, True),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
        ("many", {"type": "integer"}, "many"),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("3", {"anyOf": 3}, "3"),
        ("3", {"type": 3}, "3"),
    ],
)
def test_the_schema_tells_numbers_from_text(text: str, schema: Any, value: Any) -> None:
    assert typed_value(text, schema) == value
