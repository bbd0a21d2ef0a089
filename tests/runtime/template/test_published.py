"""Templates like those of published models render as in plain Jinja, also for long chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.samples import slow
from topw_deploy.runtime.chat import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a “city”.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "at": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "days": {"type": ["integer", "null"]}},
                },
            },
            "required": ["city"],
        },
    },
}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
TURN = [
    {"role": "user", "content": " What is the <weather> in Zürich? 😀\n"},
    {"role": "assistant", "content": "<think>\nA tool.\n</think>\n\nI look.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"degrees": 21}'},
    {"role": "assistant", "content": "It is 21 degrees.\n"},
]


def by_jinja_alone(source: str, **variables: Any) -> str:
    """`source` rendered as in transformers, without bounds."""

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    return environment.from_string(source).render(**TOKENS, documents=None, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("system", [slow([]), [{"role": "system", "content": "Be brief."}]], ids=["plain", "system"])
@pytest.mark.parametrize("tools", [slow(None), [TOOL, TOOL]], ids=["alone", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_plain_jinja(name: str, tools: Any, system: list[Any]) -> None:
    for messages in ([*system, *TURN], [*system, *TURN[:3]], [*system, TURN[0]], [*system, *TURN, TURN[0], TURN[1]]):
        want = by_jinja_alone(TEMPLATES[name], messages=messages, tools=tools)
        assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages, tools=tools) == want


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_of_a_thousand_messages_and_a_megabyte_is_within_the_bounds(name: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}]
    for number in range(500):
        turns.append({"role": "user", "content": f"{number} " + "wörd 😀 " * 145})
        turns.append({"role": "assistant", "content": f"<think>{number}</think>" + "answer, " * 130})
    assert sum(len(turn["content"]) for turn in turns) > 10**6
    want = by_jinja_alone(TEMPLATES[name], messages=turns, tools=[TOOL])
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(turns, tools=[TOOL]) == want


@pytest.mark.slow
def test_one_message_of_ten_megabytes_is_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 2 * 10**6}, {"role": "assistant", "content": "x</think>" * 10**6}]
    for name in ("llama", "qwen", "gemma", "deepseek"):
        want = by_jinja_alone(TEMPLATES[name], messages=messages, tools=None)
        assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages) == want


@pytest.mark.parametrize(
    "expression",
    [
        "splitlines()|length",
        *map(slow, ("split()|length", "split('\\n')|length", "upper()", "|trim|length")),
        "|tojson(indent=4)",
    ],
)
def test_operations_of_published_templates_are_within_the_bounds_for_megabytes(expression: str) -> None:
    source = "{{ messages[0].content" + ("" if expression.startswith("|") else ".") + expression + " }}"
    messages = [{"role": "user", "content": "a line of text\n" * 200_000}]
    assert ChatTemplate(source, {}).render(messages) == by_jinja_alone(source, messages=messages)


def test_a_template_that_collects_its_text_is_within_the_bounds() -> None:
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 400
    assert ChatTemplate(source, {}).render(messages) == "x" * 400_000
