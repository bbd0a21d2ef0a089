"""Templates that would not end or would fill the memory are refused with an error that names their file."""

from __future__ import annotations

from typing import Any

import pytest

from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.template.meter import LONGEST

HELLO = [{"role": "user", "content": "Hello"}]
LIMIT = "model/chat_template.jinja: the chat template (makes|takes|computes|nests)"
DOUBLING = "{% set ns = namespace(x=X) %}{% for i in range(99) %}{% set ns.x = GROWN %}{% endfor %}{{ ns.x|length }}"


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, {}, "model/chat_template.jinja").render(messages, **variables)


def doubling(start: str, grown: str) -> str:
    return DOUBLING.replace("X", start).replace("GROWN", grown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ 10**(10**9) }}",
        "{% set x = 2**3000 * 2**3000 %}",
        "{{ 10**9**9**9**9 }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ ([0] * 10**9)|length }}",
        "{{ ((0, 1) * 10**9)|length }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|indent(10**9, true) }}",
        "{{ ('\\n' * 10**5)|indent(10**5) }}",
        "{{ ('\\n' * 10**5)|indent('x' * 10**5) }}",
        "{{ 'a'.center(10**9) }}{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.rjust(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ '\\t'.expandtabs(10**9) }}",
        "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
        "{{ ('a' * 10**5)|replace('a', 'b' * 10**5) }}",
        "{{ ('a' * 10**5).replace('', 'b' * 10**5) }}",
        "{{ ('b' * 10**5).join('a' * 10**5) }}",
        "{{ ('a' * 10**5)|join('b' * 10**5) }}",
        "{{ range(99999)|join('b' * 10**5) }}",
        "{{ ('%s' * 10**5) % (('a' * 10**6,) * 10**5) }}",
        "{{ ('%(a)s' * 10**5) % {'a': 'a' * 10**6} }}",
        "{{ ('{0}' * 10**5).format('a' * 10**6) }}",
        "{{ ('{a}' * 10**5).format_map({'a': 'a' * 10**6}) }}",
        doubling("'a'", "ns.x ~ ns.x"),
        doubling("'a'", "ns.x + ns.x"),
        doubling("'a'", "[ns.x, ns.x]|join"),
        doubling("'a'", "'%s%s' % (ns.x, ns.x)"),
        doubling("'a'", "'{0}{0}'.format(ns.x)"),
        doubling("'a'", "ns.x|replace('a', 'aa')"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("[1]", "[ns.x, ns.x]"),
        doubling("[1]", "(ns.x, ns.x)"),
        doubling("[1]", "{'a': ns.x, 'b': ns.x}"),
        doubling("[1]", "dict(a=ns.x, b=ns.x)"),
        doubling("[1]", "cycler(ns.x, ns.x).items + (1,)"),
        doubling("[1]", "[ns.x]|batch(1, ns.x)|list + [ns.x]"),
        doubling("2", "ns.x * ns.x"),
        doubling("2", "ns.x ** 2"),
        "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|select('odd')|first }}{{ range(99999)|sum }}{% endfor %}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 40 + "{% endcall %}" * 40,
        "{% set big = 'ab' * 10**6 %}{% for i in range(99999) %}{{ 'c' in big }}{% endfor %}",
        "{% set big = 'ab' * 10**6 %}{% for i in range(99999) %}{{ big[1:]|length }}{% endfor %}",
        "{% set big = 'ab' * 10**6 %}{% for i in range(99999) %}{{ big.find('c') }}{% endfor %}",
        "{% set big = 'a' * 10**6 %}{{ (big + big).rfind('b' + big) }}",
        "{% set big = range(99999)|list %}{% for i in range(99999) %}{{ -1 in big }}{% endfor %}",
        "{% set big = [range(99999)|list] %}{% for i in range(99999) %}{{ big == [] + big }}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' in range(99999) }}{{ 'a' is in range(99999) }}{% endfor %}",
        "{% set k = (1,) * 10**5 %}{% for i in range(99999) %}{{ {k: 1}[k] }}{% endfor %}",
        "{% set x %}" + "a" * 1000 + "{% endset %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
        "{% for i in range(99999) %}" + "{{ i + i }}" * 2000 + "{% endfor %}",
        "{% block a %}{% for i in range(9999) %}{% endfor %}{% endblock %}"
        "{% for i in range(99999) %}{{ self.a() }}{% endfor %}",
        "{% set ns = namespace(x=range(99999)|list) %}{{ [ns.x] * 1000 }}",
        "{{ ([[1]] * 99999)|sum(start=[])|length }}{{ ([[1] * 99] * 99999)|sum(start=[])|length }}",
        "{{ (-10**9)|abs * [1] }}",
        "{{ {'a': [1] * 10**6}|tojson }}" * 30,
    ],
)
def test_a_template_that_would_not_end_or_would_fill_the_memory_is_refused(source: str) -> None:
    with pytest.raises(TokenizerError, match=LIMIT):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%(a)1000000000d' % {'a': 1} }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}{{ ''.nope() }}",
        "{{ '{}'.format_map({'': 1}) }}",
        "{{ cycler() }}",
        "{{ 1|round(10**9, 'ceil') }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ [1]|tojson(indent='a' * 10**6) }}",
        "{{ [1]|tojson(separators=('a' * 10**6, ':')) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ strftime_now('%Y' * 10**6) }}",
        "{{ lipsum(n=100000) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b' * 10**6}) }}",
        "{{ cycler.__class__ }}{{ [1]|map(' step', 1)|map('nope')|list }}",
        "{{ messages|map(attribute='__class__')|first }}{{ messages.copy().pop() }}",
        "{{ self._TemplateReference__context.environment }}{{ ''.format.__wrapped__ }}{{ ''.nope() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% import 'x' as x %}",
        "{% extends 'x' %}",
    ],
)
def test_an_operation_that_no_chat_template_needs_is_refused(source: str) -> None:
    with pytest.raises(PromptError, match=r"refused the messages|ran out of stack"):
        render(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
        "{% if 1 %}" + "{% elif 1 %}" * 10_000 + "{% endif %}",
        "{{ " + "9" * 5000 + " }}",
        "{% autoescape true %}{% endautoescape %}",
        "{{ 'a'|urlize }}",
        "{{ 'a'|wordwrap(1) }}",
        "a" * 2_000_000,
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"^model/chat_template.jinja: the chat template is not valid"):
        render(source)


