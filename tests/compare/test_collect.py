"""A comparison has the texts that `generate` draws, with the same random numbers under every rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import EOS, Toy, byte_ids, export
from topw_deploy.errors import ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.seeds import prompt_seed
from topw_lab.compare.comparison import Comparison, Prompt, RuleTexts, as_dict

from .conftest import compare_texts, text_prompts

PROMPTS = ("abc", "d", "hello")


def tokens(cell: RuleTexts) -> list[list[tuple[int, ...]]]:
    return [[tuple(one.token_ids) for one in samples] for samples in cell.samples]


def test_texts_equal_those_of_generate_and_do_not_depend_on_other_rules(folder: Path) -> None:
    rules = "top_w,min_p=0.02,top_h"
    found = compare_texts(folder, text_prompts(*PROMPTS), rules, temperatures=[0.7, 1.5], seed=9)
    assert [(cell.rule.label, cell.temperature) for cell in found.cells] == [
        (label, temperature) for temperature in (0.7, 1.5) for label in ("top_w", "min_p 0.02", "top_h 0.4")
    ]
    with TopWModel.from_pretrained(folder) as model:
        for cell in found.cells:
            for place, prompt in enumerate(PROMPTS):
                wanted = model.generate(
                    prompt, **cell.rule.parameters, temperature=cell.temperature, seed=prompt_seed(9, place),
                    num_return_sequences=2, max_new_tokens=6,
                )  # fmt: skip
                got = cell.samples[place]
                assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
                assert [(one.text, one.kept, one.certified) for one in got] == [
                    (one.text, sum(one.kept), sum(one.certified)) for one in wanted
                ]
    alone = compare_texts(folder, text_prompts(*PROMPTS), "min_p=0.02", temperatures=[1.5], seed=9)
    assert tokens(alone.cells[0]) == tokens(found.cells[4])


def test_rules_that_keep_the_same_tokens_give_the_same_texts(folder: Path) -> None:
    found = compare_texts(folder, text_prompts(*PROMPTS), "none,top_p=1,min_p=0,top_k=1", temperatures=[1.0, 2.0])
    for plain, top_p, min_p, _ in (found.cells[:4], found.cells[4:]):
        assert tokens(plain) == tokens(top_p) == tokens(min_p)
    assert tokens(found.cells[3]) == tokens(found.cells[7])  # the best token at any temperature
    assert tokens(found.cells[0]) != tokens(found.cells[4])
    assert len({one for samples in tokens(found.cells[4]) for one in samples}) == 6  # samples differ


def test_greedy_texts_are_those_of_temperature_0_at_every_temperature(folder: Path) -> None:
    found = compare_texts(folder, text_prompts(*PROMPTS), "none,greedy", temperatures=[1.0, 2.0])
    assert tokens(found.cells[1]) == tokens(found.cells[3])
    assert all(one == other for one, other in tokens(found.cells[1]))
    with TopWModel.from_pretrained(folder) as model:
        wanted = [model.generate(prompt, temperature=0.0, max_new_tokens=6).token_ids for prompt in PROMPTS]
    assert [samples[0] for samples in tokens(found.cells[1])] == [tuple(ids) for ids in wanted]


def test_an_interrupted_comparison_continues_where_it_stopped(folder: Path) -> None:
    prompts, answers = text_prompts(*PROMPTS), [["a"], [], ["b"]]
    saved: list[dict[str, Any]] = []

    def interrupt(comparison: Comparison) -> None:
        saved.append(json.loads(json.dumps(as_dict(comparison))))
        if len(saved) == 2:
            raise KeyboardInterrupt

    given = {"answers": answers, "temperatures": [1.0, 2.0]}
    with pytest.raises(KeyboardInterrupt):
        compare_texts(folder, prompts, "none,greedy", save=interrupt, **given)
    assert [len(one["cells"]) for one in saved] == [1, 2]
    saved[1]["cells"][0]["samples"][0]["text"] = "kept"
    found = compare_texts(folder, prompts, "none,greedy,top_w", earlier=saved[1], **given)
    assert found.cells[0].samples[0][0].text == "kept"
    whole = compare_texts(folder, prompts, "none,greedy,top_w", **given)
    assert [tokens(cell) for cell in found.cells] == [tokens(cell) for cell in whole.cells]
    assert [cell.values for cell in found.cells] == [cell.values for cell in whole.cells]
    for changes, message in (
        ({"seed": 1}, "another seed; write to another file"),
        ({"answers": [["a"], [], []]}, "another answers"),
        ({"earlier": {"cells": []}}, "is not of `topw compare`: KeyError"),
    ):
        with pytest.raises(ParameterError, match=message):
            compare_texts(folder, prompts, "none", **{"earlier": saved[1], **given, **changes})


def test_surprisal_is_computed_from_the_whole_distribution_at_temperature_1(folder: Path, toy: Toy) -> None:
    found = compare_texts(folder, text_prompts(*PROMPTS, repetition_penalty=2.0), "none,top_k=3", temperatures=[1.7])
    for cell in found.cells:
        for prompt, samples in zip(PROMPTS, cell.samples, strict=True):
            for one in samples:
                read, total = byte_ids(prompt), 0.0
                for token in one.token_ids:
                    total -= math.log(toy.softmax(read)[token])
                    read.append(token)
                assert one.surprisal == pytest.approx(total, rel=1e-5)  # float32 logits
                assert one.mass is not None
    assert found.missing_outputs == []


def test_a_text_ends_before_the_end_of_sequence_unless_that_is_ignored(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.script([*byte_ids("xy"), EOS], 2), form="grouped", with_logits=True)
    (samples,) = compare_texts(folder, text_prompts("ab"), "top_w").cells[0].samples
    for one in samples:
        assert (one.text, one.token_ids, one.drawn, one.finish_reason) == ("xy", byte_ids("xy"), 3, "stop")
        assert 3 <= one.kept <= 3 * 256
    (longer,) = compare_texts(folder, text_prompts("ab"), "top_w", ignore_eos=True).cells[0].samples
    assert [(one.drawn, one.finish_reason) for one in longer] == [(6, "length")] * 2


def test_a_folder_without_outputs_and_with_another_cache_is_compared_without_them(bare: Path, folder: Path) -> None:
    found = compare_texts(bare, text_prompts(*PROMPTS))
    assert found.missing_outputs == ["logits", "mass"]
    assert all(one.surprisal is None and one.mass is None for samples in found.cells[0].samples for one in samples)
    whole = compare_texts(folder, text_prompts(*PROMPTS))
    assert [tokens(cell) for cell in found.cells] == [tokens(cell) for cell in whole.cells]


def test_each_prompt_may_have_its_own_limit_and_form(folder: Path) -> None:
    prompts: list[Prompt] = [
        ("abc", "line 1", {"max_length": 7}),
        (byte_ids("abc"), "line 2", {}),
        ("abc", "line 3", {"max_new_tokens": 2}),
    ]
    found = compare_texts(folder, prompts, "top_w")
    assert [samples[0].drawn for samples in found.cells[0].samples] == [4, 6, 2]
    assert list(found.prompts) == ["abc"] * 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (("a", "line 4", {"temperature": 1.0}), "line 4 sets temperature, which a comparison sets"),
        (("a", "line 4", {"min_p": 0.1}), "line 4 sets min_p"),
        (("a", "line 4", {"seed": 1}), "line 4 sets seed"),
        (("a" * 96, "line 4", {}), "line 4 has 96 tokens and fills the model's context"),
        (("a" * 97, "line 4", {}), "line 4: the prompt has 97 tokens"),
        (([999], "line 4", {}), "line 4: the prompt holds the token id 999"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_is_generated(folder: Path, prompt: Prompt, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        compare_texts(folder, [*text_prompts("fine"), prompt])


def test_a_chat_needs_a_template(folder: Path) -> None:
    chat: Prompt = ([{"role": "user", "content": "hi"}], "line 1", {})
    with pytest.raises(TokenizerError, match=r"line 1: .* has no chat template"):
        compare_texts(folder, [chat])


def test_more_samples_than_rows_wait_for_a_row(folder: Path) -> None:
    found = compare_texts(folder, text_prompts(*PROMPTS), "none", samples=5, rows=1)
    assert [len(samples) for samples in found.cells[0].samples] == [5, 5, 5]
    with pytest.raises(ParameterError, match="max_batch"):
        compare_texts(folder, text_prompts("a"), rows=5000)
