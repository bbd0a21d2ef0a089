"""Grammars that let a model write nothing but tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.declared import parameter_schemas

# Family -> (marker, text before the object, key of the arguments, text after it, marker, text between calls).
_FORMS = {
    "hermes": ("<tool_call>", "\n", "arguments", "\n", "</tool_call>", "\n"),
    "llama": ("", "", "parameters", "", "", "; "),
}


def required_calls(
    tools: Sequence[Any],
    family: str,
    *,
    name: str | None = None,
    parallel: bool = True,
    special_tokens: Collection[str] = (),
) -> str:
    """A Lark grammar for llguidance: one or more calls of `tools`, as `tool_choice="required"` asks for.

    family: "hermes" or "llama".
    name: the only tool that may be called.
    parallel: whether there may be several calls.
    special_tokens: texts of the tokenizer's special tokens, for which llguidance has another notation.

    Raises ParameterError for another family, an unknown name, invalid tools or none.
    """
    if family not in _FORMS:
        raise ParameterError(f"family is {family!r}, but grammars exist for {' and '.join(_FORMS)} only.", "family")
    schemas = parameter_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ParameterError(f"name is {name!r}, but the tools are {', '.join(schemas) or 'none'}.", "name")
        schemas = {name: schemas[name]}
    if not schemas:
        raise ParameterError("tools is empty, so no call can be required; give at least one tool.", "tools")
    opening, before, key, after, closing, between = _FORMS[family]

    def marker(text: str) -> str:
        return text if text in special_tokens else _quoted(text) if text else ""

    choices = " | ".join(f"tool_{index}" for index in range(len(schemas)))
    call = [marker(opening), _quoted(before), f"({choices})", _quoted(after), marker(closing)]
    lines = [f"start: call ({_quoted(between)} call)*" if parallel else "start: call"]
    lines.append("call: " + " ".join(part for part in call if part not in ("", '""')))
    for index, (tool, schema) in enumerate(schemas.items()):
        head = f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "{key}": '
        lines.append(f"tool_{index}: {_quoted(head)} arguments_{index} {_quoted('}')}")
        # A rule of its own, so that references within the schema keep their root.
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
