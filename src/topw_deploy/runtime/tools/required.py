"""Grammars that allow only tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.cursor import pattern_of
from topw_deploy.runtime.tools.families import get_family
from topw_deploy.runtime.tools.literals import GEMMA, GEMMA_4, PYTHON, ArgumentStyle, LiteralRules, lark_string
from topw_deploy.runtime.tools.schema import parameter_schemas


@dataclass(frozen=True, slots=True)
class _CallFormat:
    """How a family writes the calls of an answer.

    call: text of one call. `{string}` stands for the tool's name as JSON, `{name}` for the name itself, and
        `{arguments}` for the arguments.
    before, between, after: texts before the first call, between calls, and after the last call.
    allows_several: whether an answer may have several calls.
    reasoning: the texts around reasoning before the calls. Reasoning is allowed only if the markers in these texts are
        special tokens; otherwise a grammar cannot detect its end.
    style: how arguments are written; None for JSON.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    allows_several: bool = True
    reasoning: tuple[str, str] | None = None
    style: ArgumentStyle | None = None


_OBJECT = '{{"name": {string}, "arguments": {arguments}}}'
_PYTHON_CALL = "{name}({arguments})"
_FORMATS = {
    "hermes": _CallFormat(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),
    "llama": _CallFormat('{{"name": {string}, "parameters": {arguments}}}', between="; "),
    "mistral": _CallFormat(_OBJECT, before="[TOOL_CALLS][", between=", ", after="]"),
    # The end, <|call|>, is one of gpt-oss's ends of sequence.
    "harmony": _CallFormat(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        allows_several=False,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "gemma": _CallFormat("<start_function_call>call:{name}{arguments}<end_function_call>", style=GEMMA),
    "pythonic": _CallFormat(_PYTHON_CALL, before="[", between=", ", after="]", style=PYTHON),
}
# family -> (special token, the format that replaces the one above if the tokenizer has this token)
_FORMATS_BY_TOKEN = {
    "mistral": ("[ARGS]", _CallFormat("[TOOL_CALLS]{name}[ARGS]{arguments}")),
    "gemma": (
        "<|tool_call>",
        _CallFormat(
            "<|tool_call>call:{name}{arguments}<tool_call|>",
            reasoning=("<|channel>thought\n", "<channel|>"),
            style=GEMMA_4,
        ),
    ),
    "pythonic": (
        "<|tool_call_start|>",
        _CallFormat(
            _PYTHON_CALL, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>", style=PYTHON
        ),
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
    if family not in _FORMATS:
        raise ParameterError(f"family is {family!r}, but grammars exist for {', '.join(_FORMATS)} only.", "family")
    schemas = parameter_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ParameterError(f"name is {name!r}, but the tools are {', '.join(schemas) or 'none'}.", "name")
        schemas = {name: schemas[name]}
    if not schemas:
        raise ParameterError("tools is empty, so no call can be required; give at least one tool.", "tools")
    special = special_tokens or {}
    form, (token, newer) = _FORMATS[family], _FORMATS_BY_TOKEN.get(family, ("", None))
    if newer is not None and token in special:
        form = newer
    return "\n".join(_grammar_lines(form, schemas, parallel, special, pattern_of(get_family(family).markers))) + "\n"


def _grammar_lines(
    form: _CallFormat, schemas: Mapping[str, Any], parallel: bool, special: Mapping[str, int], markers: re.Pattern[str]
) -> list[str]:
    pattern = re.compile(f"({markers.pattern})")

    def lark_terms(text: str) -> str:
        parts = [part for part in pattern.split(text) if part]
        return "".join(f" <[{special[part]}]>" if part in special else f" {lark_string(part)}" for part in parts)

    known = special.keys() >= set(pattern.findall("".join(form.reasoning or ())))
    reasoning = form.reasoning if known else None
    start = "start:" + (" reasoning?" if reasoning else "") + lark_terms(form.before) + " call"
    if parallel and form.allows_several:
        start += f" ({lark_terms(form.between)} call)*".replace("( ", "(")
    lines = [start + lark_terms(form.after), "call: " + " | ".join(f"tool_{index}" for index in range(len(schemas)))]
    style = form.style
    literals = None if style is None else LiteralRules(style, lark_terms, special=style.quote in special)
    for index, (tool, schema) in enumerate(schemas.items()):
        text = form.call.format(string=json.dumps(tool, ensure_ascii=False), name=tool, arguments="\0")
        head, _, tail = text.partition("\0")
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
