"""A grammar that is invalid or takes too long is refused with the place of the error; other requests continue."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.waiting import HANG
from topw_deploy import install
from topw_deploy.engine import Engine
from topw_deploy.errors import GrammarError, MissingPackageError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime import guide as grammars

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(b"}, "the expression does not compile: unclosed group."),
    (
        {"regex": "(?=a)b"},
        "the expression does not compile: look-around, including look-ahead and look-behind, is not supported.",
    ),
    ({"regex": r"[^\s\S]"}, "the grammar of structured_outputs allows no continuation; give another one."),
    ({"regex": "a{0}"}, "the grammar of structured_outputs allows only the empty text; give another one."),
    ({"json": {"type": "objec"}}, "the schema does not compile: Invalid type: objec."),
    ({"json": False}, "the schema is false, which no value matches; give another one."),
    (
        {"json": {"type": "array", "uniqueItems": True}},
        'the schema does not compile: Unimplemented keys: ["uniqueItems"].',
    ),
    (
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "the schema does not compile: Unsatisfiable schema: minimum (5) is greater than maximum (3).",
    ),
    (
        {"grammar": 'start: "a"\n  foo bar)'},
        "the grammar does not compile: Expected token ':', found 'rule_name' (at \"bar\" ('rule_name')) (line 2, "
        "column 7).",
    ),
    ({"grammar": 'start: "a" a\na: other'}, 'the grammar does not compile: unknown name: "other" (line 2, column 4).'),
    ({"grammar": "start: A\nA: /a(b/"}, "the grammar does not compile: unclosed group (line 2, column 4)."),
    ({"grammar": 'other: "a"'}, "the grammar does not compile: no start rule found."),
    ({"grammar": 'root ::= num\nnum ::= ("a"'}, "the GBNF grammar is invalid at line 2, column 13: Expected ')'."),
    ({"grammar": "root ::= nope"}, "the GBNF grammar is invalid: Rule 'nope' not found."),
]


@pytest.mark.parametrize(("stated", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_grammar_that_does_not_compile_is_refused_with_its_place(
    model: TopWModel, stated: dict[str, Any], message: str
) -> None:
    place = re.search(r"line (\d+), column (\d+)", message)
    with pytest.raises(GrammarError) as raised:
        model.generate("x", structured_outputs=stated)
    assert str(raised.value) == f"structured_outputs: {message}"
    assert (raised.value.line, raised.value.column) == (tuple(map(int, place.groups())) if place else (None, None))
    assert raised.value.parameters == ("structured_outputs",)
    with Engine(model, max_batch=1) as engine:
        with pytest.raises(GrammarError):
            engine.submit("x", structured_outputs=stated)
        assert engine.submit("x", max_new_tokens=3).result().finish_reason == "length"


def test_without_llguidance_an_error_names_the_extra_to_install(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module != "llguidance")
    monkeypatch.setattr(model, "_grammars", grammars.Grammars(model.tokenizer, 259))
    with pytest.raises(
        MissingPackageError, match=r"^structured output needs llguidance, .*pip install .*\[structured\]"
    ):
        model.generate("x", structured_outputs={"regex": "a"})
    assert model.generate("x", max_new_tokens=2).token_ids


def chain_rules(rule: Callable[[int], str], last: str, length: int) -> str:
    return "\n".join(["start: " + rule(0).split(":")[0], *map(rule, range(length)), last])


def deep_lark() -> str:
    """As many rules as a grammar may have, each of which refers to the next one: the compiler recurses into each."""
    return chain_rules(lambda i: f'r{i:x}:"x"r{i + 1:x}', 'rfa0:"q"', 0xFA0)


def deep_terminals() -> str:
    return chain_rules(lambda i: f'A{i}:("x"A{i + 1}"y"|"z")', 'A2500:"q"', 2500)


def deep_schema() -> dict[str, Any]:
    """References to schemas of the deepest nesting that the JSON parser takes."""
    names: dict[str, Any] = {}
    for index in range(55):
        schema: dict[str, Any] = {"$ref": f"#/$defs/{index + 1}"}
        for _ in range(100):
            schema = {"items": schema}
        names[str(index)] = schema
    return {"$defs": {**names, "55": {"type": "null"}}, "$ref": "#/$defs/0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "counted twice": {"regex": "(a{1,1000}){1,1000}"},
    "counted behind anything": {"regex": "(.*a.{200}b.*)|(.*c.{300}d)"},
    "a million of anything": {"regex": ".{0,1000000}"},
    "nested stars": {"regex": "((((a*)*)*)*)*b"},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" | "a" s | s "a"'},
    "wide": {"grammar": 'start: x{0,100000}\nx: y{0,100000}\ny: "a"?'},
    "doubling": {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"?'},
    "long strings": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    "a product of unions": {
        "json": {"allOf": [{"anyOf": [{"pattern": f"a{i}{j}"} for i in range(8)]} for j in range(8)]}
    },
    "a schema of itself": {"json": {"$ref": "#"}},
    "deep rules": {"grammar": deep_lark()},
    "deep terminals": {"grammar": deep_terminals()},
    "deep schema": {"json": deep_schema()},
    "deep parentheses": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "deep GBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_runs_in_bounded_time(model: TopWModel, name: str) -> None:
    """A second request continues meanwhile. Without bounds on the work for a mask, some grammars would take hours."""
    with Engine(model, max_batch=2) as engine:
        free = engine.submit("y", max_new_tokens=40, ignore_eos=True)
        try:
            ended = engine.submit("x", structured_outputs=HOSTILE[name], max_new_tokens=60).result(HANG)
            assert ended.finish_reason in ("stop", "length")
        except GrammarError:
            pass
        assert len(free.result(HANG).token_ids) == 40


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"multipleOf": 1_000_003}, "multipleOf have a least common multiple above 50,000"),
        ({"multipleOf": 0.123457}, "multipleOf have a least common multiple"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf have a least common multiple"),
        ({"multipleOf": 1e300}, "multipleOf have a least common multiple"),
        ({"patternProperties": {f"^p{i}$": {} for i in range(101)}}, "more than 100 patterns"),
        ({"anyOf": [{"patternProperties": {f"^{i}{j}$": {} for i in range(60)}} for j in range(2)]}, "more than 100"),
    ],
)
@pytest.mark.parametrize("inline", [False, True])
def test_schemas_that_would_take_minutes_are_refused_without_compiling_them(
    model: TopWModel, schema: dict[str, Any], message: str, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llguidance.LLMatcher", lambda *_, **__: pytest.fail("the schema was compiled"))
    stated = {"grammar": f'start: "a" %json {json.dumps(schema)}'} if inline else {"json": schema}
    with pytest.raises(GrammarError, match=message):
        model.generate("x", structured_outputs=stated)


def test_a_grammar_that_becomes_too_complex_fails_only_its_request(model: TopWModel) -> None:
    """The grammar exceeds llguidance's limits after the first token."""
    stated = HOSTILE["wide"]
    with Engine(model, max_batch=2) as engine:
        failed = engine.submit("x", structured_outputs=stated, max_new_tokens=90, seed=1, temperature=2.5)
        free = engine.submit("y", max_new_tokens=20, seed=2)
        with pytest.raises(GrammarError, match=r"the grammar of structured_outputs failed: .*; give a simpler one"):
            failed.result()
        assert free.result() == model.generate("y", max_new_tokens=20, seed=2)
    with pytest.raises(GrammarError, match="failed"):
        model.generate("x", structured_outputs=stated, max_new_tokens=90, seed=1, temperature=2.5)


def test_a_grammar_that_takes_too_long_to_compile_is_refused(model: TopWModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error while the compiler still runs."""
    refused, ended = threading.Event(), threading.Event()

    def compile_long(constraint: object) -> str:
        assert refused.wait(HANG)
        ended.set()
        return ""

    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(grammars, "to_lark", compile_long)
    with pytest.raises(GrammarError, match="takes longer than"):
        model.generate("x", structured_outputs={"regex": "a"})
    refused.set()
    assert ended.wait(HANG)


def test_other_threads_keep_their_stack_size() -> None:
    before = threading.stack_size()
    with pytest.raises(ZeroDivisionError):
        grammars.call_with_deep_stack(lambda: 1 // 0, 10)
    assert threading.stack_size() == before
