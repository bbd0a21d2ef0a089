"""Grammars that allow only tool calls, from the table of formats.

llguidance compiles JSON schemas for JSON only. For arguments in another dialect, a schema may use the keywords in
`_KEYWORDS`, and those in `_IGNORED_KEYWORDS`, which do not limit values. Other keywords are refused, because the rules
would allow values that the schema does not allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.formats import FAMILIES, Format
from topw_deploy.runtime.tools.literals import PYTHON, Dialect, pattern_of
from topw_deploy.runtime.tools.schema import parameter_schemas

_KEYWORDS = {"$ref", "anyOf", "const", "enum", "nullable", "type"} | {
    *("additionalProperties", "items", "properties", "required"),
}
_IGNORED_KEYWORDS = {"$comment", "$defs", "$id", "$schema", "definitions"} | {
    *("default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly"),
}
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

    Raises ParameterError for another family, an unknown name, invalid tools or none, and, where arguments are not JSON
    ("gemma", "pythonic"), for schemas with keywords other than types, properties, lists of values and references.
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
    """Writes the Lark rules of the arguments of all tools.

    lines: the rules so far.
    lark_terms: function from a text with markers to a Lark expression.
    special: the special tokens. A string between special tokens may contain any other text.
    """

    def __init__(self, dialect: Dialect, lark_terms: Callable[[str], str], special: Mapping[str, int]) -> None:
        self._dialect, self._lark_terms = dialect, lark_terms
        self._quote = dialect.quotes[0] if not dialect.escapes else ""  # "" for Python's strings
        self._tool, self._rule = "", ""
        self._root: Mapping[str, Any] = {}
        self._reference_rules: dict[str, str] = {}  # reference in the tool's schema -> its rule
        self._count = 0
        true, false, null = map(lark_string, dialect.written)
        comma, colon = lark_string(dialect.comma), lark_string(dialect.colon)
        quote = lark_terms(self._quote)
        inner = r"(.|\n)+" if self._quote in special else "[^<]+"
        self.lines = [
            f"text:{quote} TEXT?{quote}" if quote else "text: TEXT",
            f"TEXT: /{inner}/" if quote else r'TEXT: /"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/',
            f"integer: /{_INTEGER}/",
            rf"number: /{_INTEGER}(\.[0-9]{{1,17}})?([eE][-+]?[0-9]{{1,2}})?/",
            f"boolean: {true} | {false}",
            f"null: {null}",
            "any: text | number | boolean | null | list | mapping",
            f'list: "[" (any ({comma} any)*)? "]"',
            f'mapping: "{{" (key {colon} any ({comma} key {colon} any)*)? "}}"',
            "key: /[A-Za-z_][A-Za-z0-9_]*/" if quote else "key: TEXT",
        ]

    def add_tool(self, tool: str, rule: str, schema: Mapping[str, Any]) -> None:
        """Write the rule named `rule` for the arguments of a tool. schema: of its parameters.

        Raises ParameterError for a schema that the rules cannot express.
        """
        self._tool, self._rule, self._root, self._reference_rules, self._count = tool, rule, schema, {}, 0
        if not _TOOL_NAMES[self._dialect is PYTHON].fullmatch(tool):
            raise self._unsupported("the name")
        if self._dialect is PYTHON:
            written = self._members_expression(schema, lambda name: lark_string(f"{name}="), 0) or lark_string("")
        else:
            written = self._object_expression(schema, 0)
        self.lines.append(f"{rule}: {written}")

    def _value_expression(self, schema: Any, depth: int) -> str:
        """The expression of the values that a schema allows. depth: its nesting."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self._unsupported(f"{schema!r} as a schema")
        if depth > _MAX_DEPTH:
            raise self._unsupported(f"schemas nested more than {_MAX_DEPTH} deep")
        unknown = sorted(map(str, schema.keys() - _KEYWORDS - _IGNORED_KEYWORDS))
        if unknown:
            raise self._unsupported(repr(unknown[0]))
        for keyword in ("$ref", "anyOf"):
            beside = sorted(schema.keys() & _KEYWORDS - {keyword, "nullable"})
            if keyword in schema and beside:
                raise self._unsupported(f"{keyword!r} beside {beside[0]!r}")
        options = list(self._alternatives(schema, depth + 1))
        if schema.get("nullable") is True:
            options.append("null")
        return f"({' | '.join(dict.fromkeys(options))})"

    def _alternatives(self, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
        """The expressions of which a value must match one."""
        if "$ref" in schema:
            yield self._reference_rule(schema["$ref"], depth)
        elif "const" in schema:
            yield self._constant_expression(schema["const"])
        elif "enum" in schema:
            yield from map(self._constant_expression, self._read_list(schema, "enum"))
        elif "anyOf" in schema:
            for option in self._read_list(schema, "anyOf"):
                yield self._value_expression(option, depth)
        elif "type" not in schema:
            yield self._object_expression(schema, depth) if "properties" in schema else "any"
        else:
            for kind in self._read_list(schema, "type") if isinstance(schema["type"], list) else [schema["type"]]:
                yield self._type_expression(kind, schema, depth)

    def _type_expression(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return "text"
        if kind in ("integer", "number", "boolean", "null"):
            return str(kind)
        if kind == "array":
            item = self._add_rule(self._value_expression(schema.get("items", True), depth))
            return f'"[" ({item} ({lark_string(self._dialect.comma)} {item})*)? "]"'
        if kind == "object":
            return self._object_expression(schema, depth)
        raise self._unsupported(f"the type {kind!r}")

    def _object_expression(self, schema: Mapping[str, Any], depth: int) -> str:
        comma, colon = lark_string(self._dialect.comma), lark_string(self._dialect.colon)
        if schema.get("properties") or schema.get("required"):
            members = self._members_expression(schema, lambda name: f"{self._key_expression(name)} {colon}", depth)
            return f'"{{" {members} "}}"'
        others = schema.get("additionalProperties", "properties" not in schema)
        if others is False:
            return '"{}"'
        pair = self._add_rule(f"key {colon} {self._value_expression(others, depth)}")
        return f'"{{" ({pair} ({comma} {pair})*)? "}}"'

    def _members_expression(self, schema: Mapping[str, Any], key: Callable[[str], str], depth: int) -> str:
        """The expression of an object's members, in the schema's order. Members that are not required may be left out.

        key: function from a property's name to the expression of the text before its value.
        """
        properties = schema.get("properties") or {}
        required = self._read_list(schema, "required") if schema.get("required") else []
        if not isinstance(properties, Mapping) or any(name not in list(properties) for name in required):
            raise self._unsupported(f"the properties {properties!r} with the required {required!r}")
        comma = lark_string(self._dialect.comma)
        first: list[str] = []  # the ways to begin with this property or a later one
        rest = ""  # the rule of the properties after this one
        for name, value in reversed(list(properties.items())):
            if not _PROPERTY_NAME.fullmatch(str(name)):
                raise self._unsupported(f"the name {name!r}")
            pair = self._add_rule(f"{key(name)} {self._value_expression(value, depth)}")
            needed = name in required
            first = [f"{pair} {rest}".strip(), *([] if needed else first)]
            rest = self._add_rule(f"{comma} {pair} {rest}" if needed else f"({comma} {pair})? {rest}")
        return f"({' | '.join(first)}){'' if required else '?'}" if first else ""

    def _reference_rule(self, reference: Any, depth: int) -> str:
        """The name of the rule for a reference within the tool's schema."""
        known = self._reference_rules.get(str(reference))
        if known is not None:
            return known
        start, *parts = str(reference).split("/")
        target: Any = self._root
        for part in parts:
            target = target.get(part) if isinstance(target, Mapping) else None
        if start != "#" or target is None:
            raise self._unsupported(f"the reference {reference!r}")
        name = f"{self._rule}_ref_{len(self._reference_rules)}"
        self._reference_rules[str(reference)] = name  # before its expression, which may refer to it
        self.lines.append(f"{name}: {self._value_expression(target, depth)}")
        return name

    def _constant_expression(self, value: Any) -> str:
        """The expression of one given value."""
        true, false, null = map(lark_string, self._dialect.written)
        if value is None or isinstance(value, bool):
            return null if value is None else true if value else false
        if isinstance(value, (int, float)):
            return lark_string(json.dumps(value))
        quote = self._quote
        if not isinstance(value, str) or (quote and quote in value):
            raise self._unsupported(f"the constant {value!r}")
        return (
            f"{self._lark_terms(quote)} {lark_string(value)}{self._lark_terms(quote)}".strip()
            if quote
            else lark_string(lark_string(value))
        )

    def _key_expression(self, name: str) -> str:
        return lark_string(name if self._quote else lark_string(name))

    def _read_list(self, schema: Mapping[str, Any], key: str) -> list[Any]:
        value = schema[key]
        if not isinstance(value, list) or not value:
            raise self._unsupported(f"{key} without a list")
        return value

    def _add_rule(self, expression: str) -> str:
        """Add a rule. Returns its name."""
        self._count += 1
        name = f"{self._rule}_{self._count}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _unsupported(self, what: str) -> ParameterError:
        return ParameterError(
            f"the grammar of this family cannot express {what} in the parameters of the tool {self._tool!r}; leave it "
            "out, or do not require a call.",
            "tools",
        )


def lark_string(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
