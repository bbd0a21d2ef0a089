"""An assistant's turn that a template renders parses to the same turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.tools.forms import FORMS, TOKENS, TOOLS, USER, Form
from tests.support.samples import examples
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.tools import Parsed, detect, parse

forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
WEATHER = {"city": 'Zürich "</tool_call>" {[\n', "days": 3, "exact": True, "where": {"lat": -47.5, "of": [1, "é", []]}}
Argument = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aé😀 {}[]()'\":,;=\\\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)


def tool_call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {
        "id": f"a1B2c3D4{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def render_and_parse(form: Form, message: dict[str, Any]) -> tuple[str, Parsed]:
    """Returns (the output of a model that answers with `message`, the parsed output)."""
    template = ChatTemplate(form.source, TOKENS)
    prompt = template.render([USER], tools=TOOLS)
    whole = template.render([USER, message], tools=TOOLS, add_generation_prompt=False)
    if not whole.startswith(prompt):  # Mistral shows tools before the last message only
        prompt = template.render([USER])
    assert whole.startswith(prompt)
    end = "<|end|>" if form.family == "harmony" and not message.get("tool_calls") else form.end
    assert whole.endswith(end)
    output = whole[len(prompt) : -len(end)]
    return output, parse(output, detect(form.source) or "", TOOLS, prompt)


@forms
def test_the_family_is_detected_from_the_template(form: Form) -> None:
    assert detect(form.source) == form.family


@forms
def test_calls_parse_to_what_was_rendered_and_render_again(form: Form) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "I look." if form.speaks and not form.reasons else ""}
    if form.reasons:
        message["reasoning_content"] = "A tool\nis needed."
    message["tool_calls"] = [
        tool_call("get_weather", WEATHER),
        tool_call("now", {}, 1),
        tool_call("get_weather", {"city": "B"}, 2),
    ]
    message["tool_calls"] = message["tool_calls"][: form.most]
    output, parsed = render_and_parse(form, message)
    found = [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]
    assert found == [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert parsed.content == message["content"]
    assert parsed.reasoning == message.get("reasoning_content")
    if form.family == "mistral":
        assert [c.id for c in parsed.tool_calls] == [c["id"] for c in message["tool_calls"]]
    assert render_and_parse(form, parsed.as_message())[0] == output


@forms
def test_a_chat_continues_with_the_result_of_the_tool(form: Form) -> None:
    _, parsed = render_and_parse(form, {"role": "assistant", "content": "", "tool_calls": [tool_call("now", {})]})
    result = parsed.tool_calls[0].reply("it is noon")
    rendered = ChatTemplate(form.source, TOKENS).render([USER, parsed.as_message(), result], tools=TOOLS)
    assert "it is noon" in rendered.rpartition("now")[2]


@forms
def test_an_answer_without_calls_is_its_own_text(form: Form) -> None:
    _, parsed = render_and_parse(form, {"role": "assistant", "content": "It is {warm} [1], a < b."})
    assert parsed == Parsed("It is {warm} [1], a < b.", None, ())


@forms
@settings(max_examples=examples(25))
@given(
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "city": st.text("aé😀{}<>'\"\\\n"),
            "where": st.dictionaries(st.text("abc", min_size=1), Argument, max_size=3),
        },
    )
)
def test_any_arguments_parse_to_the_same_arguments(form: Form, arguments: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call("get_weather", arguments)]}
    _, parsed = render_and_parse(form, message)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("get_weather", arguments)]
