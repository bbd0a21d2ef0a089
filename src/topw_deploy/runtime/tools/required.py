"""Grammars that allow only tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.cursor import any_of
from topw_deploy.runtime.tools.families import family_named
from topw_deploy.runtime.tools.literals import GEMMA, GEMMA_4, PYTHON, Literals, Style
from topw_deploy.runtime.tools.schema import parameter_schemas


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes calls: `before`, `call`s with `between` them, `after`.

    call: with `{string}` or `{name}` for the tool's name as JSON or as it is, and `{arguments}`.
    several: whether an answer may have several calls.
    reasoning: texts around reasoning, which may precede the calls if their markers are special tokens: otherwise a
        grammar cannot detect where it ends.
    style: how arguments are written; None for JSON.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    several: bool = True
    reasoning: tuple[str, str] | None = None
    style: Style | None = None


_OBJECT = '{{"name": {string}, "arguments": {arguments}}}'
_PYTHON_CALL = "{name}({arguments})"
_FORMS = {
    "hermes": _Form(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),
    "llama": _Form('{{"name": {string}, "parameters": {arguments}}}', between="; "),
    "mistral": _Form(_OBJECT, before="[TOOL_CALLS][", between=", ", after="]"),
    # The end, <|call|>, is one of gpt-oss's ends of sequence.
    "harmony": _Form(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        several=False,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "gemma": _Form("<start_function_call>call:{name}{arguments}<end_function_call>", style=GEMMA),
    "pythonic": _Form(_PYTHON_CALL, before="[", between=", ", after="]", style=PYTHON),
}
# Forms of tokenizers that have the special token.
_NEWER = {
    "mistral": ("[ARGS]", _Form("[TOOL_CALLS]{name}[ARGS]{arguments}")),
    "gemma": (
        "<|tool_call>",
        _Form(
            "<|tool_call>call:{name}{arguments}<tool_call|>",
            reasoning=("<|channel>thought\n", "<channel|>"),
            style=GEMMA_4,
        ),
    ),
    "pythonic": (
        "<|tool_call_start|>",
        _Form(_PYTHON_CALL, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>", style=PYTHON),
    ),
}


def required_calls(
    tools: Sequence[Any],
    family: str,
    *,
    name: str | None = None,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """A Lark grammar for llguidance: one or more calls of `tools`, as `tool_choice="required"` asks for.

    family: a name of `FAMILIES`, except "deepseek", which has two forms with the same tokens. Newer forms are chosen by
        the special tokens: Mistral's `[ARGS]`, Gemma 4's, LFM2's. "harmony" allows one call. Reasoning may precede the
        calls of "harmony" and Gemma 4.
    name: the only tool that may be called.
    parallel: whether there may be several calls.
    special_tokens: ids of the tokenizer's special tokens by their texts, for which llguidance has another notation.

    Raises ParameterError for another family, an unknown name, invalid tools or none, and, where arguments are not JSON
    ("gemma", "pythonic"), for schemas with keywords other than types, properties, lists of values and references.
    """
    if family not in _FORMS:
        raise ParameterError(f"family is {family!r}, but grammars exist for {', '.join(_FORMS)} only.", "family")
    schemas = parameter_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ParameterError(f"name is {name!r}, but the tools are {', '.join(schemas) or 'none'}.", "name")
        schemas = {name: schemas[name]}
    if not schemas:
        raise ParameterError("tools is empty, so no call can be required; give at least one tool.", "tools")
    special = special_tokens or {}
    form, (token, newer) = _FORMS[family], _NEWER.get(family, ("", None))
    if newer is not None and token in special:
        form = newer
    return "\n".join(_lines(form, schemas, parallel, special, any_of(family_named(family).markers))) + "\n"


def _lines(
    form: _Form, schemas: Mapping[str, Any], parallel: bool, special: Mapping[str, int], markers: re.Pattern[str]
) -> list[str]:
    pattern = re.compile(f"({markers.pattern})")

    def terms(text: str) -> str:
        parts = [part for part in pattern.split(text) if part]
        return "".join(f" <[{special[part]}]>" if part in special else f" {_quoted(part)}" for part in parts)

    known = special.keys() >= set(pattern.findall("".join(form.reasoning or ())))
    reasoning = form.reasoning if known else None
    start = "start:" + (" reasoning?" if reasoning else "") + terms(form.before) + " call"
    if parallel and form.several:
        start += f" ({terms(form.between)} call)*".replace("( ", "(")
    lines = [start + terms(form.after), "call: " + " | ".join(f"tool_{index}" for index in range(len(schemas)))]
    style = form.style
    literals = None if style is None else Literals(style, terms, special=style.quote in special)
    for index, (tool, schema) in enumerate(schemas.items()):
        text = form.call.format(string=json.dumps(tool, ensure_ascii=False), name=tool, arguments="\0")
        head, _, tail = text.partition("\0")
        lines.append(f"tool_{index}:{terms(head)} arguments_{index}{terms(tail)}")
        if literals is not None:
            literals.add(tool, f"arguments_{index}", schema)
        else:
            # A rule of its own, so that references within the schema keep their root.
            lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    if literals is not None:
        lines += literals.lines
    if reasoning:
        opening, closing = map(terms, reasoning)
        lines += [f"reasoning:{opening} REASONING{closing}", r"REASONING: /(.|\n)*/"]
    return lines


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
