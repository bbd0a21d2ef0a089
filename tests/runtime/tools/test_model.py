"""Calls in a model's results and streams are found, also if the tokenizer drops the markers as special tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.toy_model import BYTES, EOS, SPECIAL, Load, Toy, byte_ids, export
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.tools import FAMILIES, Content, Parsed, Reasoning, ToolCall

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|end|>", "<|call|>", "<|channel|>", "<|message|>")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}{# <tool_call> #}"
ASK = [{"role": "user", "content": "ab"}]
CALL = '{"name": "f", "arguments": {"n": 1}}'
CONFIG = {"eos_token": "</s>", "pad_token": "<pad>"}
# The markers get the token ids of bytes that UTF-8 does not use.
_FREE = [*range(0xF8, 0x100)]
IDS = dict(zip(MARKERS, byte_ids(bytes(_FREE)), strict=True))


def tokenizer_with_markers() -> Tokenizer:
    tokens = [*SPECIAL, *BYTES]
    for marker, index in IDS.items():
        tokens[index] = marker
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *MARKERS)])
    return tokenizer


def ids_of(*parts: str | int) -> list[int]:
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else [IDS[part]] if part in IDS else byte_ids(part)
    return found


def model_that_writes(
    load: Load, *parts: str | int, template: str | None = TEMPLATE, form: str = "concat"
) -> TopWModel:
    return load(
        Toy.script(ids_of(*parts), prompt_tokens=2),
        form=form,
        tokenizer=tokenizer_with_markers(),
        chat_template=template,
        tokenizer_config=CONFIG,
    )


def parts_of(parsed: Parsed) -> tuple[str, str | None, list[tuple[str, Any]]]:
    return parsed.content, parsed.reasoning, [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]


def test_a_result_whose_text_lacks_the_markers_parses_from_its_tokens(load: Load) -> None:
    model = model_that_writes(load, "<think>", "hm", "</think>", "é", 2, "<tool_call>", CALL, "</tool_call>", EOS)
    result = model.generate("ab", max_new_tokens=90)
    assert result.text == f"hmé{CALL}", "the tokenizer's special tokens are left out"
    assert model.tool_family == "hermes"
    assert parts_of(model.parse_tool_calls(result)) == ("é", "hm", [("f", {"n": 1})])
    assert parts_of(model.parse_tool_calls(result.text)) == (result.text, None, [])


def test_a_stream_parses_as_its_result_does(load: Load) -> None:
    model = model_that_writes(load, "<think>", "hm", "</think>", "é", "<tool_call>", CALL, "</tool_call>", EOS)
    parser = model.tool_parser(TOOLS)
    events: list[Any] = []
    for piece in model.stream("ab", max_new_tokens=90, skip_special_tokens=False):
        events += parser.feed(piece.text)
        result = piece.result
    events += parser.finish()
    assert [type(event) for event in events] == [Reasoning, Reasoning, Content, ToolCall]
    assert isinstance(result, GenerationResult)
    assert (
        parts_of(Parsed.of(events)) == parts_of(model.parse_tool_calls(result, TOOLS)) == ("é", "hm", [("f", {"n": 1})])
    )


def test_a_marker_that_ends_the_text_is_no_content(load: Load) -> None:
    harmony = "{# <|channel|><|message|> #}{{ messages[0].content }}"
    written = ["<|channel|>", "commentary to=functions.f", "<|message|>", '{"n": 1}', "<|call|>"]
    model = model_that_writes(load, *written, template=harmony)
    result = model.generate("ab", max_new_tokens=90, stop_token_ids=[IDS["<|call|>"]])
    assert result.stop == IDS["<|call|>"]
    assert parts_of(model.parse_tool_calls(result)) == ("", None, [("f", {"n": 1})])


def test_text_after_a_stop_string_is_left_out(load: Load) -> None:
    model = model_that_writes(load, "a!", "<tool_call>", CALL, "</tool_call>", "b!c")
    result = model.generate("ab", max_new_tokens=90, stop_strings="!", min_new_tokens=10)
    assert parts_of(model.parse_tool_calls(result)) == ("a!b", None, [("f", {"n": 1})])


def test_without_special_markers_the_text_is_parsed(load: Load) -> None:
    toy = Toy.script([*byte_ids(f"a\n<tool_call>{CALL}</tool_call>"), EOS], prompt_tokens=2)
    model = load(toy, chat_template=TEMPLATE)
    result = model.generate("ab", max_new_tokens=90)
    assert parts_of(model.parse_tool_calls(result)) == ("a", None, [("f", {"n": 1})])


def test_an_unknown_family_must_be_named(load: Load) -> None:
    toy = Toy.script([*byte_ids('{"name": "f", "parameters": {}}'), EOS], prompt_tokens=2)
    model = load(toy, chat_template="{{ messages[0].content }}")
    result = model.generate("ab", max_new_tokens=40)
    assert model.tool_family is None
    with pytest.raises(ParameterError, match="has tool calls of no known family; give family, one of hermes, llama"):
        model.parse_tool_calls(result)
    assert parts_of(model.parse_tool_calls(result, family="llama")) == ("", None, [("f", {})])


def test_the_tokenizers_tokens_name_the_family_if_the_template_does_not(load: Load) -> None:
    assert model_that_writes(load, "a", EOS, template="{{ messages[0].content }}").tool_family == "harmony"
    assert model_that_writes(load, "a", EOS, template=None).tool_family == "harmony"


def weather(city: str, days: int = 1) -> str:
    """Look up the weather.

    Args:
        city: Its name.
        days: How many.
    """
    return f"{city}: {days}"


def test_functions_are_tools_of_a_chat(load: Load) -> None:
    model = model_that_writes(load, "yes", EOS)
    assert model.apply_chat_template(ASK, tools=[weather]) == "weatherab"
    answer = model.chat(ASK, template_variables={"tools": [weather]}, max_new_tokens=3, seed=1)
    assert answer.prompt_tokens == len("weatherab")
    with pytest.raises(ParameterError, match="<lambda> has no JSON schema: it has no docstring"):
        model.apply_chat_template(ASK, tools=[lambda x: x])
    with pytest.raises(ParameterError, match="tools is a dict"):
        model.apply_chat_template(ASK, tools=TOOLS[0])
    with pytest.raises(PromptError, match="messages may hold"):
        model.apply_chat_template(ASK, tools=[{"function": object()}])


def test_a_template_for_tools_is_used_with_tools(load: Load) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}{{ messages[0].content }}{# [TOOL_CALLS] #}"},
    ]
    model = load(Toy.random(0), tokenizer_config={"chat_template": named})
    assert model.apply_chat_template(ASK) == "Dab"
    assert model.apply_chat_template(ASK, tools=[weather]) == "T1ab"
    assert model.tool_family == "mistral"
    alone = load(Toy.random(0), tokenizer_config={"chat_template": named[1:]})
    assert alone.apply_chat_template(ASK, tools=[weather]) == "T1ab"


PAGE = Path(__file__).parents[3] / "docs" / "guide" / "tools.md"
WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
# Prompts of one token, and of 80 with the tool's result.
BY_TURN = "{% if messages | length == 1 %}a{% else %}{{ 'b' * 80 }}{% endif %}{# <tool_call> #}"


def test_the_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Toy.script(ids_of("<tool_call>", WEATHER_CALL, "</tool_call>", EOS), prompt_tokens=1)
    for step, token in enumerate(ids_of("Yes.", EOS)):
        toy.place[79 + step, token] = 4000
    export(tmp_path / "out", toy, tokenizer=tokenizer_with_markers(), chat_template=BY_TURN, tokenizer_config=CONFIG)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out.splitlines() == [
        "Yes.", *(f"Content(text={letter!r})" for letter in "Yes."), "[]",
    ]  # fmt: skip
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert names["messages"][2]["content"] == "Sunny in Oslo."


def test_the_page_names_every_family() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(FAMILIES)
