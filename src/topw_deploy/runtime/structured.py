"""What an answer must match: vLLM's `structured_outputs` or OpenAI's `response_format`, and its grammar in Lark."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from topw_deploy.errors import GrammarError
from topw_deploy.text import short_repr

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
    if not isinstance(schema, (Mapping, bool)):
        raise GrammarError(f"{name} is {text:.60}, but must be a JSON object or true.")
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
MOST_INTEGER = 2**53 - 1
"""Largest magnitude of an integer in a schema. llguidance reads numbers as float64."""

# At most one space, or a line break with an indentation; otherwise a model may write white space up to the token limit.
_WHITE_SPACE = r" |\n[ \t]{0,32}"
# Without \u, because llguidance takes "\u0061" for another name than "a".
_ESCAPES = 'nrbtf\\"'
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # JSON can write these characters only with \u

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES = ("const", "enum", "default", "examples")  # keywords of values, which are no schemas
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_YEAR = r"(?:[1-9]...|0[1-9]..|00[1-9].|000[1-9])"
_LEAP_YEAR = r"(?:..(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_CALENDAR = f"^(?:{_YEAR}-(?:0[13-9]|1.|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
"""Matches the dates that exist, among those of llguidance's grammar, which has 29 February in every year."""
_STRICTER: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("date", "date-time"), {"pattern": _CALENDAR}),
    (("time", "date-time"), {"pattern": ":..:[0-5]"}),  # no second 60, which few minutes have
    (("hostname",), {"maxLength": 253}),
)
"""Formats -> what llguidance's grammar of them lacks."""

# With forcing, text that the grammar forces could be written only with the tokenizer's tokens for it. Here the draw
# decides which tokens write a text, so that a ban of one token does not end a request that can use other tokens.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^\w+: ")
# A text, characters, or a comment
_GBNF_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_JSON = re.compile(r"%json\s*(?={)")


def to_lark(constraint: Constraint) -> str:
    """Returns the constraint as a Lark grammar. A caller's own Lark keeps its line numbers.

    Raises GrammarError for GBNF that cannot be converted, and the errors of `make_exact`.
    """
    kind, text = constraint.kind, constraint.text
    if kind == "grammar":
        text = _gbnf_to_lark(text) if is_gbnf(text) else text
        return _with_exact_schemas(text) + _OPTIONS
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
    if schema is False:
        raise GrammarError("the schema is false, which no value matches; give another one.")
    schema = {} if schema is True else schema
    make_exact([schema])
    if "whitespace_flexible" not in schema["x-guidance"]:
        schema["x-guidance"].setdefault("whitespace_pattern", _WHITE_SPACE)
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is llama.cpp's GBNF, not Lark."""
    return _GBNF_RULE.search(text) is not None


def _gbnf_to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    simple, origins = _simplify_escapes(text)
    try:
        lark: str = gbnf_to_lark(simple)
        return lark
    except GbnfToLarkError as error:
        line, column = _line_and_column(text, origins[error.pos.pos])
        what = str(error).split(" at line ")[0]
        raise GrammarError(
            f"the GBNF grammar is invalid at line {line}, column {column}: {what}.", line=line, column=column
        ) from None
    except RecursionError:
        raise GrammarError("the GBNF grammar is nested too deeply; move nested parts into named rules.") from None
    except Exception as error:  # noqa: BLE001  # the converter raises bare Exceptions
        raise GrammarError(f"the GBNF grammar is invalid: {error}.") from None


def _simplify_escapes(text: str) -> tuple[str, list[int]]:
    """Replace the escapes of GBNF that llguidance's converter gets wrong: \\u, \\U, and brackets in texts.

    Returns the grammar, and the place in `text` of each of its characters and of its end.
    """
    parts: list[str] = []
    origins: list[int] = []
    done = 0

    def copy(end: int) -> None:
        parts.append(text[done:end])
        origins.extend(range(done, end))

    for part in _GBNF_PART.finditer(text):
        for escape in _GBNF_ESCAPE.finditer(part[0]) if part[0][0] != "#" else ():
            start = part.start() + escape.start()
            if escape[1] or escape[2]:
                replacement = _character_of(text, start, int(escape[1] or escape[2], 16))
            elif part[0][0] == '"' and escape[0] in (r"\[", r"\]"):
                replacement = escape[0][1]
            else:
                continue
            copy(start)
            parts.append(replacement)
            origins.extend([start] * len(replacement))
            done = start + len(escape[0])
    copy(len(text))
    return "".join(parts), [*origins, len(text)]


def _character_of(text: str, start: int, code: int) -> str:
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        line, column = _line_and_column(text, start)
        raise GrammarError(
            f"the GBNF grammar is invalid at line {line}, column {column}: {code:X} is no Unicode character.",
            line=line,
            column=column,
        )
    return chr(code) if code > 0xFF else f"\\x{code:02x}"


def _line_and_column(text: str, place: int) -> tuple[int, int]:
    return text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)


