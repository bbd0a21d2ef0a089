"""Common chat template features work; others are blocked."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.toy_model import EOS, Load, Toy, byte_ids
from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.template import environment

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = """{{ bos_token }}
{%- for message in messages %}
[{{ message.role }}]{{ message.content }}
{%- endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **variables)


def test_messages_and_special_tokens_reach_the_template() -> None:
    assert render(PLAIN) == "<s>[user]Hello[assistant]"
    assert render(PLAIN, add_generation_prompt=False) == "<s>[user]Hello"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
            "{% endfor %}",
            "013",
        ),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}", "Hello"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}", "True True False"),
        ("{{ messages[0].content.strip().upper() }}{{ 'a,b'.split(',')[-1] }}", "HELLOb"),
        ("{{ '%s' | format(1) }}{{ messages[-1]['role'] ~ '!' }}", "1user!"),
    ],
)
def test_features_that_templates_of_published_models_use_work(source: str, expected: str) -> None:
    assert render(source) == expected


def test_strftime_now_is_the_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "datetime", SimpleNamespace(now=lambda: datetime(2026, 3, 9, 8, 7)))
    assert render("{{ strftime_now('%d.%m.%Y %H:%M') }}") == "09.03.2026 08:07"


def test_variables_of_the_caller_are_in_a_template() -> None:
    assert render("{{ enable_thinking }}{{ tools[0].name }}", enable_thinking=False, tools=[{"name": "t"}]) == "Falset"
    assert render("{{ n + 1 }}", n=np.int64(3)) == "4"


def test_a_template_refuses_messages_in_its_own_words() -> None:
    with pytest.raises(PromptError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match=r"refused the messages: .* has no attribute 'nope'"):
        render("{{ messages[0].content.nope() }}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
        "{{ namespace(_x=1)._x }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    try:
        rendered = render(attack)
    except PromptError:
        return
    assert rendered == "", "an attribute out of bounds is undefined and prints as nothing"


def test_a_template_that_does_not_parse_is_a_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match="chat template is not valid"):
        ChatTemplate("{% for %}", TOKENS)


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["text"], [{"role": "user", "content": object()}]])
def test_malformed_messages_are_prompt_errors(messages: Any) -> None:
    with pytest.raises(PromptError, match="messages"):
        render(PLAIN, messages)


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
