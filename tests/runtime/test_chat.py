"""Chat templates render as in transformers, and cannot run Python, change messages, run forever or fill the memory."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.attacks import no_hang, refused
from tests.support.samples import slow
from tests.support.toy_model import EOS, Load, Toy, byte_ids
from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime import chat
from topw_deploy.runtime.chat import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = """{{ bos_token }}
{%- for message in messages %}
[{{ message.role }}]{{ message.content }}
{%- endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""

TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "templates").iterdir())}
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


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, TOKENS, "model/chat_template.jinja").render(messages, **variables)


def by_jinja(source: str, **variables: Any) -> str:
    """`source` rendered as in transformers."""

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    return environment.from_string(source).render(**TOKENS, documents=None, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("system", [slow([]), [{"role": "system", "content": "Be brief."}]], ids=["plain", "system"])
@pytest.mark.parametrize("tools", [slow(None), [TOOL, TOOL]], ids=["alone", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_jinja(name: str, tools: Any, system: list[Any]) -> None:
    for messages in ([*system, *TURN], [*system, *TURN[:3]], [*system, TURN[0]], [*system, *TURN, TURN[0], TURN[1]]):
        assert render(TEMPLATES[name], messages, tools=tools) == by_jinja(
            TEMPLATES[name], messages=messages, tools=tools
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_of_a_thousand_messages_and_a_megabyte_has_fuel(name: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}]
    for number in range(500):
        turns.append({"role": "user", "content": f"{number} " + "wörd 😀 " * 145})
        turns.append({"role": "assistant", "content": f"<think>{number}</think>" + "answer, " * 130})
    assert render(TEMPLATES[name], turns, tools=[TOOL]) == by_jinja(TEMPLATES[name], messages=turns, tools=[TOOL])


@pytest.mark.slow
def test_one_message_of_ten_megabytes_has_fuel() -> None:
    messages = [{"role": "user", "content": "word " * 2 * 10**6}, {"role": "assistant", "content": "x</think>" * 10**6}]
    for name in ("llama", "qwen", "gemma", "deepseek"):
        assert render(TEMPLATES[name], messages) == by_jinja(TEMPLATES[name], messages=messages, tools=None)


def test_messages_and_special_tokens_reach_the_template() -> None:
    assert render(PLAIN) == "<s>[user]Hello[assistant]"
    assert render(PLAIN, add_generation_prompt=False) == "<s>[user]Hello"
    assert render("{{ messages }}", [{**HELLO[0], "name": None}]) == render("{{ messages }}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
         '{"a":1,"b":"\\u00e9"}'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
            "{% endfor %}",
            "013",
        ),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("a {%- generation -%} {{ messages[0]['content'] }}\n{%- endgeneration %}\nb", "aHellob"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}", "True True False"),
        ("{{ messages is iterable }} {{ 'a' is iterable }} {{ 3 is iterable }}", "True True False"),
        ("{{ messages[0].content.strip().upper() }}{{ 'a,b'.split(',')[-1] }}", "HELLOb"),
        ("{{ '{:>3}|{}'.format(1, 2) }}", "  1|2"),
        ("{{ '%s' | format(1) }}{{ messages[-1]['role'] ~ '!' }}", "1user!"),
        ("{{ '%s-%02d' % ('a', 3) }}{{ \"%s!\" % messages[0].role }}{{ 7 % 4 }} % ('", "a-03user!3 % ('"),
        ("{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}", "role=user;content=Hello;"),
        ("{{ messages }}{{ messages[1:] }}", "[{'role': 'user', 'content': 'Hello'}][]"),
    ],
)  # fmt: skip
def test_features_that_templates_of_published_models_use_work(source: str, expected: str) -> None:
    assert render(source) == expected


def test_strftime_now_is_the_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "datetime", SimpleNamespace(now=lambda: datetime(2026, 3, 9, 8, 7)))
    assert render("{{ strftime_now('%d.%m.%Y %H:%M') }}") == "09.03.2026 08:07"


def test_a_template_refuses_messages_in_its_own_words() -> None:
    with pytest.raises(PromptError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match=r"refused the messages: .* no method named nope"):
        render("{{ messages[0].content.nope() }}")


ENDLESS = (
    "{{ 'a' * 10**10 }}",
    "{{ 'a'|indent(10**9, true) }}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set big = 'ab' * 10**6 %}{% for i in range(99999) %}{{ 'c' in big }}{% endfor %}",
    "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_would_not_end_or_would_fill_the_memory_runs_out_of_fuel(source: str) -> None:
    with refused(TokenizerError, r"model/chat_template.jinja: the chat template takes more steps or memory"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10**(10**9) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ [1]|tojson(separators=('a' * 10**6, ':')) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ messages.extend(messages) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}{{ x }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_an_operation_that_no_chat_template_needs_is_refused(source: str) -> None:
    with refused(PromptError, "refused the messages"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{% if 1 %}" + "{% elif 1 %}" * 10_000 + "{% endif %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "a" * 2_000_000,
        "{{ '{:9999}'.format(1) }}",
        "{{ ('{:99' ~ '99}') . format (1) }}",
    ],
)
def test_a_template_that_does_not_compile_is_refused(source: str) -> None:
    with refused(TokenizerError, r"^model/chat_template.jinja: the chat template is not valid"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''|attr('__class__') }}{{ messages|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}",
    ],
)
def test_a_template_does_not_reach_python(source: str) -> None:
    """It is refused, or prints nothing: names that do not exist are empty."""
    messages = [{"role": "user", "content": "x"}]
    try:
        with no_hang():
            text = render(source, messages)
    except (TokenizerError, PromptError):
        text = ""
    assert not any(shown in text for shown in ("<class", "0x", "root:", "built-in"))


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["text"], [{"role": "user", "content": object()}]])
def test_malformed_messages_are_prompt_errors(messages: Any) -> None:
    with pytest.raises(PromptError, match="messages"):
        render(PLAIN, messages)


def test_a_template_that_ignores_tools_is_named() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, "chat_template")
    with pytest.warns(UserWarning, match="does not show tools"):
        assert template.render([{"role": "user", "content": "a"}], tools=[{"type": "function"}]) == "a"


def test_messages_that_nest_too_deeply_are_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(PromptError, match="more than 100 deep"):
        render("{{ messages|length }}", tools=deep)


def test_chat_generates_after_the_rendered_prompt_without_a_second_bos(load: Load) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}>"
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    model = load(Toy.script([*byte_ids("yes"), EOS], prompt_tokens=4), chat_template=template, tokenizer_config=config)
    result = model.chat([{"role": "user", "content": "ab"}], max_new_tokens=9)
    assert (result.text, result.prompt_tokens) == ("yes", 4)
    streamed = "".join(p.text for p in model.stream_chat([{"role": "user", "content": "ab"}], max_new_tokens=9))
    assert streamed == "yes"
    assert model.apply_chat_template(HELLO) == "<s>Hello>"


def test_a_template_in_the_tokenizers_configuration_serves_too(load: Load) -> None:
    toy = Toy.random(0)
    text = load(toy, tokenizer_config={"chat_template": "T{{ messages[0].content }}"})
    assert text.apply_chat_template(HELLO) == "THello"
    named = [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    assert load(toy, tokenizer_config={"chat_template": named}).apply_chat_template(HELLO) == "DHello"


def test_chat_with_a_model_without_a_template_is_an_error(load: Load) -> None:
    with pytest.raises(TokenizerError, match="has no chat template, so it is not a chat model"):
        load(Toy.random(0)).chat(HELLO)
