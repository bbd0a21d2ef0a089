"""Reads a request's constraint: vLLM's `structured_outputs` or OpenAI's `response_format`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import GrammarError

MOST_CHARACTERS = 2**16
"""Maximum length of a schema or grammar. See also STACK_BYTES in grammars.py."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The text that an answer must match.

    kind: "json", "regex", "choice" or "grammar"; "text" for any text.
    text: the schema as JSON, the expression, the choices as a JSON list, or the grammar (Lark or GBNF).
    """

    kind: str
    text: str = ""


def read_constraint(name: str, value: Any) -> Constraint:
    """Read `structured_outputs={"json": ...}` or `response_format={"type": "json_schema", ...}`.

    name: the parameter's name, for messages.

    Raises GrammarError for another shape, a schema that is not JSON, or a text longer than MOST_CHARACTERS.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise GrammarError(f"{name} is a {type(value).__name__}, but must be a mapping; {_ADVICE}.", name)
    constraint = _read_response_format(name, value) if "type" in value else _read_structured_outputs(name, value)
    if len(constraint.text) > MOST_CHARACTERS:
        raise GrammarError(
            f"the {_NOUNS[constraint.kind]} of {name} has {len(constraint.text):,} characters, but may have at most "
            f"{MOST_CHARACTERS:,}; give a shorter one.",
            name,
        )
    return constraint


_ADVICE = "give one of json, regex, choice, grammar and json_object, or OpenAI's response_format with a type"
_NOUNS = {"json": "schema", "regex": "expression", "choice": "list of choices", "grammar": "grammar", "text": "text"}
_ANY_OBJECT = Constraint("json", '{"type": "object"}')


def _read_structured_outputs(name: str, value: Mapping[str, Any]) -> Constraint:
    given = {key: constraint for key, constraint in value.items() if constraint is not None}
    if len(given) != 1 or not given.keys() <= _READERS.keys():
        raise GrammarError(f"{name} has the keys {_key_list(given)}; {_ADVICE}.", name)
    ((kind, constraint),) = given.items()
    return _READERS[kind](f"{name}[{kind!r}]", constraint)


def _read_response_format(name: str, value: Mapping[str, Any]) -> Constraint:
    kind = value["type"]
    if kind == "text":
        return Constraint("text")
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        shown = repr(kind) if isinstance(kind, str) and len(kind) <= 40 else f"a {type(kind).__name__}"
        raise GrammarError(f"the type of {name} is {shown}, but must be json_schema, json_object or text.", name)
    json_schema = value.get("json_schema")
    if not isinstance(json_schema, Mapping) or json_schema.get("schema") is None:
        raise GrammarError(
            f'{name} has no schema; give {{"type": "json_schema", "json_schema": {{"schema": ...}}}}.', name
        )
    return _read_schema(f"{name}['json_schema']['schema']", json_schema["schema"])


def _read_schema(name: str, value: Any) -> Constraint:
    if not isinstance(value, (str, Mapping, bool)):
        raise GrammarError(f"{name} is a {type(value).__name__}, but must be a schema: a dict, or JSON text.")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        return Constraint("json", _check_unicode(name, json.dumps(schema, ensure_ascii=False, allow_nan=False)))
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            line=error.lineno,
            column=error.colno,
        ) from None
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # raised for other types, NaN, cycles, too many digits and deep nesting
        if isinstance(error, GrammarError):
            raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(f"{name} cannot be written as JSON: {why}; give plain JSON values.") from None


def _text_reader(kind: str) -> Callable[[str, Any], Constraint]:
    """A reader of constraints that are texts."""

    def read(name: str, value: Any) -> Constraint:
        if not isinstance(value, str) or not value:
            shown = "empty" if value == "" else f"a {type(value).__name__}"
            raise GrammarError(f"{name} is {shown}, but must be a non-empty text.")
        return Constraint(kind, _check_unicode(name, value))

    return read


def _read_choice(name: str, value: Any) -> Constraint:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) and v for v in value):
        raise GrammarError(f"{name} must be a list of non-empty texts.")
    return Constraint("choice", _check_unicode(name, json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)))


def _read_json_object(name: str, value: Any) -> Constraint:
    if value is not True:
        raise GrammarError(f"{name} must be True; omit it to allow any text.")
    return _ANY_OBJECT


def _check_unicode(name: str, text: str) -> str:
    """Returns `text`. Raises GrammarError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"{name} has half of a surrogate pair at character {error.start + 1}, so it is not valid Unicode; repair "
            "it."
        ) from None
    return text


def _key_list(keys: Mapping[str, Any]) -> str:
    """The first keys, shortened, for a message."""
    shown = [key if len(key) <= 40 else f"{key[:37]}..." for key in list(keys)[:8]]
    return ", ".join(shown) or "none"


_READERS: Mapping[str, Callable[[str, Any], Constraint]] = {
    "json": _read_schema,
    "regex": _text_reader("regex"),
    "choice": _read_choice,
    "grammar": _text_reader("grammar"),
    "json_object": _read_json_object,
}