def test_the_error_states_the_bound() -> None:
    with pytest.raises(TokenizerError, match=rf"makes a value of 10,000,000,000 characters.* at most {LONGEST:,}"):
        render("{{ 'a' * 10**10 }}")
    with pytest.raises(TokenizerError, match=r"takes more than [0-9,]+ steps"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


@pytest.mark.slow
def test_a_template_cannot_lower_its_count_of_steps() -> None:
    loop = "{% for j in range(99999) %}{% endfor %}{{ [-10**9]|map(' step')|list|length }}"
    with pytest.raises(TokenizerError, match="steps"):
        render("{% for i in range(99999) %}" + loop + "{% endfor %}")


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    ChatTemplate("{% if false %}{{ 10**(10**9) }}{{ 'a'|center(10**12) }}{{ ('a' * 10**12)|upper }}{% endif %}", {})
    source = "{% if false %}{{ 10**(10**9) }}{% endif %}{% set x = 'a' * 10**12 if false %}ok"
    assert render(source) == "ok"


def test_messages_that_nest_too_deeply_are_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(PromptError, match="more than 100 deep"):
        render("{{ messages|length }}", [{"role": "user", "content": deep}])
    with pytest.raises(PromptError, match="more than 100 deep"):
        render("{{ messages|length }}", tools=deep)
