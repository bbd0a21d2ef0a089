"""Collected runs have the tokens of `generate`, and their steps agree with the reference on logits computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from tests.support.invoking import Invoke
from tests.support.toy_model import EOS, Toy, byte_ids, export
from topw_deploy.export.verification.reference import CacheDriver, decoder_driver
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling import Geometry, TopWParameters, crop
from topw_lab.stats.collect import CollectedRuns, collect
from topw_lab.stats.report import summarise

from .conftest import GEOMETRY

TEXTS = ("abc", "hello", "x y")


def collect_texts(folder: Path, *texts: str, batch_size: int = 1, **parameters: float) -> CollectedRuns:
    prompts = [(text, f"prompt {number}") for number, text in enumerate(texts)]
    generation = {"max_new_tokens": 12, "seed": 5}
    return collect(folder, prompts, [RuleSetting("", parameters)], batch_size=batch_size, generation=generation)


def test_the_tokens_are_those_of_topw_generate(folder: Path, invoke: Invoke) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in GEOMETRY.items()]
    for text, found in zip(TEXTS, collect_texts(folder, *TEXTS, **GEOMETRY).runs[0][1], strict=True):
        line = invoke("generate", folder, text, "--json", "--seed", 5, "--max-new-tokens", 12, *options).stdout
        assert found.result.token_ids == json.loads(line)["token_ids"]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "selection_temperature": 1.5}, {"geom_scale": -0.3}])
def test_every_step_agrees_with_the_reference_over_logits_computed_by_hand(
    folder: Path, toy: Toy, more: dict[str, float]
) -> None:
    geometry, given = Geometry.from_embeddings(toy.embeddings, "mahalanobis"), GEOMETRY | more
    parameters = TopWParameters(**{name: float(np.float32(value)) for name, value in given.items()})
    changed = certified = 0
    for text, found in zip(TEXTS, collect_texts(folder, *TEXTS, **given).runs[0][1], strict=True):
        tokens = byte_ids(text)
        assert len(found.steps) == len(found.result.token_ids) == found.agreed
        for step, token, mass in zip(found.steps, found.result.token_ids, found.result.mass or [], strict=True):
            row = toy.logits(tokens)
            wanted = crop(row, parameters, toy.options, geometry)
            plain = crop(row, replace(parameters, geom_scale=0.0), toy.options, geometry)
            assert (step.kept, step.certified) == (len(wanted.kept), wanted.certified)
            assert set(step.added) == set(wanted.kept) - set(plain.kept)
            assert set(step.dropped) == set(plain.kept) - set(wanted.kept)
            selected = softmax(row / (parameters.selection_temperature or parameters.temperature))
            assert step.mass == pytest.approx(selected[wanted.kept].sum(), rel=1e-6)
            assert step.mass == pytest.approx(mass, rel=1e-5)  # the graph's own output
            scaled = row / parameters.temperature
            assert step.entropy == pytest.approx(entropy(softmax(scaled)), rel=1e-6)
            assert step.kept_entropy == pytest.approx(entropy(softmax(scaled[wanted.kept])), rel=1e-6, abs=1e-12)
            changed += step.is_changed
            certified += step.certified
            tokens.append(token)
    assert changed > 3
    assert certified < 36


@pytest.mark.slow
def test_a_batch_of_prompts_of_different_lengths_has_the_steps_of_each_alone(folder: Path) -> None:
    alone, together = (collect_texts(folder, *TEXTS, batch_size=size, **GEOMETRY).runs[0][1] for size in (1, 3))
    assert [found.steps for found in together] == [found.steps for found in alone]
    assert [found.agreed for found in together] == [12, 12, 12]


def test_rows_that_end_early_have_only_their_own_steps(tmp_path: Path) -> None:
    toy = Toy.script([*byte_ids("hi"), EOS], prompt_tokens=1)
    folder = export(tmp_path / "out", toy)
    first, second = collect_texts(folder, "a", "bcd", batch_size=2).runs[0][1]
    assert len(first.steps) == first.agreed == 3
    assert len(second.steps) == second.agreed == len(second.result.token_ids)


def test_the_models_own_penalties_are_applied_before_the_analysis(tmp_path: Path, toy: Toy) -> None:
    config = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    folder = export(tmp_path / "out", toy, with_mass=True, generation_config=config)
    for found in collect_texts(folder, *TEXTS, lam=1.0).runs[0][1]:
        assert found.agreed == len(found.steps) == 12
        masses = found.result.mass or []
        assert [step.mass for step in found.steps] == pytest.approx(masses, rel=1e-5)
        assert all(0 < step.entropy < np.log(toy.vocab - 1) for step in found.steps), "a banned token has no part"


@pytest.mark.slow
def test_steps_whose_kept_set_differs_from_the_reported_one_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rolled(*arguments: Any) -> CacheDriver:
        driver = decoder_driver(*arguments)
        step = driver.step
        monkeypatch.setattr(driver, "step", lambda *columns: np.roll(step(*columns), 1, axis=1) * 2.0)
        return driver

    monkeypatch.setattr("topw_lab.stats.collect.decoder_driver", rolled)
    (summary,) = summarise(collect_texts(folder, *TEXTS, **GEOMETRY))
    assert summary.agreed < summary.whole.steps
