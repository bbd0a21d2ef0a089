"""Answers match their request's constraint: alone, in batches, and beside other requests of an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.toy_model import EOS, VOCAB, Load, Toy, byte_ids
from topw_deploy.engine import Engine
from topw_deploy.errors import LogitsError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime import guide as grammars
from topw_deploy.sampling import TopWParameters

WILD: dict[str, Any] = {"temperature": 2.5, "lam": 0.2}
PERSON = {
    "type": "object",
    "properties": {
        "n": {"type": "string", "maxLength": 4},
        "a": {"type": "integer", "minimum": 0, "maximum": 120},
        "k": {"enum": ["x", "yy"]},
        "t": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "a", "k"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: "sum(" NUMBER ("," NUMBER)? ")"\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= "sum(" number ("," number)? ")"\nnumber ::= [0-9] [0-9]? [0-9]?'
CALL = re.compile(r"sum\([0-9]{1,3}(,[0-9]{1,3})?\)")


def is_person(value: Any) -> bool:
    return (
        set(value) - {"t"} == {"n", "a", "k"}
        and isinstance(value["n"], str)
        and len(value["n"]) <= 4
        and type(value["a"]) is int
        and 0 <= value["a"] <= 120
        and value["k"] in ("x", "yy")
        and len(value.get("t", [])) <= 2
        and all(type(flag) is bool for flag in value.get("t", []))
    )


MATCHES: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": PERSON}, lambda text: is_person(json.loads(text))),
    "regex": ({"regex": r"[a-f]{2,5}-\d{1,3}"}, lambda text: re.fullmatch(r"[a-f]{2,5}-\d{1,3}", text)),
    "choice": ({"choice": ["yes", "no", "né", "yes, or no"]}, ["yes", "no", "né", "yes, or no"].__contains__),
    "lark": ({"grammar": LARK}, CALL.fullmatch),
    "gbnf": ({"grammar": GBNF}, CALL.fullmatch),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.mark.parametrize("kind", MATCHES)
def test_answers_match_their_constraint(model: TopWModel, kind: str) -> None:
    """For 50 seeds in a batch. Answers that the token limit cuts are left out."""
    stated, matches = MATCHES[kind]
    prompts = [byte_ids("hello"[: 1 + seed % 5]) for seed in range(50)]
    results = model.generate(prompts, structured_outputs=stated, seed=list(range(50)), max_new_tokens=80, **WILD)
    ended = [result for result in results if result.finish_reason == "stop"]
    assert len(ended) >= (1 if kind == "json_object" else 45)
    for result in ended:
        assert matches(result.text), result.text
    assert len({result.text for result in results}) > 1


def test_answers_of_an_engine_match_and_are_those_of_the_request_alone(model: TopWModel) -> None:
    """Requests with and without constraints share a batch, and end at different times, so that rows move."""
    kinds = [*MATCHES.values(), (None, lambda text: True)] * 8
    rng = np.random.default_rng(3)
    given: list[dict[str, Any]] = [
        {
            "prompt": byte_ids(rng.integers(97, 123, rng.integers(1, 30)).astype(np.uint8).tobytes()),
            "structured_outputs": stated,
            "seed": index,
            "max_new_tokens": int(rng.integers(4, 60)),
            **WILD,
        }
        for index, (stated, _) in enumerate(kinds)
    ]
    with Engine(model, max_batch=5, prefill_budget=8) as engine:
        found = [request.result() for request in [engine.submit(**one) for one in given]]
    for one, result, (_, matches) in zip(given, found, kinds, strict=True):
        alone = model.generate(**one)
        assert (result.token_ids, result.logprobs, result.text) == (alone.token_ids, alone.logprobs, alone.text)
        assert result.finish_reason == alone.finish_reason
        if result.finish_reason == "stop":
            assert matches(result.text)
    assert sum(result.finish_reason == "stop" for result in found) > 20


def test_a_masked_draw_equals_that_of_the_reference(model: TopWModel, toy: Toy) -> None:
    """The reference draws among the tokens that continue one of the texts, without llguidance."""
    texts = [b"abc", b"abd", b"b", "né".encode()]
    prompt = byte_ids("hello")

    def banned_edits(tokens: Sequence[int]) -> Any:
        begun = [byte_of[token] for token in tokens[len(prompt) :]]
        allowed = {
            byte_ids(text[len(begun) :])[0] for text in texts if list(text[: len(begun)]) == begun and begun != [*text]
        }
        banned = [token for token in range(VOCAB) if token not in allowed]
        return banned, np.ones(len(banned)), np.full(len(banned), -np.inf)

    byte_of = {byte_ids(bytes([byte]))[0]: byte for byte in range(256)}
    parameters = TopWParameters(temperature=2.5, lam=0.2)
    seen = set()
    for seed in range(12):
        result = model.generate(prompt, structured_outputs={"choice": [t.decode() for t in texts]}, seed=seed, **WILD)
        rows = toy.expect(prompt, len(result.token_ids), parameters, seed, edits=banned_edits)
        assert result.token_ids == [row.next_token for row in rows]
        assert result.kept == [row.kept for row in rows]
        assert result.logprobs == pytest.approx([row.logprob for row in rows], abs=1e-5)
        seen.add(result.text)
    assert len(seen) > 1


def test_prompts_of_a_batch_may_have_constraints_of_their_own(model: TopWModel) -> None:
    stated = [{"regex": "[0-9]{3}"}, None, {"type": "text"}, {"choice": ["ja"]}]
    prompts = [byte_ids("a")] * 4
    results = model.generate(prompts, structured_outputs=stated, seed=[1] * 4, max_new_tokens=6, **WILD)
    assert re.fullmatch("[0-9]{3}", results[0].text)
    assert (
        results[1].token_ids == results[2].token_ids == model.generate("a", seed=1, max_new_tokens=6, **WILD).token_ids
    )
    assert results[3].text == "ja"


def test_a_prompt_that_is_read_token_by_token_does_not_advance_the_grammar(load: Load, toy: Toy) -> None:
    """A prompt whose log-probabilities are requested is read that way."""
    model = load(toy, form="grouped", with_logits=True)
    asked = {"structured_outputs": {"regex": "[a-z]{5}"}, "allowed_token_ids": byte_ids("aeiouAEIOU0123456789"), **WILD}
    with Engine(model) as engine:
        for seed in range(4):
            plain = model.generate("hello", seed=seed, **asked)
            assert re.fullmatch("[aeiou]{5}", plain.text)
            assert model.generate("hello", seed=seed, prompt_logprobs=0, **asked).token_ids == plain.token_ids
            served = engine.submit("hello", seed=seed, prompt_logprobs=0, **asked).result()
            assert served.token_ids == plain.token_ids


def test_streamed_pieces_join_to_the_answer(model: TopWModel) -> None:
    asked = {"structured_outputs": {"choice": ["né, né", "straße"]}, "seed": 1}
    pieces = list(model.stream("x", **asked))
    assert "".join(piece.text for piece in pieces) == model.generate("x", **asked).text
    with Engine(model) as engine:
        assert "".join(piece.text for piece in engine.submit("x", **asked)) in ("né, né", "straße")


class TestTheEnd:
    def test_a_complete_grammar_ends_the_sequence_without_another_token(self, model: TopWModel) -> None:
        result = model.generate("x", structured_outputs={"choice": ["yes"]}, min_new_tokens=20, max_new_tokens=3)
        assert (result.text, result.token_ids) == ("yes", byte_ids("yes"))
        assert (result.finish_reason, result.stop) == ("stop", None)

    def test_the_end_of_sequence_is_drawn_only_where_the_grammar_accepts(self, load: Load) -> None:
        toy = Toy.random(2)
        toy.follow[:, EOS] = 200  # always by far the likeliest
        model = load(toy)
        result = model.generate("x", structured_outputs={"regex": "[a-c]{3}[0-9]*"}, seed=1)
        assert re.fullmatch("[a-c]{3}", result.text)
        assert (len(result.token_ids), result.token_ids[-1], result.stop) == (4, EOS, EOS)
        later = model.generate("x", structured_outputs={"regex": "[a-c]{3}[0-9]*"}, seed=1, min_new_tokens=5)
        assert re.fullmatch("[a-c]{3}[0-9]{2}", later.text)
        never = model.generate("x", structured_outputs={"regex": "[a-c]{3}[0-9]*"}, ignore_eos=True, max_new_tokens=9)
        assert (len(never.text), never.finish_reason) == (9, "length")

    def test_a_stop_token_that_is_text_ends_nothing_before_the_grammar_accepts(self, model: TopWModel) -> None:
        (comma,) = byte_ids(",")
        asked = {"structured_outputs": {"regex": "a[,b]{2}c?"}, "stop_token_ids": [comma]}
        for seed in range(5):
            assert model.generate("x", seed=seed, **asked, **WILD).text in ("abb", "abbc")

    def test_the_token_limit_and_stop_strings_end_an_answer_early(self, model: TopWModel) -> None:
        cut = model.generate("x", structured_outputs={"regex": "(ab)+"}, max_new_tokens=5)
        assert (cut.text, cut.finish_reason) == ("ababa", "length")
        stopped = model.generate("x", structured_outputs={"regex": "(ab)+"}, stop_strings="ba", max_new_tokens=9)
        assert (stopped.text, stopped.finish_reason, stopped.stop) == ("a", "stop", "ba")

    def test_a_cancelled_request_frees_its_row(self, model: TopWModel) -> None:
        with Engine(model, max_batch=1) as engine:
            first = engine.submit("x", structured_outputs={"regex": "a{90}"})
            first.cancel()
            free = engine.submit("x", seed=3, max_new_tokens=20, **WILD).result()
        assert free.token_ids == model.generate("x", seed=3, max_new_tokens=20, **WILD).token_ids


class TestBans:
    def test_a_banned_choice_is_not_drawn(self, model: TopWModel) -> None:
        asked = {"structured_outputs": {"choice": ["yes", "no"]}, "suppress_tokens": byte_ids("y")}
        assert {model.generate("x", seed=seed, **asked, **WILD).text for seed in range(5)} == {"no"}

    def test_allowed_token_ids_and_the_grammar_both_hold(self, model: TopWModel) -> None:
        asked = {"structured_outputs": {"regex": "[a-d]{6}"}, "allowed_token_ids": byte_ids("bdz")}
        texts = {model.generate("x", seed=seed, **asked, **WILD).text for seed in range(4)}
        assert len(texts) > 1
        assert all(re.fullmatch("[bd]{6}", text) for text in texts)
        with Engine(model) as engine:
            assert {engine.submit("x", seed=seed, **asked, **WILD).result().text for seed in range(4)} == texts

    def test_bans_of_all_allowed_tokens_fail_only_that_request(self, model: TopWModel) -> None:
        asked = {"structured_outputs": {"regex": "a[bc]d"}, "suppress_tokens": byte_ids("bc")}
        with pytest.raises(
            LogitsError, match="row 0 has no token to draw at step 1: structured_outputs allows 2 there"
        ):
            model.generate("x", **asked)
        with Engine(model) as engine:
            failed, free = engine.submit("x", **asked), engine.submit("y", max_new_tokens=5)
            with pytest.raises(LogitsError, match="structured_outputs allows 2 there"):
                failed.result()
            assert len(free.result().token_ids) == 5


def test_padding_rows_of_the_embedding_and_special_tokens_are_never_allowed(load: Load) -> None:
    """The toy's tokenizer has 259 tokens of the model's 259; without its last 30 the model's are padding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from tests.support.toy_model import BYTES, SPECIAL

    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *BYTES[:-30]])}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    model = load(Toy.random(1), tokenizer=tokenizer)
    for stated in ({"regex": "(?s:.*)"}, {"grammar": "start: <[*]>*"}):
        row = model.prepare([5], structured_outputs=stated)[0].params
        assert row.constraint is not None
        guide = grammars.Grammars(model.tokenizer, VOCAB).guide(row.constraint, row.eos_token_ids)
        allowed = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little"))
        assert allowed.max() < VOCAB - 30
        assert 0 not in allowed or "grammar" in stated
        assert EOS in allowed


def test_recently_used_grammars_are_not_compiled_again(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = grammars.compile_grammar

    def counted(constraint: Any, tokens: Any) -> Any:
        compiled.append(constraint.text)
        return compile_grammar(constraint, tokens)

    monkeypatch.setattr(grammars, "compile_grammar", counted)
    monkeypatch.setattr(grammars, "KEPT_GRAMMARS", 2)
    model = load(Toy.random(1))
    for regex in ("a{9}", "b{9}", "a{9}", "c{9}", "a{9}", "b{9}"):  # c{9} replaces b{9}, then b{9} replaces c{9}
        answer = model.generate("x", structured_outputs={"regex": regex}, max_new_tokens=20).text
        assert answer == 9 * regex[0]
    assert compiled == ["a{9}", "b{9}", "c{9}", "b{9}"]
