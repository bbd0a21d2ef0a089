"""Writes a constraint as a grammar in llguidance's Lark."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from topw_deploy.errors import GrammarError
from topw_deploy.runtime.structured.constraint import Constraint

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
    return f"start: {_EXPRESSIONS[kind](text)}{_OPTIONS}"


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


def _regex_expression(text: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(text, use_ascii='d')}/"  # \d matches only 0 to 9, \w any letter


def _choice_expression(text: str) -> str:
    # One terminal, because several thousand alternatives of a rule exceed the parser's limits.
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return f"CHOICE\nCHOICE: {choices}"


_EXPRESSIONS = {"json": _schema_expression, "regex": _regex_expression, "choice": _choice_expression}


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
