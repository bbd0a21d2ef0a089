"""Checks a caller's tools, and makes JSON schemas of Python functions.

Schemas come from type hints and a docstring in Google's style, as transformers makes them.
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

_NAMES: Mapping[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS = (int, float, str, bool, type(None))
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Examples?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def schemas_of(tools: Sequence[Any]) -> list[Any]:
    """`tools` with JSON schemas for Python functions. Raises ParameterError for a function that has none."""
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
    """The function as a tool, in the form of OpenAI's and transformers' `tools`.

    Every argument needs a type hint and a description under "Args:". `(choices: ["a", "b"])` at the end of a
    description becomes an `enum`.

    Raises ParameterError for a missing description or type hint, or one that JSON schema cannot express.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, described, returned = _docstring(name, inspect.getdoc(function))
    hints = _hints(name, function)
    properties, required = {}, []
    for argument, parameter in _parameters(function).items():
        if argument not in hints:
            raise _refused(name, f"its argument {argument!r} has no type hint")
        if argument not in described:
            raise _refused(name, f"its docstring does not describe the argument {argument!r}")
        schema = _schema(name, hints[argument])
        text = described[argument]
        if choices := _CHOICES.search(text):
            schema["enum"] = _choices(name, choices[1])
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
            tool["return"] = _schema(name, hints["return"])
        except ParameterError:  # templates rarely show it
            pass
        else:
            if returned is not None:
                tool["return"]["description"] = returned
    return {"type": "function", "function": tool}


def _refused(name: str, why: str) -> ParameterError:
    return ParameterError(f"tools: {name} has no JSON schema: {why}; correct it, or give the schema.", "tools")


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError) as error:
        raise _refused(name, f"its type hints cannot be read ({error})") from None


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(function).parameters)
    first = next(iter(found), None)
    if first in ("self", "cls") and found[first].annotation is inspect.Parameter.empty:
        del found[first]
    return found


def _docstring(name: str, text: str | None) -> tuple[str, dict[str, str], str | None]:
    """Returns (description, argument -> description, description of the result)."""
    if not text or not text.strip():
        raise _refused(name, "it has no docstring")
    pieces = _SECTION.split(text.strip())
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    returned = sections["Returns"].strip() if "Returns" in sections else None
    return pieces[0].strip(), _arguments(inspect.cleandoc(sections.get("Args", ""))), returned


def _arguments(section: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := _ARGUMENT.match(line):
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _choices(name: str, text: str) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise _refused(name, f"its choices {text[:80]!r} are no JSON list")
    return [value.strip() if isinstance(value, str) else value for value in values]


def _schema(name: str, hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of(name, [member.value for member in hint])
    if origin is None and hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal:
        return _one_of(name, list(arguments))
    if origin is Union or origin is types.UnionType:
        return _union(name, arguments)
    if origin is list:
        return {"type": "array", "items": _schema(name, arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema(name, argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(name, arguments[1])}
    raise _refused(name, f"JSON schema cannot express the type hint {hint!r}")


def _one_of(name: str, values: list[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _refused(name, "a Literal or Enum may hold text, numbers, booleans and None only")
    kinds = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    options = [_schema(name, argument) for argument in arguments if argument is not type(None)]
    kinds = sorted({option["type"] for option in options if option.keys() == {"type"}})
    if len(options) == 1:
        found = options[0]
    elif all(option.keys() == {"type"} for option in options):
        found = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        found = {"anyOf": options}
    return {**found, "nullable": True} if type(None) in arguments else found
