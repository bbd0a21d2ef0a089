"""`logprobs` and `prompt_logprobs`: log softmax of the raw logits, compared with numpy's of the toy decoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.toy_model import CONTEXT, VOCAB, Load, Toy, byte_ids, export
from topw_deploy.errors import LogitsError, ParameterError
from topw_deploy.runtime import TokenLogprob, TopWModel
from topw_deploy.runtime.results import best_ids, score_token

HOT: dict[str, Any] = {"temperature": 2.5, "lam": 0.2, "ignore_eos": True, "seed": 3, "max_new_tokens": 12}
EDITS: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {40: 5.0, 41: -np.inf}, "presence_penalty": 0.5}
PROMPT = [5, 6, 7, 8, 9, 100, 30]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def ranking(logits: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(len(logits)), -logits))


def check(entry: TokenLogprob | None, logits: np.ndarray, token: int, count: int) -> None:
    assert entry is not None
    expected, order = log_softmax(logits), ranking(logits)
    assert (entry.token_id, entry.greedy) == (token, token == order[0])
    assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
    assert [top.token_id for top in entry.top_logprobs] == order[:count].tolist()
    assert [top.logprob for top in entry.top_logprobs] == pytest.approx(expected[order[:count]].tolist(), abs=1e-5)


@pytest.fixture(scope="module", params=["concat", "scatter", "grouped", "shared"])
def scoring(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    folder = export(tmp_path_factory.mktemp("toy") / "export", toy, form=request.param, with_logits=True)
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.mark.parametrize("size", [1, 7, 500, 40_000])
@pytest.mark.parametrize("kind", ["distinct", "ties", "few finite"])
def test_a_score_is_the_log_softmax_and_the_first_of_a_stable_sort(size: int, kind: str) -> None:
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal(size) * 4).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "few finite":
        logits[rng.random(size) < 0.9] = -np.inf
        logits[size // 2] = 1.0
    order = ranking(logits)
    for count in {0, 1, min(20, size), size}:
        assert best_ids(logits, count).tolist() == order[:count].tolist()
        for token in {int(order[0]), int(order[-1]), size // 2}:
            found = score_token(logits, token, count)
            assert found is not None
            assert found.greedy == (token == order[0])
            assert found.logprob == pytest.approx(log_softmax(logits)[token], abs=1e-5)
            np.testing.assert_allclose(found.logprobs, log_softmax(logits)[order[:count]], atol=1e-5)


def test_float16_logits_are_widened_first() -> None:
    logits = (np.random.default_rng(0).standard_normal(300) * 8).astype(np.float16)
    found = score_token(logits, 7, 3)
    assert found is not None
    assert found.logprob == pytest.approx(log_softmax(logits)[7], abs=1e-5)


def test_drawn_tokens_have_the_models_log_probabilities_whatever_edits_and_temperature_do(
    scoring: TopWModel, toy: Toy
) -> None:
    plain = scoring.generate(PROMPT, **HOT, **EDITS)
    result = scoring.generate(PROMPT, **HOT, **EDITS, logprobs=3)
    assert plain.token_logprobs is None
    assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs), "the draws and the crop's stay"
    assert result.token_logprobs is not None
    assert len(result.token_logprobs) == 12
    for step, entry in enumerate(result.token_logprobs):
        check(entry, toy.logits(PROMPT + result.token_ids[:step]), result.token_ids[step], 3)
    assert any(not entry.greedy for entry in result.token_logprobs)


def test_prompt_logprobs_are_those_of_the_reference_and_change_no_draw(scoring: TopWModel, toy: Toy) -> None:
    plain = scoring.generate(PROMPT, **HOT, **EDITS, logprobs=0)
    result = scoring.generate(PROMPT, **HOT, **EDITS, logprobs=0, prompt_logprobs=2)
    assert result.prompt_logprobs is not None
    assert result == replace(plain, prompt_logprobs=result.prompt_logprobs)
    first, *others = result.prompt_logprobs
    assert first is None
    for position, entry in enumerate(others, 1):
        check(entry, toy.logits(PROMPT[:position]), PROMPT[position], 2)


def test_the_likelihood_of_a_continuation_is_its_sum_and_whether_every_token_is_greedy(
    scoring: TopWModel, toy: Toy
) -> None:
    greedy = scoring.generate(PROMPT[:3], temperature=0, max_new_tokens=3, ignore_eos=True).token_ids
    for continuation, best_ones in ((greedy, True), ([*greedy[:2], 9], False)):
        prompt = PROMPT[:3] + continuation
        result = scoring.generate(prompt, prompt_logprobs=0, max_new_tokens=0)
        assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
        expected = sum(log_softmax(toy.logits(prompt[:end]))[prompt[end]] for end in range(3, 6))
        assert result.prompt_logprobs is not None
        scored = [entry for entry in result.prompt_logprobs[3:] if entry is not None]
        assert sum(entry.logprob for entry in scored) == pytest.approx(expected, abs=1e-4)
        assert all(entry.greedy for entry in scored) == best_ones


def test_rows_with_and_without_logprobs_share_a_batch(scoring: TopWModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:], PROMPT[:4]]
    settings: dict[str, Any] = {**HOT, "seed": [1, 2, 3, 4], "max_new_tokens": [5, 9, 1, 7]}
    asked: dict[str, Any] = {"logprobs": [None, 2, None, 0], "prompt_logprobs": [1, None, None, 0]}
    alone = [
        scoring.generate(prompt, **{**HOT, **{name: column[row] for name, column in {**settings, **asked}.items()
                                              if isinstance(column, list)}})
        for row, prompt in enumerate(prompts)
    ]  # fmt: skip
    count = 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return score_token(*arguments)

    monkeypatch.setattr("topw_deploy.runtime.results.score_token", counted)
    assert scoring.generate(prompts, **settings, **asked) == alone
    assert count == 6 + 9 + (3 + 7), "the prompt of row 0, the tokens of row 1, both of row 3"
    assert scoring.generate(prompts, **settings) == [
        replace(one, token_logprobs=None, prompt_logprobs=None) for one in alone
    ]
    assert count == 25, "nothing for those that do not ask"


@pytest.mark.parametrize("stops", [[], ["e", "zz"]], ids=["no stop strings", "stop strings"])
def test_the_pieces_of_a_stream_carry_each_token_once(scoring: TopWModel, stops: list[str]) -> None:
    given = {**HOT, "max_new_tokens": 40, "stop_strings": stops, "logprobs": 1}
    pieces = list(scoring.stream(PROMPT, **given))
    carried = [entry for piece in pieces for entry in piece.token_logprobs or ()]
    assert carried == scoring.generate(PROMPT, **given).token_logprobs
    assert all(piece.token_logprobs for piece in pieces[:-1]), "text comes with its tokens"
    assert all(piece.token_logprobs is None for piece in scoring.stream(PROMPT, **HOT))


def test_a_prompt_that_fills_the_context_is_read_and_nothing_drawn(scoring: TopWModel) -> None:
    prompt = [5 + n % 50 for n in range(CONTEXT)]
    result = scoring.generate(prompt, prompt_logprobs=0)
    assert result.finish_reason == "length"
    assert result.prompt_logprobs is not None
    assert [None, *prompt[1:]] == [entry and entry.token_id for entry in result.prompt_logprobs]


def test_a_prompt_of_one_token_has_none(scoring: TopWModel) -> None:
    plain = scoring.generate([5], **HOT)
    assert scoring.generate([5], **HOT, prompt_logprobs=3) == replace(plain, prompt_logprobs=[None])
    assert scoring.generate([5], prompt_logprobs=3, max_new_tokens=0).prompt_logprobs == [None]


def test_entries_have_texts_and_are_plain_json(load: Load) -> None:
    toy = Toy.script(byte_ids("oké"), prompt_tokens=1)
    toy.follow[:, 50] = -np.inf
    model = load(toy, with_logits=True)
    result = model.generate("x", max_new_tokens=4, temperature=0, logprobs=VOCAB, prompt_logprobs=0)
    assert result.token_logprobs is not None
    assert [entry.text for entry in result.token_logprobs] == ["o", "k", "�", "�"]
    last = result.token_logprobs[0].top_logprobs[-1]
    assert (last.token_id, last.logprob) == (50, -np.inf)
    fields = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert fields["prompt_logprobs"] == [None]
    assert fields["token_logprobs"][0]["text"] == "o"
    assert fields["token_logprobs"][0]["top_logprobs"][-1] == {"token_id": 50, "text": last.text, "logprob": -9999.0}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_graph_without_logits_names_the_flag_that_exports_them(load: Load, toy: Toy, name: str) -> None:
    model = load(toy)
    with pytest.raises(ParameterError, match=f"{name} needs the graph's output logits.*--with-logits"):
        model.generate(PROMPT, **{name: 2})
    assert model.generate(PROMPT, **HOT, **{name: None}).token_logprobs is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_wrong_counts_are_refused(scoring: TopWModel, name: str) -> None:
    for wrong in (-1, True, 1.5, "2"):
        with pytest.raises(ParameterError, match=rf"{name} is .*, but must be an integer >= 0"):
            scoring.generate(PROMPT, **{name: wrong})
    with pytest.raises(ParameterError, match=f"{name} is {VOCAB + 1}, but the vocabulary has {VOCAB} tokens"):
        scoring.generate(PROMPT, **{name: VOCAB + 1})


def test_logits_that_are_not_numbers_name_the_token_of_the_prompt(load: Load) -> None:
    toy = Toy.random(2)
    toy.place[2, 77] = np.nan
    model = load(toy, with_logits=True)
    with pytest.raises(LogitsError, match="the logits at token 3 of the prompt contain NaN"):
        model.generate(PROMPT, prompt_logprobs=0, max_new_tokens=1)
    assert len(model.generate(PROMPT, max_new_tokens=1).token_ids) == 1


@pytest.mark.slow
def test_the_bundled_models_are_torchs(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from topw_deploy.export import export_model
    from topw_deploy.tiny import TINY_MODEL

    export_model("tiny", tmp_path / "out", verify=False, with_logits=True)
    model = TopWModel.from_pretrained(tmp_path / "out", provider="cpu", intra_op_num_threads=1)
    result = model.generate("def parse(text):\n    ", seed=1, temperature=1.5, max_new_tokens=8, logprobs=4,
                            prompt_logprobs=4)  # fmt: skip
    assert result.prompt_logprobs is not None
    assert result.token_logprobs is not None
    entries = [entry for entry in (*result.prompt_logprobs, *result.token_logprobs) if entry is not None]
    ids = torch.tensor([[*model.tokenizer.encode("def parse(text):\n    "), *result.token_ids]])
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype="float32")(ids).logits
    logprobs = torch.log_softmax(logits[0, :-1].double(), -1)
    top = logprobs.topk(4)
    assert len(entries) == len(logprobs) == ids.shape[1] - 1
    for row, entry in enumerate(entries):
        token = int(ids[0, row + 1])
        assert (entry.token_id, entry.greedy) == (token, token == int(top.indices[row, 0]))
        assert entry.logprob == pytest.approx(float(logprobs[row, token]), abs=1e-4)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(top.values[row].tolist(), abs=1e-4)
        assert [one.token_id for one in entry.top_logprobs] == top.indices[row].tolist()
