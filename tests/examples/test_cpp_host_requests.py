"""Batches and edits of examples/cpp: every row draws the tokens of TopWModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.cpp_host import FORMS, Host, answers_of, fails, ids_of, lines_of, native_library, same
from tests.support.toy_model import EOS, VOCAB, Toy, export
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.long

EDITS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias",
         "suppress_tokens", "bad_words_ids", "min_new_tokens")  # fmt: skip


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """About half of the parameters, likely to trigger edits and ends."""

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(3, VOCAB, rng.integers(least, most)).tolist()

    def value(low: float, high: float) -> float:
        return float(rng.uniform(low, high))

    choices: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.7, 1.5, 3.0])),
        "lam": value(0, 2),
        "beta": value(0, 6),
        "init_top_p": value(0.2, 1),
        "geom_scale": value(-1, 2),
        "selection_temperature": float(rng.choice([0.0, 1.5])),
        "repetition_penalty": value(0.5, 2.5),
        "presence_penalty": value(-1, 3),
        "frequency_penalty": value(-1, 3),
        "no_repeat_ngram_size": int(rng.integers(0, 4)),
        "logit_bias": {str(token): value(-4, 4) for token in ids(1, 30)},
        "suppress_tokens": ids(1, 60),
        "bad_words_ids": [ids(1, 3) for _ in range(rng.integers(1, 80))],
        "eos_token_id": ids(1, 30),
        "stop_token_ids": ids(1, 10),
        "ignore_eos": bool(rng.random() < 0.5),
        "min_new_tokens": int(rng.integers(0, 12)),
        "min_length": int(rng.integers(0, 40)),
        "pad_token_id": int(rng.integers(0, VOCAB)),
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.5}
    chosen |= {"seed": int(rng.integers(0, 2**64, dtype=np.uint64)), "max_new_tokens": int(rng.integers(1, 28))}
    return {"prompt": ids(1, 40), **chosen}


def expected(model: TopWModel, request: dict[str, Any]) -> Any:
    return model.generate(request["prompt"], **{name: value for name, value in request.items() if name != "prompt"})


@pytest.mark.parametrize("form", FORMS)
def test_random_requests_in_batches_equal_the_python_runtimes(form: str, host: Host, folders: dict[str, Path]) -> None:
    rng, stopped, edited = np.random.default_rng(FORMS.index(form)), 0, 0
    library = ["--native-library", native_library()] if form == "grouped" else []
    sampler = "native" if library else "graph"
    with TopWModel.from_pretrained(folders[form], provider="cpu", intra_op_num_threads=1, sampler=sampler) as model:
        for rows in (1, 2, 5, 12, 30):
            requests = [random_request(rng) for _ in range(rows)]
            answers = answers_of(host(folders[form], "--batch", *library, stdin=lines_of(requests)))
            assert len(answers) == rows
            for request, answer in zip(requests, answers, strict=True):
                result = expected(model, request)
                assert same(answer, result, text=False), request
                plain = {name: value for name, value in request.items() if name not in EDITS}
                stopped += result.finish_reason == "stop"
                edited += expected(model, plain).token_ids != result.token_ids
    assert stopped >= 5  # of 50, for both kinds
    assert edited >= 25


def test_a_batch_draws_the_tokens_of_the_python_runtimes_batch(host: Host, demo_export: Path) -> None:
    """The bundled model's matmuls may round differently at another batch size."""
    texts = ["class Path", "import os\n", "def parse(text):\n    return", "#"]
    with TopWModel.from_pretrained(demo_export, provider="cpu", intra_op_num_threads=1) as model:
        prompts = [model.tokenizer.encode(text) for text in texts]
        assert len({len(prompt) for prompt in prompts}) > 1
        given = {"lam": [1.5, 0.5, None, 1.5], "seed": [1, 2, 3, 4], "temperature": 1.2, "repetition_penalty": 1.2}
        results = model.generate(prompts, max_new_tokens=40, **given)
    requests = [
        {"prompt": prompt, "seed": seed, "lam": lam}
        for prompt, seed, lam in zip(prompts, given["seed"], given["lam"], strict=True)
    ]
    done = host(demo_export, "--batch", "--max-new-tokens", 40, "--temperature", 1.2, "--repetition-penalty", 1.2,
                stdin=lines_of(requests))  # fmt: skip
    assert [answer["token_ids"] for answer in answers_of(done)] == [result.token_ids for result in results]


