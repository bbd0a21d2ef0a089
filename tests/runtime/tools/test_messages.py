"""Calls reach a template in the form that its family expects."""

from __future__ import annotations

from typing import Any

from topw_deploy.runtime.chat import ChatTemplate

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
