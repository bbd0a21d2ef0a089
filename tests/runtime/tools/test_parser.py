"""Outputs parse the same however they are split, no text is lost, and values are read as json and Python do."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import FAMILIES, Parsed, ToolCallParser, parse
from topw_deploy.runtime.tools.literals import JSON, PYTHON, Mismatch, parse_value
from topw_deploy.runtime.tools.parser import typed_value

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "any": {"type": ["string", "integer"]},
                },
            },
        },
    },
    {"name": "g", "parameters": {"type": "object", "properties": {}}},
]
_DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"

# family, output -> content, reasoning, calls
CASES: list[tuple[str, str, str, str | None, list[tuple[str, Any]]]] = [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', "Hm.", None, [("f", {"n": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", None, [("f", {"n": 1})]),
    ("hermes", '<tool_call>{"arguments": null, "name": "g"}</tool_call> b', " b", None, [("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>', "", None,
     [("f", {"s": "</tool_call>"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb\\u00e9"}}</tool_call>', "", None,
     [("f", {"s": "a\nbé"})]),
    ("hermes", '<tool_call>{"name": "g"}\n<tool_call>{"name": "f"}', "", None, [("g", {}), ("f", {})]),
    ("hermes", "<think>\na <tool_call>\n</think>\n\nb", "b", "a <tool_call>", []),
    ("hermes", "a <think>b</think>", "a <think>b</think>", None, []),
    ("hermes", "<think>cut off", "", "cut off", []),
    ("hermes", "<tool_call>\n<function=f>\n<parameter=s>\n1\n\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
     "<parameter=maybe>\nNone\n</parameter>\n<parameter=any>\n3\n</parameter>\n</function>\n</tool_call>",
     "", None, [("f", {"s": "1\n", "n": 2, "maybe": None, "any": "3"})]),
    ("hermes", "<function=f>\n<parameter=n>\nx\n</parameter>\n</function>\n</tool_call>", "", None,
     [("f", {"n": "x"})]),
    ("hermes", "<tool_call><function=f><parameter=s>a</parameter>b</parameter></function></tool_call>", "", None,
     [("f", {"s": "a</parameter>b"})]),
    ("llama", '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}', "", None,
     [("f", {"n": 1}), ("g", {})]),
    ("llama", '<|python_tag|>{"type": "function", "name": "other", "parameters": {}}', "", None, [("other", {})]),
    ("llama", '<|python_tag|>brave_search.call(query="a \\"b\\"")', "", None, [("brave_search", {"query": 'a "b"'})]),
    ("llama", '<function=f>{"n": 1}</function>', "", None, [("f", {"n": 1})]),
    ("llama", '{"name": "f", "parameters": {}} ; done', " ; done", None, [("f", {})]),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', None, []),
    ("llama", '{"name": "f"}', '{"name": "f"}', None, []),
    ("llama", 'Call {"name": "f", "parameters": {}}', 'Call {"name": "f", "parameters": {}}', None, []),
    ("llama", '<|python_tag|>print(1)', "<|python_tag|>print(1)", None, []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "]"}}, {"name": "g", "arguments": {}}]', "", None,
     [("f", {"s": "]"}), ("g", {})]),
    ("mistral", 'a[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "a", None,
     [("f", {"n": 1}), ("g", {})]),
    ("mistral", "[THINK]a[/THINK]b", "b", "a", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na', ', {"na', None, [("f", {})]),
    ("gemma", "<start_function_call>call:f{n:1,s:<escape>{a},:<escape>}<end_function_call>", "", None,
     [("f", {"n": 1, "s": "{a},:"})]),
    ("gemma", '<|channel>thought\nx<channel|>a<|tool_call>call:f{s:<|"|>"\\<|"|>,n:[-1.5,{k:None}]}<tool_call|>', "a",
     "x", [("f", {"s": '"\\', "n": [-1.5, {"k": None}]})]),
    ("gemma", "<|tool_call>call:g{}<tool_call|><|tool_call>call:g{}", "", None, [("g", {}), ("g", {})]),
    ("pythonic", "```tool_code\nprint(f(s='a\\n', n=1))\ng()\n```\nb", "\nb", None,
     [("f", {"s": "a\n", "n": 1}), ("g", {})]),
    ("pythonic", '[f("x)", n=1), g()]', "", None, [("f", {"s": "x)", "n": 1}), ("g", {})]),
    ("pythonic", "[unknown()]", "[unknown()]", None, []),
    ("pythonic", "[1] is cited.", "[1] is cited.", None, []),
    ("pythonic", "```python\nf()\n```", "```python\nf()\n```", None, []),
    ("pythonic", '<|tool_call_start|>[other(x=[1, {"a": True}])]<|tool_call_end|>', "", None,
     [("other", {"x": [1, {"a": True}]})]),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"n\": 1}<|call|>",
     "", "a\nb", [("f", {"n": 1})]),
    ("harmony", ' to=functions.g<|channel|>commentary json<|message|>{}', "", None, [("g", {})]),
    ("harmony", "<|channel|>commentary<|message|>plan<|end|><|start|>assistant<|channel|>commentary to=browser.open"
     '<|constrain|>json<|message|>{"id": 1}', "plan", None, [("browser.open", {"id": 1})]),
    ("harmony", "<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", None, []),
    ("harmony", "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "b", "a", []),
    ("deepseek", f'<think>a</think>b{_DS}function<｜tool▁sep｜>f\n```json\n{{"n": 1}}\n```<｜tool▁call▁end｜>\n'
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "b", "a",
     [("f", {"n": 1}), ("g", {})]),
    ("deepseek", f"{_DS}g<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", None, [("g", {})]),
]  # fmt: skip
IDS = [f"{family}-{index}" for index, (family, *_) in enumerate(CASES)]

# Malformed calls, whose whole text is content.
MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "cut'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": ' + "[" * 2000 + "]" * 2000 + "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n"),
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_"),
    ("llama", '{"name": "f", "parameters": {"n": 1}'),
    ("llama", "<|python_tag|>import os"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("gemma", "<|tool_call>call:f{n:}<tool_call|>"),
    ("gemma", "<start_function_call>f{}"),
    ("pythonic", "```tool_code\nf(x)\n```"),
    ("pythonic", "[f(n=1), g("),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": <|call|>'),
    ("harmony", "<|channel|>commentary to=python<|message|>print(1)"),
    ("harmony", "<|start|>assistant"),
    ("harmony", "to be or not"),
    ("deepseek", f"{_DS}g<｜tool▁sep｜>{{<｜tool▁call▁end｜>"),
]


def parts_of(parsed: Parsed) -> tuple[str, str | None, list[tuple[str, Any]]]:
    return parsed.content, parsed.reasoning, [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]


def in_pieces(family: str, pieces: list[str], **options: Any) -> Parsed:
    parser = ToolCallParser(family, TOOLS, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return Parsed.of([*events, *parser.finish()])


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "calls"), CASES, ids=IDS)
def test_an_output_gives_its_content_reasoning_and_calls(
    family: str, text: str, content: str, reasoning: str | None, calls: Any
) -> None:
    assert parts_of(parse(text, family, TOOLS)) == (content, reasoning, calls)
    assert parts_of(in_pieces(family, list(text))) == (content, reasoning, calls), "character by character"


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_malformed_call_stays_in_the_content(family: str, text: str) -> None:
    assert parts_of(parse(f"{text}", family, TOOLS)) == (text, None, [])
    assert parts_of(in_pieces(family, list(text))) == (text, None, [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "cut <tool_call>{"name": "g", "arguments": {}}</tool_call>'
    found = parse(text, "hermes", TOOLS)
    assert [call.name for call in found.tool_calls] == ["g"]
    assert found.content == '<tool_call>{"name": "f", "arguments": {"s": "cut'


FRAGMENTS = sorted(
    {marker for family in FAMILIES.values() for marker in (*family.markers, *family.openers)}
    | {text for _, text, *_ in CASES} | {text for _, text in MALFORMED if len(text) < 200}
    | set("{}[]()<>\"'\\,:;= \n") | {"f", "g", "é", "😀", '{"name": "f", "arguments": {}}', "call:", "to="}
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_split_gives_the_same_result(family: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(in_pieces(family, pieces)) == parts_of(parse(text, family, TOOLS))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(150))
@given(text=st.text(st.sampled_from('ab é\n{[(<|`"')))
def test_text_without_markers_is_all_content(family: str, text: str) -> None:
    assert parts_of(parse(text, family, TOOLS)) == (text, None, [])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])  # its headers are no content
@settings(max_examples=examples(150))
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=8))
def test_an_output_without_calls_is_all_content(family: str, parts: list[str]) -> None:
    text = "".join(parts)
    thinking = FAMILIES[family].thinking
    assume(not (thinking and thinking[0] in text))
    found = parse(text, family, TOOLS)
    assume(not found.tool_calls)
    assert found == Parsed(text, None, ())


def test_a_prompt_that_opens_the_reasoning_is_continued() -> None:
    text = "hm</think>\n\nYes."
    assert parts_of(parse(text, "hermes", prompt="<|im_start|>assistant\n<think>\n")) == ("Yes.", "hm", [])
    assert parts_of(parse(text, "hermes", prompt="<think>\n\n</think>\n\n")) == (text, None, [])
    assert parts_of(in_pieces("gemma", list("\nhm<channel|>a"), prompt="<|channel>thought\n")) == ("a", "hm", [])


def test_ids_are_unique_and_of_the_familys_form() -> None:
    hermes = parse('<tool_call>{"name": "g"}</tool_call>' * 3, "hermes").tool_calls
    assert len({call.id for call in hermes}) == 3
    assert all(call.id.startswith("call_") for call in hermes)
    own, new = parse('[TOOL_CALLS][{"name": "g", "id": "abcdefghi"}, {"name": "g"}]', "mistral").tool_calls
    assert own.id == "abcdefghi"
    assert len(new.id) == 9
    assert new.id.isalnum()


def test_arguments_are_json_whatever_the_model_wrote() -> None:
    (call,) = parse(
        '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d\\ude00 \\ud800"}}</tool_call>', "hermes"
    ).tool_calls
    assert json.loads(call.arguments) == {"s": "😀 \ud800"}
    assert call.arguments.encode()


@pytest.mark.slow
def test_a_model_that_repeats_itself_is_parsed_in_linear_time() -> None:
    for text in ('<tool_call>{"a": "' * 3000, '<tool_call>{"name": "f", "arguments": {"s": "' + "x\\n" * 30_000):
        assert in_pieces("hermes", [text[i : i + 4] for i in range(0, len(text), 4)]).content == text  # else minutes


def test_wrong_arguments_and_text_after_the_end_are_refused() -> None:
    with pytest.raises(ParameterError, match="family is 'gpt', but must be one of hermes, llama"):
        ToolCallParser("gpt")
    with pytest.raises(ParameterError, match=r"tools\[1\] must be a function"):
        ToolCallParser("hermes", [TOOLS[0], {"type": "function"}])
    with pytest.raises(ParameterError, match="tools is a dict"):
        ToolCallParser("hermes", TOOLS[0])  # type: ignore[arg-type]
    parser = ToolCallParser("hermes")
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(ParameterError, match="the parser was finished"):
        parser.feed("x")


Value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=Value, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_json_is_read_as_json_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    assert parse_value(json.dumps(value, ensure_ascii=ascii_only, indent=indent), JSON) == value


@given(value=Value)
def test_a_literal_is_read_as_python_reads_it(value: Any) -> None:
    assert parse_value(repr(value), PYTHON) == value


@settings(max_examples=examples(300))
@given(text=st.text(st.sampled_from('{}[]",:\\ntrue0123.eE+-u\n ')))
def test_a_text_is_refused_unless_it_is_json(text: str) -> None:
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        with pytest.raises(Mismatch):
            parse_value(text, JSON)
    else:
        assert parse_value(text, JSON) == expected


@pytest.mark.parametrize("text", ["'a\\'\\x41\\u00e9\\U0001f600\\n'", '"""a\n"b" """', "''", '"a\\\nb"', "'\\\\'"])
def test_escapes_are_read_as_python_reads_them(text: str) -> None:
    assert parse_value(text, PYTHON) == ast.literal_eval(text)


def test_an_unknown_escape_is_not_changed() -> None:
    assert parse_value("'\\d+'", PYTHON) == r"\d+"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "integer"}, 1),
        ("1", {"type": "string"}, "1"),
        ("1", None, "1"),
        ("True", {"type": "boolean"}, True),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
        ("many", {"type": "integer"}, "many"),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("3", {"anyOf": 3}, "3"),
        ("3", {"type": 3}, "3"),
    ],
)
def test_the_schema_tells_numbers_from_text(text: str, schema: Any, value: Any) -> None:
    assert typed_value(text, schema) == value
