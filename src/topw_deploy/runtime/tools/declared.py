"""The tools that a caller declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.schema import function_schema


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
