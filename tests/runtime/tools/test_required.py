"""Grammars of required calls, and what llguidance accepts by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.runtime.tools.forms import TOOLS
from tests.support.toy_model import byte_tokenizer
from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import parse, required_calls


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((TOOLS, "deepseek"), "family is 'deepseek', but grammars exist for .*, gemma, pythonic, harmony only"),
        (([], "hermes"), "tools is empty"),
        ((TOOLS, "hermes", "h"), "name is 'h', but the tools are get_weather, now"),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(arguments: Any, match: str) -> None:
    tools, family, *name = arguments
    with pytest.raises(ParameterError, match=match):
        required_calls(tools, family, name=name[0] if name else None)


@pytest.mark.parametrize(("family", "tool", "property_"), [("gemma", "a b", "x"), ("pythonic", "f", "a b")])
def test_a_name_that_a_call_cannot_have_is_refused(family: str, tool: str, property_: str) -> None:
    tools = [{"name": tool, "parameters": {"type": "object", "properties": {property_: {"type": "string"}}}}]
    with pytest.raises(ParameterError, match="cannot express the name 'a b'"):
        required_calls(tools, family)


RICH = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["a", "it's\f", ""], "description": "which"},
            "many": {"type": "array", "items": {"type": "object"}},
            "some": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Some"},
            "size": {"type": ["number", "boolean"], "nullable": True},
            "free": {"type": "string", "$ref": "#/$defs/unknown"},
            "of": {"type": "object", "additionalProperties": {"const": 1.5}},
        },
        "required": ["many"],
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {"many": []},
    {"kind": "it's\f", "many": [{"on": {"on": {}, "to": 'x"y\\z\n'}}, {"to": ""}], "some": None, "size": True},
    {"kind": "", "many": [{}], "some": -12, "size": 2.5, "free": [1, {"a": None}, "é"], "of": {"p": 1.5, "q": 1.5}},
    {"many": [], "size": None, "of": {}},
]
WRONG: list[dict[str, Any]] = [
    {},
    {"kind": "a"},
    {"some": 1},
    {"kind": "b", "many": []},
    {"many": [1]},
    {"many": [], "kind": "a"},
    {"many": [], "some": 1.5},
    {"many": [], "of": {"p": 2}},
    {"many": [], "other": 1},
]


def _python(value: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            return f"[{', '.join(map(written, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{written(key)}: {written(item)}' for key, item in value.items())}}}"
        return repr(value)

    return f"[f({', '.join(f'{key}={written(item)}' for key, item in value.items())})]"


def _gemma(value: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    return f"<start_function_call>call:f{written(value)}<end_function_call>"


@pytest.mark.parametrize(("family", "write"), [("pythonic", _python), ("gemma", _gemma)])
def test_the_rules_of_literals_allow_what_the_schema_allows(
    family: str, write: Callable[[dict[str, Any]], str]
) -> None:
    tokenizer, matcher = _matcher(family, ("<escape>",), [RICH])
    for arguments in ARGUMENTS:
        text = write(arguments)
        assert matcher.consume_tokens(tokenizer.encode(text).ids), text
        assert matcher.is_accepting(), text
        matcher.reset()
        (call,) = parse(text, family, [RICH]).tool_calls
        assert json.loads(call.arguments) == arguments
    for arguments in WRONG:
        ids = tokenizer.encode(write(arguments)).ids
        assert matcher.validate_tokens(ids) < len(ids), arguments


GOOD = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "B"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\"é", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama": ['{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "B"}}'],
    "mistral": [
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "B"}}]',
    ],
    "harmony": ['<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "B"}'],
    "gemma": [
        "<start_function_call>call:get_weather{city:<escape>B\nC<escape>,days:2,where:{a:[1.5,null]}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
    ],
    "pythonic": ['[get_weather(city="B", exact=True), now()]'],
}
BAD = {
    "hermes": ['<tool_call>\n{"name": "other', '<tool_call>\n{"name": "get_weather", "arguments": {"days', "Hello"],
    "llama": ['{"name": "get_weather", "parameters": {"city": 1', '{"parameters'],
    "mistral": ["[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "na'],
    "harmony": ["<|channel|>final", "<|channel|>commentary to=functions.other"],
    "gemma": ["<start_function_call>call:get_weather{days:2", "<start_function_call>call:get_weather{city:B", "Hello"],
    "pythonic": ["[]", "[get_weather(city=1", "[get_weather(days=2", "[now(a", "now()"],
}


def _matcher(family: str, markers: Sequence[str], tools: Sequence[Any] = TOOLS) -> tuple[Any, Any]:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    special = {marker: tokenizer.token_to_id(marker) for marker in markers}
    grammar = llguidance.grammar_from("lark", required_calls(tools, family, special_tokens=special))
    return tokenizer, llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.to_str()), grammar)


HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>")
SPECIAL = {
    "hermes": (("<tool_call>", "</tool_call>"), GOOD["hermes"][1]),
    "mistral": (("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "B"}'),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>It asks\nfor <the> time.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    ),
    "gemma": (
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        '<|channel>thought\nIt <asks>.<channel|><|tool_call>call:get_weather{city:<|"|>a<b"<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
    "pythonic": (
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[get_weather(city="B", days=2), now()]<|tool_call_end|>',
    ),
}


@pytest.mark.parametrize("family", SPECIAL)
def test_llguidance_accepts_calls_with_special_tokens(family: str) -> None:
    markers, text = SPECIAL[family]
    tokenizer, matcher = _matcher(family, markers)
    ids = tokenizer.encode(text).ids
    assert matcher.consume_tokens(ids)
    assert matcher.is_accepting()
    found = parse(text, family, TOOLS)
    assert [call.name for call in found.tool_calls][-1] in ("now", "get_weather")
    assert not found.content


def test_a_name_requires_calls_of_its_tool() -> None:
    assert "get_weather" not in required_calls(TOOLS, "llama", name="now")


def test_a_marker_that_is_a_special_token_is_not_written_as_text() -> None:
    tokenizer, matcher = _matcher("hermes", ("<tool_call>", "</tool_call>"))
    plain = byte_tokenizer().encode("<tool_call>").ids
    assert matcher.validate_tokens(plain) == 0
    assert tokenizer.encode("<tool_call>").ids != plain


@pytest.mark.parametrize("family", GOOD)
def test_llguidance_accepts_calls_that_parse_and_nothing_else(family: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.grammar_from("lark", required_calls(TOOLS, family))
    assert not llguidance.LLMatcher.validate_grammar(grammar, tokenizer)

    def consumed(text: str) -> tuple[int, bool]:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        ids = list(text.encode())
        taken = matcher.validate_tokens(ids)
        return taken, taken == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    for text in GOOD[family]:
        assert consumed(text) == (len(text.encode()), True)
        found = parse(text, family, TOOLS)
        assert found.tool_calls
        assert not found.content
    for text in BAD[family]:
        assert consumed(text)[0] < len(text)
