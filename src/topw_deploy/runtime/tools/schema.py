"""Checks a caller's tools, and makes JSON schemas of Python functions.

Schemas are made from type hints and a docstring in Google's style, as in transformers.
"""

from __future__ import annotations

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
    description, described, returned = _split_docstring(name, inspect.getdoc(function))
    hints = _type_hints(name, function)
    properties, required = {}, []
    for argument, parameter in _own_parameters(name, function).items():
        if argument not in hints:
            raise _schema_error(name, f"its argument {argument!r} has no type hint")
        if argument not in described:
            raise _schema_error(name, f"its docstring does not describe the argument {argument!r}")
        schema = _schema_of_hint(name, hints[argument])
        text = described[argument]
        if choices := _CHOICES.search(text):
            schema["enum"] = _read_choices(name, choices[1])
            text = text[: choices.start()].strip()
        properties[argument] = {**schema, "description": text}
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    tool: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        try:
            tool["return"] = _schema_of_hint(name, hints["return"])
        except ParameterError:  # the schema needs no result, which templates rarely show
            pass
        else:
            if returned is not None:
                tool["return"]["description"] = returned
    return {"type": "function", "function": tool}


def _schema_error(name: str, why: str) -> ParameterError:
    return ParameterError(f"tools: {name} has no JSON schema: {why}; correct it, or give the schema.", "tools")


def _type_hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError) as error:
        raise _schema_error(name, f"its type hints cannot be read ({error})") from None


def _own_parameters(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, without the `self` or `cls` of a method."""
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        raise _schema_error(name, "its signature is unknown") from None
    first = next(iter(found), None)
    if first in ("self", "cls") and found[first].annotation is inspect.Parameter.empty:
        del found[first]
    return found


def _split_docstring(name: str, text: str | None) -> tuple[str, dict[str, str], str | None]:
    """Split a docstring. Returns (description, argument -> description, description of the result or None)."""
    if not text or not text.strip():
        raise _schema_error(name, "it has no docstring")
    pieces = _SECTION.split(text.strip())
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    returned = sections["Returns"].strip() if "Returns" in sections else None
    return pieces[0].strip(), _argument_descriptions(inspect.cleandoc(sections.get("Args", ""))), returned


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


def _read_choices(name: str, text: str) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise _schema_error(name, f"its choices {text[:80]!r} are no JSON list")
    return [value.strip() if isinstance(value, str) else value for value in values]


def _schema_of_hint(name: str, hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_schema(name, [member.value for member in hint])
    if isinstance(hint, type) and hint in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[hint]}
    if origin in (list, dict) and not arguments:  # typing.List and typing.Dict
        return {"type": _TYPE_NAMES[origin]}
    if origin is Literal:
        return _enum_schema(name, list(arguments))
    if origin is Union or origin is types.UnionType:
        return _union_schema(name, arguments)
    if origin is list:
        return {"type": "array", "items": _schema_of_hint(name, arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema_of_hint(name, argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of_hint(name, arguments[1])}
    raise _schema_error(name, f"JSON schema cannot express the type hint {hint!r}")


def _enum_schema(name: str, values: list[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _schema_error(name, "a Literal or Enum may hold text, numbers, booleans and None only")
    kinds = list(dict.fromkeys(_TYPE_NAMES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union_schema(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    options = [_schema_of_hint(name, argument) for argument in arguments if argument is not type(None)]
    kinds = sorted({option["type"] for option in options if option.keys() == {"type"}})
    if len(options) == 1:
        found = options[0]
    elif all(option.keys() == {"type"} for option in options):
        found = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        found = {"anyOf": options}
    return {**found, "nullable": True} if type(None) in arguments else found
