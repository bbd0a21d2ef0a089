"""Templates and calls: the family is detected, a rendered turn parses to itself, and calls take the family's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.tools.forms import FORMS, TOKENS, TOOLS, USER, Form
from tests.support.samples import examples
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.tools import FAMILIES, Parsed, detect, parse

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


Where = st.dictionaries(st.text("abc", min_size=1), Argument, max_size=3)


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
    calls = [("get_weather", WEATHER), ("now", {}), ("get_weather", {"city": "B"})]
    message["tool_calls"] = [tool_call(*call, number) for number, call in enumerate(calls)][: form.most]
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
@given(arguments=st.fixed_dictionaries({}, optional={"city": st.text("aé😀{}<>'\"\\\n"), "where": Where}))
def test_any_arguments_parse_to_the_same_arguments(form: Form, arguments: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call("get_weather", arguments)]}
    _, parsed = render_and_parse(form, message)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("get_weather", arguments)]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>{{ name }}\n<arg_key>", None),
        ('<|start_header_id|> Environment: ipython {"name": n, "parameters": p}', "llama"),
        ("<|start_header_id|>{{ role }}", None),
        ("<start_of_turn>model\n", None),
        ("<|im_start|>{{ tools }}", None),
        (None, None),
    ],
)
def test_the_template_names_the_family(template: str | None, family: str | None) -> None:
    assert detect(template) == family


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        (["[TOOL_CALLS]", "[INST]"], "mistral"),
        (["<|python_tag|>"], "llama"),
        (["<tool_call>", "</tool_call>"], "hermes"),
        (["<tool_call>", "<arg_key>"], None),
        (["<s>"], None),
    ],
)
def test_the_tokens_name_the_family_if_the_template_does_not(tokens: list[str], family: str | None) -> None:
    assert detect(None, tokens) == detect("{{ messages }}", tokens) == family
    assert detect("<start_function_call>", tokens) == "gemma", "the template comes first"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_opener_begins_another(family: object) -> None:
    openers = list(family.openers)  # type: ignore[attr-defined]
    assert not [(a, b) for a in openers for b in openers if a != b and b.startswith(a)]


PRINT = "{{ messages[0].tool_calls[0].function.arguments is string }}{{ messages[0].tool_calls[0].function.arguments }}"
HERMES, DEEPSEEK = "{# <tool_call> #}", "{# <｜tool▁calls▁begin｜><｜tool▁sep｜> #}"


def render(mark: str, arguments: Any) -> str:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return ChatTemplate(mark + PRINT, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_arguments_become_an_object_or_text() -> None:
    assert render(HERMES, '{"a": 1}') == render(HERMES, {"a": 1}) == "False{'a': 1}"
    assert render(DEEPSEEK, '{"a":1}') == 'True{"a":1}'
    assert render(DEEPSEEK, {"a": "é"}) == 'True{"a": "é"}'


def test_the_source_of_a_deepseek_template_decides_the_form_of_calls() -> None:
    assert render(DEEPSEEK + "{# ['arguments'] | tojson #}", '{"a":1}') == "False{'a': 1}"
    call = {"function": {"name": "f", "arguments": {}}}
    for mark, content in ((DEEPSEEK, "[]"), (DEEPSEEK + "{# message['content'] is none #}", "[None]")):
        template = ChatTemplate(mark + "[{{ messages[0].content }}]", {})
        assert template.render([{"role": "assistant", "content": "", "tool_calls": [call]}]) == content


def test_unknown_templates_and_other_values_change_nothing() -> None:
    assert render("", '{"a": 1}') == 'True{"a": 1}'
    assert render(HERMES, "no json") == "Trueno json"
    assert render(HERMES, None) == "FalseNone"


def test_calls_without_a_function_field_work_too() -> None:
    source = HERMES + "{{ messages[0].tool_calls[0].arguments.a }}"
    call = {"name": "f", "arguments": '{"a": 1}'}
    assert ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": [call]}]) == "1"


def test_malformed_calls_are_passed_to_the_template() -> None:
    source = HERMES + "{{ messages[0].tool_calls }}"
    assert ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": "x"}]) == "x"
    assert ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": ["x"]}]) == "['x']"
