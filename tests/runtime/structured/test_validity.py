"""Answers to a schema are valid; a schema whose grammar would allow others is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz import schemas
from topw_deploy.errors import GrammarError
from topw_deploy.runtime.guide import compile_grammar, read_tokens
from topw_deploy.runtime.structured import Constraint, read_constraint

TOKENS = read_tokens([bytes([byte]) for byte in range(256)] + [b"</s>"], [256])
INTEGER = {"a": {"type": "integer"}}
DATE: dict[str, Any] = {"type": "string", "format": "date"}
TIME: dict[str, Any] = {"type": "string", "format": "date-time"}


def allows(constraint: Constraint, text: str) -> bool:
    matcher = compile_grammar(constraint, TOKENS)
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def test_answers_to_random_schemas_are_valid() -> None:
    outcome = schemas.run(400, seed=7)
    assert not outcome.invalid
    assert outcome.answers > 800


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"type": "object", "properties": INTEGER}, '{"a":1,"b":"x"}', True),
        ({"type": "object", "properties": INTEGER}, r'{"\u0061":"x"}', False),
        ({"type": "object", "properties": INTEGER}, r'{"a":1,"\u0061":"x"}', False),
        ({"type": "object", "properties": {"\n": {"type": "integer"}}}, r'{"\u000a":"x"}', False),
        ({"type": "object", "properties": INTEGER, "patternProperties": {"^b": {}}}, r'{"\u0061":"x"}', False),
        ({"type": "object", "minProperties": 1}, '{"a":1}', True),
        ({"properties": {"const": {"default": 2**60}}}, '{"const":1}', True),  # a name, and an annotation
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, "0", False),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, "0.01", True),
        (DATE, '"2024-02-29"', True),
        (DATE, '"2023-02-29"', False),
        (DATE, '"2023-02-28"', True),
        (DATE, '"1900-02-29"', False),
        (DATE, '"2000-02-29"', True),
        (DATE, '"0000-01-01"', False),
        ({**DATE, "pattern": "^2", "allOf": [{"pattern": "9$"}]}, '"2024-02-29"', True),
        (TIME, '"2023-02-29T10:00:00Z"', False),
        (TIME, '"2024-02-29T10:00:00Z"', True),
        (TIME, '"2024-02-29T10:00:60Z"', False),
        (TIME | {"format": "time"}, '"10:00:60+01:00"', False),
        (TIME | {"format": "time"}, '"10:00:59+01:00"', True),
        (TIME | {"format": "hostname"}, '"' + ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61]) + '"', True),
        (TIME | {"format": "hostname"}, '"' + ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 62]) + '"', False),
    ],
)
@pytest.mark.parametrize("inline", [False, True])
def test_a_schema_allows_its_values_alone(schema: dict[str, Any], text: str, allowed: bool, inline: bool) -> None:
    constraint = read_constraint("structured_outputs", {"json": schema})
    if inline:
        constraint = Constraint("grammar", f"start: %json {constraint.text}")
    assert allows(constraint, text) == allowed


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53}, r"the schema has the integer 9007199254740992, but integers must be in -\(2\^53 - 1\) to"),
        ({"enum": [{"a": [-(2**53)]}]}, "the schema has the integer -9007199254740992, but"),
        ({"type": "integer", "exclusiveMaximum": 1e16}, "the schema has the integer 1e\\+16, but"),
        ({"properties": {"minimum": {"minimum": 2**60}}}, "the schema has the integer 1152921504606846976, but"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 and its upper bound 0.5 have the same integer"),
        ({"minimum": -12.5, "exclusiveMaximum": -12}, "exclusiveMaximum -12 and its lower bound -12.5 have the same"),
        ({"required": ["a"], "minProperties": 3}, "minProperties 3 and 1 required names"),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2}, "minProperties 2 and 0"),
        ({"const": 10**400}, "the schema has the integer 1000"),
        ({"format": "date", "allOf": 5}, "the schema does not compile"),
        ({"const": {"\x01": 1}}, r"the value '\\x01', with a control character"),
    ],
)
def test_a_schema_that_no_grammar_expresses_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_grammar(read_constraint("structured_outputs", {"json": schema}), TOKENS)


def test_a_grammar_keeps_its_lines_when_its_schemas_change() -> None:
    grammar = 'start: %json {\n"type": "object"\n} b\nb: other'
    with pytest.raises(GrammarError, match=r'unknown name: "other" \(line 4, column 4\)'):
        compile_grammar(Constraint("grammar", grammar), TOKENS)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (r'"\u00e9\u1234\U0001F600\x41"', "éሴ😀A"),
        (r'"\u0022\u005c\\u0041\n"', '"\\\\u0041\n'),
        (r'"\[" "\]"', "[]"),
        (r"[\u0416]", "Ж"),
        (r"[\u0061-\u007a\]\[]+", "a]z["),
        (r'"\"" [^"\\\x7F\x00-\x1F]{1} "\""', '"z"'),
    ],
)
def test_gbnf_takes_the_escapes_of_llama_cpp(rule: str, text: str) -> None:
    assert allows(Constraint("grammar", f"# \\u00zz [\nroot ::= {rule}"), text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "\\u00e9" b\nb ::= "\\u00e9" ("a"', r"invalid at line 2, column 20: Expected '\)'"),
        ('root ::= "\\ud800"', "invalid at line 1, column 11: D800 is no Unicode character"),
        ("root ::= a-b\n\na-b ::= c\nc ::= [z-a]", r"invalid character class range, .* \(rule c, line 4\)"),
    ],
)
def test_an_error_of_gbnf_names_its_place_in_the_grammar_that_was_sent(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_grammar(Constraint("grammar", grammar), TOKENS)
