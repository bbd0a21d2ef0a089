"""Turns llguidance's messages into GrammarErrors of one sentence, with the position of the error."""

from __future__ import annotations

import re

from topw_deploy.errors import GrammarError, one_line
from topw_deploy.runtime.structured.constraint import Constraint

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n\s+\d+ \| ")
_REGEX_ERROR = re.compile(
    r"(?:invalid regex .*?\(in regex\): )?regex parse error:\n    (?P<text>[^\n]*)\n    (?P<gap> *)\^+\s*\nerror: "
    r"(?P<why>[^\n]*)",
    re.DOTALL,
)
_NO_CONTINUATION = ("NoExtension", "NoExtensionBias")
_NOUNS = {"json": "the schema", "regex": "the expression", "choice": "the choices", "grammar": "the grammar"}


def compile_error(constraint: Constraint, message: str) -> GrammarError:
    """The error for a constraint that does not compile. message: llguidance's."""
    what = _NOUNS[constraint.kind]
    message = message.replace("<non-verbose/>", "").strip()
    place = _PLACE.match(message)
    why = _EXCERPT.split(message[place.end() :] if place else message)[0]
    in_regex = _REGEX_ERROR.search(message)
    if in_regex:
        why = in_regex["why"]
    if constraint.kind == "grammar" and place:
        line, column = int(place[1]), int(place[2])
        where = f" (line {line}, column {column}{_quote_place(in_regex)})"
        return GrammarError(f"{what} does not compile: {_as_clause(why)}{where}.", line=line, column=column)
    if constraint.kind == "regex" and in_regex:
        column = len(in_regex["gap"]) + 1
        return GrammarError(f"{what} does not compile: {_as_clause(why)} (column {column}).", line=1, column=column)
    return GrammarError(f"{what} does not compile: {_as_clause(why.removeprefix('failed to compile JSON schema: '))}.")


def step_error(message: str) -> GrammarError:
    """The error for a grammar that becomes too complex during generation, or allows no next token."""
    why = _as_clause(message.replace("<non-verbose/>", ""))
    if why in _NO_CONTINUATION:
        return GrammarError(
            "the grammar of structured_outputs allows no continuation; give another one.", "structured_outputs"
        )
    return GrammarError(f"the grammar of structured_outputs failed: {why}; give a simpler one.", "structured_outputs")


def _quote_place(in_regex: re.Match[str] | None) -> str:
    """The expression from the place of its error on, for a message; "" if the error is not in an expression."""
    return "" if in_regex is None else f", at {one_line(ValueError(in_regex['text'][len(in_regex['gap']) :]), 40)!r}"


def _as_clause(message: str) -> str:
    """A message as one line without a full stop."""
    return one_line(ValueError(message)).rstrip(" .;,")
