"""Grammars of required calls, as text and, where llguidance is installed, by what they accept."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from tests.runtime.tools.forms import TOOLS
from tests.support.toy_model import byte_tokenizer
from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import parse, required_calls

HERMES = """\
start: call ("\\n" call)*
call: "<tool_call>" "\\n" (tool_0 | tool_1) "\\n" "</tool_call>"
tool_0: "{\\"name\\": \\"f\\", \\"arguments\\": " arguments_0 "}"
arguments_0: %json {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
tool_1: "{\\"name\\": \\"g\\", \\"arguments\\": " arguments_1 "}"
arguments_1: %json {"type": "object", "properties": {}}
"""
SCHEMA = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
TWO = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"name": "g"}]


def test_the_grammar_of_hermes() -> None:
    assert required_calls(TWO, "hermes") == HERMES


def test_the_grammar_of_llama_has_no_markers() -> None:
    lines = required_calls(TWO, "llama", name="g").splitlines()
    assert lines[:3] == [
        'start: call ("; " call)*',
        "call: (tool_0)",
        'tool_0: "{\\"name\\": \\"g\\", \\"parameters\\": " arguments_0 "}"',
    ]


def test_one_call_of_one_tool_with_special_tokens() -> None:
    found = required_calls(TWO, "hermes", name="g", parallel=False, special_tokens=["<tool_call>", "</tool_call>"])
    assert found.splitlines()[:2] == ["start: call", 'call: <tool_call> "\\n" (tool_0) "\\n" </tool_call>']


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((TWO, "gemma"), "family is 'gemma', but grammars exist for hermes and llama only"),
        (([], "hermes"), "tools is empty"),
        ((TWO, "hermes", "h"), "name is 'h', but the tools are f, g"),
    ],
)
def test_what_cannot_be_required(arguments: Any, match: str) -> None:
    tools, family, *name = arguments
    with pytest.raises(ParameterError, match=match):
        required_calls(tools, family, name=name[0] if name else None)


GOOD = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "B"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\"é", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama": ['{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "B"}}'],
}
BAD = {
    "hermes": ['<tool_call>\n{"name": "other', '<tool_call>\n{"name": "get_weather", "arguments": {"days', "Hello"],
    "llama": ['{"name": "get_weather", "parameters": {"city": 1', '{"parameters'],
}


def test_llguidance_takes_special_tokens_where_the_grammar_names_them() -> None:
    llguidance = pytest.importorskip("llguidance")
    markers = ("<tool_call>", "</tool_call>")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    ids = tokenizer.encode(GOOD["hermes"][1]).ids
    for special, taken in (((), 0), (markers, len(ids))):
        grammar = llguidance.grammar_from("lark", required_calls(TOOLS, "hermes", special_tokens=special))
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.to_str()), grammar)
        assert matcher.validate_tokens(ids) == taken


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