@pytest.mark.parametrize("form", FORMS)
def test_options_edit_a_single_answer_like_the_python_runtimes_parameters(
    form: str, host: Host, folders: dict[str, Path]
) -> None:
    options = ["--repetition-penalty", 1.7, "--presence-penalty", 2, "--frequency-penalty", "0.5", "--min-new-tokens",
               9, "--no-repeat-ngram-size", 1, "--logit-bias", "60=2.5", "--logit-bias", "61=-inf", "--suppress-tokens",
               "70,71", "--suppress-tokens", 72, "--bad-words-ids", "80,81", "--bad-words-ids", 82]  # fmt: skip
    ends = list(range(100, 160))
    given = {
        "repetition_penalty": 1.7, "presence_penalty": 2, "frequency_penalty": 0.5, "min_new_tokens": 9,
        "no_repeat_ngram_size": 1, "logit_bias": {60: 2.5, 61: -np.inf}, "suppress_tokens": [70, 71, 72],
        "bad_words_ids": [[80, 81], [82]], "eos_token_id": ends, "temperature": 3,
    }  # fmt: skip
    for end in ends:
        options += ["--eos", end]
    with TopWModel.from_pretrained(folders[form], provider="cpu", sampler="graph") as model:
        for seed in range(6):
            result = model.generate([50, 51], seed=seed, max_new_tokens=30, **given)
            done = host(folders[form], "--seed", seed, "--max-new-tokens", 30, "--temperature", 3, *options, 50, 51)
            assert ids_of(done) == result.token_ids
            assert len(result.token_ids) >= 9


def test_several_answers_to_a_prompt_have_seeds_of_their_own(host: Host, folders: dict[str, Path]) -> None:
    given = {"seed": 2**64 - 1, "max_new_tokens": 12, "temperature": 3}
    with TopWModel.from_pretrained(folders["scatter"], provider="cpu", sampler="graph") as model:
        results = model.generate([50, 51], num_return_sequences=4, **given)
    done = host(folders["scatter"], "--num-return-sequences", 4, "--seed", 2**64 - 1, "--max-new-tokens", 12,
                "--temperature", 3, 50, 51)  # fmt: skip
    answers = answers_of(done)
    assert len({answer["seed"] for answer in answers}) == 4
    assert all(same(answer, result, text=False) for answer, result in zip(answers, results, strict=True))
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 1


def test_rows_of_a_batch_without_a_seed_get_one_each(host: Host, folders: dict[str, Path]) -> None:
    requests: list[dict[str, Any]] = [{"prompt": [50], "max_new_tokens": 9, "temperature": 3} for _ in range(3)]
    first, second = (answers_of(host(folders["concat"], "--batch", stdin=lines_of(requests))) for _ in range(2))
    assert len({answer["seed"] for answer in first + second}) == 6
    seeded = [{**request, "seed": answer["seed"]} for request, answer in zip(requests, first, strict=True)]
    assert answers_of(host(folders["concat"], "--batch", stdin=lines_of(seeded))) == first


def test_a_row_ends_with_the_context_and_others_continue(host: Host, folders: dict[str, Path]) -> None:
    full = [50 + i for i in range(96)]
    requests = [{"prompt": full, "seed": 1}, {"prompt": full[:90], "seed": 2}, {"prompt": [60], "seed": 3}]
    for form in FORMS:
        with TopWModel.from_pretrained(folders[form], provider="cpu", sampler="graph") as model:
            answers = answers_of(host(folders[form], "--batch", stdin=lines_of(requests)))
            assert [len(answer["token_ids"]) for answer in answers] == [0, 6, 95]
            for request, answer in zip(requests, answers, strict=True):
                assert same(answer, expected(model, request), text=False)
        fails(host(folders[form], *full, 50), 1, "97 tokens", "holds 96")


