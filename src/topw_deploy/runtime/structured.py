"""What an answer must match: vLLM's `structured_outputs` or OpenAI's `response_format`, and its grammar in Lark."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from topw_deploy.errors import GrammarError

MOST_CHARACTERS = 2**16
"""Maximum length of a schema or grammar. See also STACK_BYTES in guide.py."""


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
    if len(given) != 1 or not given.keys() <= {*_NOUNS, "json_object"} - {"text"}:
        raise GrammarError(f"{name} has the keys {', '.join(given)[:200] or 'none'}; {_ADVICE}.", name)
    ((kind, text),) = given.items()
    name = f"{name}[{kind!r}]"
    if kind == "json":
        return _read_schema(name, text)
    if kind == "json_object":
        if text is not True:
            raise GrammarError(f"{name} must be True; omit it to allow any text.")
        return _ANY_OBJECT
    if kind == "choice":
        if not isinstance(text, (list, tuple)) or not text or not all(isinstance(each, str) and each for each in text):
            raise GrammarError(f"{name} must be a list of non-empty texts.")
        text = json.dumps(list(dict.fromkeys(text)), ensure_ascii=False)
    elif not isinstance(text, str) or not text:
        shown = "empty" if text == "" else f"a {type(text).__name__}"
        raise GrammarError(f"{name} is {shown}, but must be a non-empty text.")
    return Constraint(kind, _check_unicode(name, text))


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
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except json.JSONDecodeError as error:
        place = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise GrammarError(f"{name} is not JSON: {place}.", line=error.lineno, column=error.colno) from None
    except RecursionError:
        raise GrammarError(
            f"{name} cannot be written as JSON: it is nested too deeply; give plain JSON values."
        ) from None
    except (TypeError, ValueError) as error:  # other types, NaN, cycles, too many digits
        raise GrammarError(f"{name} cannot be written as JSON: {error}; give plain JSON values.") from None
    return Constraint("json", _check_unicode(name, text))


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


MOST_PATTERNS = 100
"""Maximum number of patterns in all `patternProperties`. llguidance compares each pattern with every other (100
patterns: 0.1 s, 300: 12 s).
"""

MOST_MULTIPLE = 50_000
"""Maximum least common multiple of all `multipleOf`, without their decimal points. llguidance builds an automaton with
so many states (50,000: 0.3 s, 1,000,000: 11 s).
"""
# At most one space, or a line break with an indentation; otherwise a model may write white space up to the token limit.
_WHITE_SPACE = r" |\n[ \t]{0,32}"

# With forcing, text that the grammar forces could be written only with the tokenizer's tokens for it. Here the draw
# decides which tokens write a text, so that a ban of one token does not end a request that can use other tokens.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_JSON = re.compile(r"%json\s*(?=[{\[])")


def to_lark(constraint: Constraint) -> str:
    """Returns the constraint as a Lark grammar. A caller's own Lark keeps its line numbers.

    Raises GrammarError for GBNF that cannot be converted, and for schemas that would take too long to compile.
    """
    kind, text = constraint.kind, constraint.text
    if kind == "grammar":
        text = _gbnf_to_lark(text) if _GBNF_RULE.search(text) else text
        check_schemas(_inline_schemas(text))
        return text + _OPTIONS
    if kind == "json":
        expression = _schema_expression(text)
    elif kind == "choice":
        # One terminal, because several thousand alternatives of a rule exceed the parser's limits.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        expression = f"CHOICE\nCHOICE: {choices}"
    else:
        from llguidance import regex_to_lark

        expression = f"/{regex_to_lark(text, use_ascii='d')}/"  # \d matches only 0 to 9, \w any letter
    return f"start: {expression}{_OPTIONS}"


def _schema_expression(text: str) -> str:
    schema = json.loads(text)
    check_schemas([schema])
    if isinstance(schema, dict):
        stated = schema.get("x-guidance")
        options = stated if isinstance(stated, dict) else {}
        if not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
            schema["x-guidance"] = {**options, "whitespace_pattern": _WHITE_SPACE}
    elif schema is True:
        schema = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    else:
        raise GrammarError("the schema is false, which no value matches; give another one.")
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _gbnf_to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
        return lark
    except GbnfToLarkError as error:
        line = text.count("\n", 0, error.pos.pos) + 1
        column = error.pos.pos - (text.rfind("\n", 0, error.pos.pos) + 1) + 1
        what = str(error).split(" at line ")[0]
        raise GrammarError(
            f"the GBNF grammar is invalid at line {line}, column {column}: {what}.", line=line, column=column
        ) from None
    except RecursionError:
        raise GrammarError("the GBNF grammar is nested too deeply; move nested parts into named rules.") from None
    except Exception as error:  # noqa: BLE001  # the converter raises bare Exceptions
        raise GrammarError(f"the GBNF grammar is invalid: {error}.") from None


def _inline_schemas(text: str) -> Iterator[Any]:
    """The schemas after `%json` in a grammar. Skips text that is not JSON: the compiler reports its error."""
    decoder = json.JSONDecoder()
    for found in _JSON.finditer(text):
        try:
            yield decoder.raw_decode(text, found.end())[0]
        except (ValueError, RecursionError):
            continue


def check_schemas(schemas: Iterable[Any]) -> None:
    """Refuse JSON schemas whose grammars would take minutes to build; llguidance has no such limits.

    Raises GrammarError for more than MOST_PATTERNS patterns or a multiple above MOST_MULTIPLE.
    """
    patterns, multiple = 0, 1
    waiting = list(schemas)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            named = value.get("patternProperties")
            patterns += len(named) if isinstance(named, dict) else 0
            multiple = math.lcm(multiple, _significant_digits(value.get("multipleOf")))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        if patterns > MOST_PATTERNS:
            raise GrammarError(
                f"the schema's patternProperties have more than {MOST_PATTERNS} patterns; join some of them with '|'."
            )
        if multiple > MOST_MULTIPLE:
            raise GrammarError(
                f"the values of multipleOf have a least common multiple above {MOST_MULTIPLE:,} (without decimal "
                "points); remove some and check these numbers afterwards."
            )


def _significant_digits(value: Any) -> int:
    """A number without its decimal point, such as 25 for 0.25; 1 for a value that is not a number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        return 1
    try:
        number = Decimal(str(value))
    except (InvalidOperation, ValueError):  # Python writes no integers of more than 4,300 digits
        return MOST_MULTIPLE + 1
    if number.adjusted() > 20:
        return MOST_MULTIPLE + 1
    return int(number) if number == number.to_integral_value() else int("".join(map(str, number.as_tuple().digits)))
