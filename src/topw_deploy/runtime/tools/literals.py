"""Lark rules of arguments that are not JSON: Python literals, and Gemma's with tokens around strings.

llguidance compiles JSON schemas for JSON only. Here a schema may use the keywords in `_READ`, and those in `_IGNORED`,
which do not limit values. Others are refused, because the rules would allow values that the schema does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError

_READ = {"$ref", "anyOf", "const", "enum", "nullable", "type"} | {
    *("additionalProperties", "items", "properties", "required"),
}
_IGNORED = {"$comment", "$defs", "$id", "$schema", "definitions"} | {
    *("default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly"),
}
_DEPTH = 32  # of schemas within schemas
_INTEGER = r"-?(0|[1-9][0-9]{0,17})"
_NAME = re.compile(r"[^\W\d]\w*")
_TOOL = {True: re.compile(r"[^\W\d][\w.]*"), False: re.compile(r"[^\s{}<>]+")}  # with keywords; in Gemma's form


@dataclass(frozen=True)
class Style:
    """How a family writes arguments.

    quote: the text around strings, which have no escapes; "" for Python's.
    names: the texts of true, false and null.
    comma, colon: between the members of lists and mappings, and between keys and values.
    keywords: whether arguments are `name=value`, not a mapping.
    """

    quote: str
    names: tuple[str, str, str]
    comma: str
    colon: str
    keywords: bool = False


GEMMA = Style("<escape>", ("true", "false", "null"), ",", ":")
GEMMA_4 = Style('<|"|>', GEMMA.names, ",", ":")
PYTHON = Style("", ("True", "False", "None"), ", ", ": ", keywords=True)


class Literals:
    """Writes the rules of all tools' arguments.

    lines: the rules so far.
    terms: from a text with markers to Lark.
    special: whether the text around strings is a special token; then a string may contain any other text.
    """

    def __init__(self, style: Style, terms: Callable[[str], str], *, special: bool) -> None:
        self._style, self._terms = style, terms
        self._tool, self._rule = "", ""
        self._root: Mapping[str, Any] = {}
        self._named: dict[str, str] = {}  # the tool's rules of references
        self._count = 0
        true, false, null = map(_quoted, style.names)
        comma, colon = _quoted(style.comma), _quoted(style.colon)
        quote = terms(style.quote)
        inner = r"(.|\n)+" if special else "[^<]+"
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

    def add(self, tool: str, rule: str, schema: Mapping[str, Any]) -> None:
        """Write `rule`, the arguments of a tool. Raises ParameterError for a schema that the rules cannot express."""
        self._tool, self._rule, self._root, self._named, self._count = tool, rule, schema, {}, 0
        if not _TOOL[self._style.keywords].fullmatch(tool):
            raise self._refused("the name")
        if self._style.keywords:
            written = self._members(schema, lambda name: _quoted(f"{name}="), 0) or _quoted("")
        else:
            written = self._mapping(schema, 0)
        self.lines.append(f"{rule}: {written}")

    def _value(self, schema: Any, depth: int) -> str:
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self._refused(f"{schema!r} as a schema")
        if depth > _DEPTH:
            raise self._refused(f"schemas nested more than {_DEPTH} deep")
        unknown = sorted(map(str, schema.keys() - _READ - _IGNORED))
        if unknown:
            raise self._refused(repr(unknown[0]))
        options = list(self._options(schema, depth + 1))
        if schema.get("nullable") is True:
            options.append("null")
        return f"({' | '.join(dict.fromkeys(options))})"

    def _options(self, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
        if "$ref" in schema:
            yield self._referred(schema["$ref"], depth)
        elif "const" in schema:
            yield self._literal(schema["const"])
        elif "enum" in schema:
            yield from map(self._literal, self._list(schema, "enum"))
        elif "anyOf" in schema:
            for option in self._list(schema, "anyOf"):
                yield self._value(option, depth)
        elif "type" not in schema:
            yield self._mapping(schema, depth) if "properties" in schema else "any"
        else:
            for kind in self._list(schema, "type") if isinstance(schema["type"], list) else [schema["type"]]:
                yield self._typed(kind, schema, depth)

    def _typed(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return "text"
        if kind in ("integer", "number", "boolean", "null"):
            return str(kind)
        if kind == "array":
            item = self._new(self._value(schema.get("items", True), depth))
            return f'"[" ({item} ({_quoted(self._style.comma)} {item})*)? "]"'
        if kind == "object":
            return self._mapping(schema, depth)
        raise self._refused(f"the type {kind!r}")

    def _mapping(self, schema: Mapping[str, Any], depth: int) -> str:
        comma, colon = _quoted(self._style.comma), _quoted(self._style.colon)
        if schema.get("properties"):
            return f'"{{" {self._members(schema, lambda name: f"{self._key(name)} {colon}", depth)} "}}"'
        others = schema.get("additionalProperties", "properties" not in schema)
        if others is False:
            return '"{}"'
        pair = self._new(f"key {colon} {self._value(others, depth)}")
        return f'"{{" ({pair} ({comma} {pair})*)? "}}"'

    def _members(self, schema: Mapping[str, Any], key: Callable[[str], str], depth: int) -> str:
        """The properties, in their order. Those that the schema does not require may be left out."""
        properties = schema.get("properties") or {}
        required = self._list(schema, "required") if schema.get("required") else []
        if not isinstance(properties, Mapping) or any(name not in list(properties) for name in required):
            raise self._refused(f"the properties {properties!r} with the required {required!r}")
        comma = _quoted(self._style.comma)
        first: list[str] = []  # the ways to begin with this property or a later one
        rest = ""  # the rule of the properties after this one
        for name, value in reversed(list(properties.items())):
            if not _NAME.fullmatch(str(name)):
                raise self._refused(f"the name {name!r}")
            pair = self._new(f"{key(name)} {self._value(value, depth)}")
            needed = name in required
            first = [f"{pair} {rest}".strip(), *([] if needed else first)]
            rest = self._new(f"{comma} {pair} {rest}" if needed else f"({comma} {pair})? {rest}")
        return f"({' | '.join(first)}){'' if required else '?'}" if first else ""

    def _referred(self, reference: Any, depth: int) -> str:
        """The rule of a reference within the tool's schema."""
        known = self._named.get(str(reference))
        if known is not None:
            return known
        start, *parts = str(reference).split("/")
        target: Any = self._root
        for part in parts:
            target = target.get(part) if isinstance(target, Mapping) else None
        if start != "#" or target is None:
            raise self._refused(f"the reference {reference!r}")
        name = self._named[str(reference)] = f"{self._rule}_ref_{len(self._named)}"  # first, as it may refer to itself
        self.lines.append(f"{name}: {self._value(target, depth)}")
        return name

    def _literal(self, value: Any) -> str:
        """One given value."""
        true, false, null = map(_quoted, self._style.names)
        if value is None or isinstance(value, bool):
            return null if value is None else true if value else false
        if isinstance(value, (int, float)):
            return _quoted(json.dumps(value))
        quote = self._style.quote
        if not isinstance(value, str) or (quote and quote in value):
            raise self._refused(f"the constant {value!r}")
        return (
            f"{self._terms(quote)} {_quoted(value)}{self._terms(quote)}".strip() if quote else _quoted(_quoted(value))
        )

    def _key(self, name: str) -> str:
        return _quoted(name if self._style.quote else _quoted(name))

    def _list(self, schema: Mapping[str, Any], key: str) -> list[Any]:
        value = schema[key]
        if not isinstance(value, list) or not value:
            raise self._refused(f"{key} without a list")
        return value

    def _new(self, expression: str) -> str:
        """A new rule."""
        self._count += 1
        name = f"{self._rule}_{self._count}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _refused(self, what: str) -> ParameterError:
        return ParameterError(
            f"the grammar of this family cannot express {what} in the parameters of the tool {self._tool!r}; leave it "
            "out, or do not require a call.",
            "tools",
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
