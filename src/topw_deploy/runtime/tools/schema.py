"""Checks a caller's tools, and makes JSON schemas of Python functions.

Schemas are made from type hints and a docstring in Google's style, as in transformers.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from topw_deploy.errors import ParameterError

_TYPE_NAMES: Mapping[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS = (int, float, str, bool, type(None))
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Examples?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def schemas_of(tools: Sequence[Any]) -> list[Any]:
    """Returns `tools` with each Python function replaced by its schema. Raises ParameterError if one has no schema."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ParameterError(f"tools is a {type(tools).__name__}, but must be a list.", "tools")
    return [function_schema(tool) if callable(tool) else tool for tool in tools]


def parameter_schemas(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters, by its name. Raises ParameterError for an invalid tool."""
    found: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(schemas_of(tools)):
        inner = tool.get("function") if isinstance(tool, Mapping) else None
        function = inner if isinstance(inner, Mapping) else tool
        name = function.get("name") if isinstance(function, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(parameters, (Mapping, type(None))):
            raise ParameterError(
                f"tools[{index}] must be a function, or a mapping as OpenAI's with a 'name' and a JSON schema as "
                "'parameters'.",
                "tools",
            )
        found[name] = parameters or {"type": "object", "properties": {}}
    return found


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describes a function as a tool, in the form of OpenAI's and transformers' `tools`.

    Every argument needs a type hint and a description under "Args:". `(choices: ["a", "b"])` at the end of a
    description becomes an `enum`.

    Raises ParameterError for a missing description or type hint, or one that JSON schema cannot express.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return {"type": "function", "function": {"name": name, **_describe(function)}}
    except _NoSchemaError as error:
        raise ParameterError(
            f"tools: {name} has no JSON schema: {error}; correct it, or give the schema.", "tools"
        ) from None


class _NoSchemaError(Exception):
    """Why a function has no schema."""


def _describe(function: Callable[..., Any]) -> dict[str, Any]:
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise _NoSchemaError("it has no docstring")
    pieces = _SECTION.split(text.strip())
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    described = _argument_descriptions(inspect.cleandoc(sections.get("Args", "")))
    try:
        hints, arguments = get_type_hints(function), dict(inspect.signature(function).parameters)
    except (NameError, TypeError, AttributeError, ValueError) as error:  # ValueError: a function in C
        why = "its signature is unknown" if isinstance(error, ValueError) else f"its type hints are wrong ({error})"
        raise _NoSchemaError(why) from None
    first = next(iter(arguments), None)
    if first in ("self", "cls") and first not in hints:
        del arguments[first]
    properties, required = {}, []
    for argument, parameter in arguments.items():
        if argument not in hints:
            raise _NoSchemaError(f"its argument {argument!r} has no type hint")
        if argument not in described:
            raise _NoSchemaError(f"its docstring does not describe the argument {argument!r}")
        properties[argument] = _schema_of_hint(hints[argument]) | _description(described[argument])
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    found: dict[str, Any] = {"description": pieces[0].strip(), "parameters": parameters}
    if "return" in hints:
        with contextlib.suppress(_NoSchemaError):  # templates rarely show the result
            found["return"] = _schema_of_hint(hints["return"])
            if "Returns" in sections:
                found["return"]["description"] = sections["Returns"].strip()
    return found


def _argument_descriptions(section: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := _ARGUMENT.match(line):
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _description(text: str) -> dict[str, Any]:
    """The schema's `description`, and its `enum` if the text ends with choices."""
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        values = json.loads(choices[1])
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise _NoSchemaError(f"its choices {choices[1][:80]!r} are no JSON list")
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return {"enum": values, "description": text[: choices.start()].strip()}


def _schema_of_hint(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        origin, arguments = Literal, tuple(member.value for member in hint)
    if origin is Literal:
        if not arguments or any(type(value) not in _SCALARS for value in arguments):
            raise _NoSchemaError("a Literal or Enum may hold text, numbers, booleans and None only")
        return {**_type_of([_TYPE_NAMES[type(value)] for value in arguments]), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [_schema_of_hint(argument) for argument in arguments if argument is not type(None)]
        found = {"anyOf": options}
        if len(options) == 1:
            found = options[0]
        elif all(option.keys() == {"type"} for option in options):
            found = _type_of(sorted(option["type"] for option in options))
        return {**found, "nullable": True} if type(None) in arguments else found
    plain = origin if origin in (list, dict) and not arguments else hint  # typing.List and typing.Dict
    if isinstance(plain, type) and plain in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[plain]}
    if origin is list:
        return {"type": "array", "items": _schema_of_hint(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema_of_hint(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of_hint(arguments[1])}
    raise _NoSchemaError(f"JSON schema cannot express the type hint {hint!r}")


def _type_of(kinds: Sequence[str]) -> dict[str, Any]:
    distinct = list(dict.fromkeys(kinds))
    return {"type": distinct[0] if len(distinct) == 1 else distinct}
