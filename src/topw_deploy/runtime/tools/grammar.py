"""Grammars that allow only tool calls, from the table of formats.

llguidance compiles JSON schemas for JSON only. `LiteralRules` are the rules of arguments in another dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.formats import FAMILIES, Format
from topw_deploy.runtime.tools.literals import PYTHON, Dialect, pattern_of
from topw_deploy.runtime.tools.schema import parameter_schemas

_MAX_DEPTH = 32  # nesting of schemas
_INTEGER = r"-?(0|[1-9][0-9]{0,17})"
_PROPERTY_NAME = re.compile(r"[^\W\d]\w*")
_TOOL_NAMES = {True: re.compile(r"[^\W\d][\w.]*"), False: re.compile(r"[^\s{}<>]+")}  # True: Python's


def required_calls(
    tools: Sequence[Any],
    family: str,
    *,
    name: str | None = None,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """Returns a Lark grammar for llguidance that allows only calls of `tools`, as `tool_choice="required"` asks for.

    family: a name of `FAMILIES`, except "deepseek", which has two formats with the same tokens. The special tokens of
        Mistral (`[ARGS]`), Gemma 4 and LFM2 select these models' formats. "harmony" allows one call. Reasoning may
        precede the calls of "harmony" and Gemma 4.
    name: the only tool that may be called.
    parallel: whether there may be several calls.
    special_tokens: ids of the tokenizer's special tokens by their texts, for which llguidance has another notation.

    Where arguments are not JSON ("gemma", "pythonic"), only a schema's members, types and constants are enforced.

    Raises ParameterError for another family, an unknown name, and invalid tools or none.
    """
    writable = [name for name, each in FAMILIES.items() if any(form.written for form in each.formats)]
    if family not in writable:
        raise ParameterError(f"family is {family!r}, but grammars exist for {', '.join(writable)} only.", "family")
    schemas = parameter_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ParameterError(f"name is {name!r}, but the tools are {', '.join(schemas) or 'none'}.", "name")
        schemas = {name: schemas[name]}
    if not schemas:
        raise ParameterError("tools is empty, so no call can be required; give at least one tool.", "tools")
    special = special_tokens or {}
    formats = [form for form in FAMILIES[family].formats if form.written is True or form.written in special]
    pattern = pattern_of(FAMILIES[family].markers)
    return "\n".join(_grammar_lines(formats[-1], schemas, parallel, special, pattern)) + "\n"


def _grammar_lines(
    form: Format, schemas: Mapping[str, Any], parallel: bool, special: Mapping[str, int], markers: re.Pattern[str]
) -> list[str]:
    pattern = re.compile(f"({markers.pattern})")

    def lark_terms(text: str) -> str:
        parts = [part for part in pattern.split(text) if part]
        return "".join(f" <[{special[part]}]>" if part in special else f" {lark_string(part)}" for part in parts)

    known = special.keys() >= set(pattern.findall("".join(form.reasoning or ())))
    reasoning = form.reasoning if known else None
    space = form.call[: len(form.call) - len(form.call.lstrip())]
    start = "start:" + (" reasoning?" if reasoning else "") + lark_terms(form.opener + form.begin + space) + " call"
    if parallel and form.between is not None:
        start += f" ({lark_terms(form.between + space).strip()} call)*"
    lines = [start + lark_terms(form.end), "call: " + " | ".join(f"tool_{index}" for index in range(len(schemas)))]
    literals = None if form.dialect.escapes == "json" else LiteralRules(form.dialect, lark_terms, special)
    for index, (tool, schema) in enumerate(schemas.items()):
        described = f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "{form.key}": {{arguments}}}}'
        text = form.call.lstrip().replace("{call}", "{name}({arguments})").replace("{object}", described)
        head, _, tail = text.replace("{name}", tool).partition("{arguments}")
        lines.append(f"tool_{index}:{lark_terms(head)} arguments_{index}{lark_terms(tail)}")
        if literals is not None:
            literals.add_tool(tool, f"arguments_{index}", schema)
        else:
            # In a rule of its own, so that `#` in the schema's references means this schema.
            lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    if literals is not None:
        lines += literals.lines
    if reasoning:
        opening, closing = map(lark_terms, reasoning)
        lines += [f"reasoning:{opening} REASONING{closing}", r"REASONING: /(.|\n)*/"]
    return lines


class LiteralRules:
    """Writes the Lark rules of arguments that are not JSON.

    They allow the members, types and constants that a schema states, and require its required members. Where a schema
    says more (references, patterns, bounds), they allow more than the schema.

    lines: the rules so far.
    lark_terms: function from a text with markers to a Lark expression.
    special: the special tokens. A string between special tokens may contain any other text.
    """

    def __init__(self, dialect: Dialect, lark_terms: Callable[[str], str], special: Mapping[str, int]) -> None:
        self._lark_terms, self._is_python = lark_terms, dialect is PYTHON
        self._quote = dialect.quotes[0] if not dialect.escapes else ""  # "" for Python's strings
        self._constants = dict(zip((True, False, None), map(lark_string, dialect.written), strict=True))
        self._comma, self._colon = lark_string(dialect.comma), lark_string(dialect.colon)
        quote, comma, colon = lark_terms(self._quote), self._comma, self._colon
        inner = r"(.|\n)+" if self._quote in special else "[^<]+"
        self.lines = [
            f"text:{quote} TEXT?{quote}" if quote else "text: TEXT",
            f"TEXT: /{inner}/" if quote else r'TEXT: /"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/',
            f"integer: /{_INTEGER}/",
            rf"number: /{_INTEGER}(\.[0-9]{{1,17}})?([eE][-+]?[0-9]{{1,2}})?/",
            f"boolean: {self._constants[True]} | {self._constants[False]}",
            f"null: {self._constants[None]}",
            "any: text | number | boolean | null | list | mapping",
            f'list: "[" (any ({comma} any)*)? "]"',
            f'mapping: "{{" (key {colon} any ({comma} key {colon} any)*)? "}}"',
            "key: /[A-Za-z_][A-Za-z0-9_]*/" if quote else "key: TEXT",
        ]

    def add_tool(self, tool: str, rule: str, schema: Mapping[str, Any]) -> None:
        """Write the rule named `rule` for the arguments of a tool. schema: of its parameters.

        Raises ParameterError for a name that a call cannot have.
        """
        self._tool, self._rule, self._count = tool, rule, 0
        self._check_name(_TOOL_NAMES[self._is_python], tool)
        if self._is_python:
            written = self._members(schema, lambda name: lark_string(f"{name}="), 0) or lark_string("")
        else:
            written = self._object(schema, 0)
        self.lines.append(f"{rule}: {written}")

    def _value(self, schema: Any, depth: int) -> str:
        """The expression of the values that a schema allows. depth: its nesting."""
        if not isinstance(schema, Mapping) or "$ref" in schema or depth > _MAX_DEPTH:
            return "any"
        if options := _list_of(schema, "anyOf"):
            found = [self._value(option, depth + 1) for option in options]
        elif constants := [schema["const"]] if "const" in schema else _list_of(schema, "enum"):
            found = list(map(self._constant, constants))
        else:
            found = [self._typed(kind, schema, depth + 1) for kind in _list_of(schema, "type") or [schema.get("type")]]
        if schema.get("nullable") is True:
            found.append("null")
        return f"({' | '.join(dict.fromkeys(found))})"

    def _typed(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        """The expression of the values of one type."""
        if kind == "array":
            item = self._add_rule(self._value(schema.get("items"), depth))
            return f'"[" ({item} ({self._comma} {item})*)? "]"'
        if kind == "object":
            return self._object(schema, depth)
        names = {"string": "text"} | {name: name for name in ("integer", "number", "boolean", "null")}
        return names.get(str(kind), "any")

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        if schema.get("properties") or schema.get("required"):
            members = self._members(schema, lambda name: f"{self._key(name)} {self._colon}", depth)
            return f'"{{" {members} "}}"'
        others = schema.get("additionalProperties", "properties" not in schema)
        if others is False:
            return '"{}"'
        pair = self._add_rule(f"key {self._colon} {self._value(others, depth)}")
        return f'"{{" ({pair} ({self._comma} {pair})*)? "}}"'

    def _members(self, schema: Mapping[str, Any], key: Callable[[str], str], depth: int) -> str:
        """The expression of an object's members, in the schema's order. Members that are not required may be left out.

        key: function from a property's name to the expression of the text before its value.
        """
        stated, required = schema.get("properties"), _list_of(schema, "required")
        properties = {**(stated if isinstance(stated, Mapping) else {})}
        properties |= {name: True for name in required if name not in properties}
        first: list[str] = []  # the ways to begin with this property or a later one
        rest = ""  # the rule of the properties after this one
        for name, value in reversed(list(properties.items())):
            self._check_name(_PROPERTY_NAME, str(name))
            pair = self._add_rule(f"{key(name)} {self._value(value, depth)}")
            needed = name in required
            first = [f"{pair} {rest}".strip(), *([] if needed else first)]
            rest = self._add_rule(f"{self._comma} {pair} {rest}" if needed else f"({self._comma} {pair})? {rest}")
        return f"({' | '.join(first)}){'' if required else '?'}" if first else ""

    def _constant(self, value: Any) -> str:
        """The expression of one given value."""
        if value is None or isinstance(value, bool):
            return self._constants[value]
        if isinstance(value, (int, float)):
            return lark_string(json.dumps(value))
        if not isinstance(value, str) or (self._quote and self._quote in value):
            return "any"
        marks = self._lark_terms(self._quote)
        return f"{marks} {lark_string(value)}{marks}".strip() if self._quote else self._key(value)

    def _key(self, name: str) -> str:
        return lark_string(name if self._quote else lark_string(name))

    def _add_rule(self, expression: str) -> str:
        """Add a rule. Returns its name."""
        self._count += 1
        name = f"{self._rule}_{self._count}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _check_name(self, pattern: re.Pattern[str], name: str) -> None:
        if not pattern.fullmatch(name):
            raise ParameterError(
                f"the grammar of this family cannot express the name {name!r} in the tool {self._tool!r}; change it, "
                "or do not require a call.",
                "tools",
            )


def _list_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list at `key`; [] if there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def lark_string(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
