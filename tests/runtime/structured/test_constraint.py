"""A request states a constraint as in vLLM's or OpenAI's API. Other values are refused, with the place of the error."""

from __future__ import annotations

from typing import Any

import pytest

from topw_deploy.errors import GrammarError, ParameterError
from topw_deploy.runtime.parameters import check_names
from topw_deploy.runtime.structured import MOST_CHARACTERS, Constraint, read_constraint

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = '{"type": "object", "properties": {"é": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": SCHEMA}, Constraint("json", TEXT)),
        ({"json": TEXT}, Constraint("json", TEXT)),
        ({"json": SCHEMA, "regex": None}, Constraint("json", TEXT)),
        ({"json_object": True}, Constraint("json", '{"type": "object"}')),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"choice": ["a", "b", "a"]}, Constraint("choice", '["a", "b"]')),
        ({"grammar": "start: A"}, Constraint("grammar", "start: A")),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, Constraint("json", TEXT)),
        ({"type": "json_object"}, Constraint("json", '{"type": "object"}')),
        ({"type": "text"}, Constraint("text")),
    ],
)
def test_every_way_to_give_a_constraint_is_read(given: Any, expected: Constraint) -> None:
    assert read_constraint("structured_outputs", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[0-9]", "is a str, but must be a mapping"),
        ({}, "has the keys none"),
        ({"json": {}, "regex": "a"}, "has the keys json, regex"),
        ({"jsonschema": {}}, "has the keys jsonschema"),
        ({"json": 3}, "is a int, but must be a schema"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"a": object()}}, "cannot be written as JSON"),
        ({"json": {"minimum": 10**5000}}, "cannot be written as JSON"),
        ({"json_object": False}, "must be True"),
        ({"regex": ""}, "is empty"),
        ({"regex": b"a"}, "is a bytes"),
        ({"choice": "yes"}, "must be a list of non-empty texts"),
        ({"choice": []}, "must be a list of non-empty texts"),
        ({"choice": ["a", ""]}, "must be a list of non-empty texts"),
        ({"regex": "ab\ud800"}, "half of a surrogate pair at character 3"),
        ({"type": "xml"}, "is 'xml', but must be json_schema, json_object or text"),
        ({"type": "json_schema"}, "has no schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "has no schema"),
        ({"regex": "a" * (MOST_CHARACTERS + 1)}, "the expression of structured_outputs has 65,537 characters"),
    ],
)
def test_a_value_of_another_form_is_refused(given: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        read_constraint("structured_outputs", given)


def test_a_schema_that_is_not_json_is_refused_with_its_position() -> None:
    with pytest.raises(GrammarError, match="Expecting ',' delimiter at line 2, column 3") as raised:
        read_constraint("structured_outputs", {"json": '{"a": 1\n  "b": 2}'})
    assert (raised.value.line, raised.value.column) == (2, 3)


def test_a_schema_nested_too_deeply_or_in_itself_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    circle: dict[str, Any] = {}
    circle["items"] = circle
    for schema in (deep, circle, '{"items":' * 100_000):
        with pytest.raises(GrammarError, match=r"nested too deeply|Circular reference|is not JSON"):
            read_constraint("structured_outputs", {"json": schema})


def test_response_format_is_another_name_of_structured_outputs() -> None:
    assert check_names({"response_format": {"type": "text"}}) == {"structured_outputs": {"type": "text"}}
    with pytest.raises(ParameterError, match="given twice"):
        check_names({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}})