def gbnf_rule_at(text: str, line: int) -> tuple[str, int]:
    """The name and the line in GBNF of the rule that is at a line of its Lark, whose rules have the same order."""
    lark = _gbnf_to_lark(text).split("\n")
    index = sum(1 for each in lark[:line] if _LARK_RULE.match(each)) - 1
    names = {rule[1]: rule.start(1) for rule in reversed(list(_GBNF_RULE.finditer(text)))}
    name, place = sorted(names.items(), key=lambda item: item[1])[max(index, 0)]
    return name, _line_and_column(text, place)[0]


def _with_exact_schemas(text: str) -> str:
    """Make the schemas after `%json` in a grammar exact. They keep their lines.

    Leaves what is not JSON: the compiler reports its error.
    """
    decoder = json.JSONDecoder()
    schemas: list[Any] = []
    parts, end = [], 0
    written: list[str] = []
    for found in _JSON.finditer(text):
        if found.start() < end:  # in a text within a schema
            continue
        try:
            schema, after = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        schemas.append(schema)
        parts.append((text[end : found.end()], text.count("\n", found.end(), after)))
        end = after
    make_exact(schemas)
    for schema, (before, lines) in zip(schemas, parts, strict=True):
        written += [before, "{" + "\n" * lines, json.dumps(schema, ensure_ascii=False)[1:]]
    return "".join(written) + text[end:]


def make_exact(schemas: list[Any]) -> None:
    """Change JSON schemas so that llguidance's grammars match only valid values, and compile in seconds.

    Raises GrammarError for schemas for which that cannot be done, and for more than MOST_PATTERNS patterns or a
    multiple above MOST_MULTIPLE.
    """
    patterns, multiple = 0, 1
    for schema in list(_subschemas(schemas)):
        _refuse_inexact(schema)
        stricter = [rule for formats, rule in _STRICTER if schema.get("format") in formats]
        others = schema.get("allOf", [])
        if stricter and isinstance(others, list):  # else the compiler reports the error
            schema["allOf"] = [*others, *stricter]
        named = schema.get("patternProperties")
        patterns += len(named) if isinstance(named, dict) else 0
        multiple = math.lcm(multiple, _significant_digits(schema.get("multipleOf")))
        if patterns > MOST_PATTERNS:
            raise GrammarError(
                f"the schema's patternProperties have more than {MOST_PATTERNS} patterns; join some of them with '|'."
            )
        if multiple > MOST_MULTIPLE:
            raise GrammarError(
                f"the values of multipleOf have a least common multiple above {MOST_MULTIPLE:,} (without decimal "
                "points); remove some and check these numbers afterwards."
            )
    for schema in schemas:
        stated = schema.get("x-guidance")
        schema["x-guidance"] = {**(stated if isinstance(stated, dict) else {}), "json_allowed_escapes": _ESCAPES}


def _subschemas(schemas: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The schemas, and all schemas in them."""
    waiting = list(schemas)
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield value
            for key, part in value.items():
                if key in _NAMED_SCHEMAS and isinstance(part, dict):
                    waiting += part.values()
                elif key not in _VALUES:
                    waiting.append(part)


def _refuse_inexact(schema: dict[str, Any]) -> None:
    """Raises GrammarError for a schema that llguidance compiles to a grammar with other values."""
    bounds = {name: schema[name] for name in _BOUNDS if _is_number(schema.get(name))}
    values = list(_scalars([schema.get("const"), schema.get("enum")]))
    for value in [*bounds.values(), *values]:
        if _is_number(value) and abs(value) > MOST_INTEGER and value == int(value):
            raise GrammarError(
                f"the schema has the integer {short_repr(value)}, but integers must be in -(2^53 - 1) to 2^53 - 1; "
                "describe it as a text with a pattern, or check it afterwards."
            )
        if isinstance(value, str) and _UNWRITABLE.search(value):
            raise GrammarError(
                f"the schema has the value {value!r:.60}, with a control character that answers cannot have; remove it."
            )
    for name, end in (("exclusiveMinimum", "upper"), ("exclusiveMaximum", "lower")):
        others = [bound for other, bound in bounds.items() if other.lower().endswith("maximum") == (end == "upper")]
        bound = bounds.get(name)
        if bound is not None and bound == int(bound) and any(int(other) == bound for other in others):
            raise GrammarError(
                f"the schema's {name} {bound} and its {end} bound {others[0]} have the same integer part, which a "
                "grammar cannot express; make the bound inclusive, or check it afterwards."
            )
    required = schema.get("required")
    names = len(required) if isinstance(required, list) else 0
    least = schema.get("minProperties")
    is_open = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if isinstance(least, int) and least > names + 1 and is_open:
        raise GrammarError(
            f"the schema has minProperties {least} and {names} required names, but no grammar tells whether further "
            "names differ; require them, or check their number afterwards."
        )


def _is_number(value: Any) -> bool:
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_finite and not isinstance(value, bool)


def _scalars(value: Any) -> Iterator[Any]:
    """The texts and numbers in a JSON value, and the names of its objects."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part
        else:
            yield part


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