def test_the_models_own_edits_and_limits_apply(host: Host, toy: Toy, tmp_path: Path) -> None:
    stated = {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [60, 61, VOCAB + 5],
        "bad_words_ids": [[70], [80, VOCAB]], "logit_bias": {"75": 3.5}, "min_length": 9, "max_length": 31,
        "eos_token_id": [*range(100, 130), VOCAB + 1], "presence_penalty": 0.5, "temperature": 2, "top_p": 0.9,
        "lambda_geom": 0.4,
    }  # fmt: skip
    folder = export(tmp_path / "export", toy, generation_config=stated)
    with pytest.warns(UserWarning, match="top_p"):
        model = TopWModel.from_pretrained(folder, provider="cpu")
    with model:
        for seed in range(8):
            result = model.generate([50, 51], seed=seed)
            done = host(folder, "--seed", seed, 50, 51)
            assert ids_of(done) == result.token_ids
            assert done.stderr == ""
        result = model.generate([50, 51], seed=3, max_length=20, repetition_penalty=1, do_sample=False, ignore_eos=True)
    request = {"prompt": [50, 51], "seed": 3, "max_length": 20, "repetition_penalty": 1, "do_sample": False,
               "ignore_eos": True, "pad_token_id": None}  # fmt: skip
    (answer,) = answers_of(host(folder, "--batch", stdin="\n" + lines_of([request]) + " \n"))
    assert same(answer, result, text=False)
    assert len(answer["token_ids"]) == 18


def test_parameter_names_of_other_interfaces_are_accepted(host: Host, folders: dict[str, Path]) -> None:
    request = {"prompt": [50], "seed": 1, "max_tokens": 7, "min_tokens": 3, "lambda_geom": 0.4, "warm_p": 0.7,
               "stop_token_ids": [*range(3, 200)], "temperature": 3}  # fmt: skip
    with TopWModel.from_pretrained(folders["concat"], provider="cpu", sampler="graph") as model:
        result = expected(model, request)
    assert 3 <= len(result.token_ids) < 7
    (answer,) = answers_of(host(folders["concat"], "--batch", stdin=lines_of([request])))
    assert same(answer, result, text=False)


def test_an_empty_prompt_begins_with_the_models_token_for_it(host: Host, toy: Toy, tmp_path: Path) -> None:
    folder = export(tmp_path / "export", toy, generation_config={"bos_token_id": 77, "eos_token_id": EOS})
    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        result = model.generate("", seed=1, max_new_tokens=8)
    assert result.prompt_tokens == 1
    assert ids_of(host(folder, "--seed", 1, "--max-new-tokens", 8)) == result.token_ids


def test_prompts_of_different_lengths_are_refused_where_the_decoder_cannot_pad(
    host: Host, toy: Toy, tmp_path: Path
) -> None:
    folder = export(tmp_path / "export", toy, padding=False)
    equal = [{"prompt": [50, 51], "seed": 1}, {"prompt": [52, 53], "seed": 2}]
    assert len(answers_of(host(folder, "--batch", stdin=lines_of(equal)))) == 2
    done = host(folder, "--batch", stdin=lines_of([*equal, {"prompt": [50], "seed": 3}]))
    fails(done, 1, "this decoder cannot pad", "group those of equal length")


def test_edits_that_ban_every_token_are_an_error(host: Host, folders: dict[str, Path]) -> None:
    everything = ",".join(map(str, range(VOCAB)))
    fails(host(folders["concat"], "--suppress-tokens", everything, 50), 1, "row 0 at step 0", "penalties and bans")
