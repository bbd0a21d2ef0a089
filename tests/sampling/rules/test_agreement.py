"""A sample of `python -m fuzz.rules`: torch's form and processor and transformers' warpers against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fuzz import rules as comparison
from fuzz.rules import FILES, REST, Outcome, fuzz
from tests.support.samples import thinned
from topw_deploy.errors import ParameterError
from topw_deploy.sampling.rules import RULES, RuleParameters, kept_set
from topw_deploy.sampling.torch import CropStage, rule_rows


@pytest.mark.parametrize("rule", thinned(REST, 3))
def test_every_difference_has_a_cause(rule: str) -> None:
    outcome = fuzz(48, seed=3, rules=(rule,), most_vocabulary=1000)
    assert not outcome.unexplained, outcome.unexplained[0]
    same = sum(count for (_, peer, cause), count in outcome.causes.items() if peer == "torch form" and "same" in cause)
    assert same >= 46


def test_a_processor_that_keeps_a_token_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(comparison.RuleLogitsProcessor):
        def __init__(self, **choices: float) -> None:
            super().__init__(**choices | {"top_k": choices["top_k"] + 1})

    monkeypatch.setattr(comparison, "RuleLogitsProcessor", Wider)
    found = fuzz(48, seed=3, rules=("top_k",), most_vocabulary=1000).unexplained
    assert len(found) > 10
    assert {line.split(":")[0] for line in found} == {"processor"}


P_LESS = """
import torch
def p_less_decode(probs):
    probs[probs < THRESHOLD * (probs**2).sum(1, True)] = 0
    return torch.multinomial(probs / probs.sum(1, True), 1)
"""
MIN_K = """
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
class MinKLogitsProcessor(LogitsProcessor):
    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
        self.taus = [-1.0] * vllm_config.scheduler_config.max_num_seqs
    def update_state(self, update: BatchUpdate | None):
        for index, params, _, _ in update.added:
            self.taus[index] = params.min_k_tau if params.min_k else -1.0
    def apply(self, logits):
        ordered = logits[0].sort(descending=True).values
        span = ordered[0] - ordered[-1] + 1e-8
        decay = (ordered[:-1] - ordered[1:]) / span / torch.arange(1, len(ordered))
        size = max(int(decay.argmax()) + 1, int(self.taus[0] / span)) + MORE
        return logits.masked_fill(logits < ordered[min(size, len(ordered)) - 1], float("-inf"))
"""


def compared_file(folder: Path, rule: str, code: str) -> Outcome:
    file = folder / "theirs.py"
    file.write_text(code, "utf-8")
    return fuzz(64, seed=4, rules=(rule,), authors={rule: FILES[rule][1](file)}, most_vocabulary=1000)


@pytest.mark.slow
def test_the_authors_p_less_is_judged_by_what_it_draws_from(tmp_path: Path) -> None:
    same = compared_file(tmp_path, "p_less", P_LESS.replace("THRESHOLD", "1"))
    assert same.unexplained == []
    assert same.causes["p_less", "authors", "same kept set"] > 55
    assert len(compared_file(tmp_path, "p_less", P_LESS.replace("THRESHOLD", "0.9")).unexplained) > 5


def test_drawing_from_nan_is_keeping_nothing(tmp_path: Path) -> None:
    causes = compared_file(tmp_path, "p_less", P_LESS.replace("THRESHOLD", "(1 + 1e-6)")).causes
    assert causes["p_less", "authors", "keeps nothing: all within 1e-5 of the threshold"] > 0


@pytest.mark.slow
def test_vllms_min_k_is_loaded_without_vllm(tmp_path: Path) -> None:
    same = compared_file(tmp_path, "min_k", MIN_K.replace("MORE", "0"))
    assert same.unexplained == []
    assert same.causes["min_k", "vLLM", "same kept set"] > 45
    assert any("-inf makes the range infinite" in cause for _, _, cause in same.causes)
    assert len(compared_file(tmp_path, "min_k", MIN_K.replace("MORE", "1")).unexplained) > 10


def test_rows_of_a_batch_may_have_different_rules() -> None:
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(0)) * 2
    codes = torch.tensor([3, 5, 11, 3, 99, 1, 10, 4, 9, 2, 6, 7])
    values = torch.zeros(12, 2)
    values[:, 0] = torch.tensor([0.05, 0.5, 0, 0.5, 0, 7, 3, 0.4, 0, 0.9, 0.01, 0.01])
    values[7, 1] = 100
    crop = rule_rows(logits, (codes, values), torch.linspace(0.5, 2, 12, dtype=torch.float64))
    assert crop.invalid.tolist() == [code == 99 for code in codes.tolist()]
    assert crop.any_invalid
    for i in (row for row in range(12) if row != 4):
        wanted = kept_set(logits[i], int(codes[i]), values[i].tolist(), temperature=0.5 + 1.5 * i / 11)
        assert crop.ids[i, : crop.kept[i]].tolist() == wanted.kept.tolist()
        assert crop.keep_mask[i].nonzero()[:, 0].tolist() == sorted(wanted.kept.tolist())
        assert bool(crop.certified[i]) == wanted.certified
    assert crop.kept[4] == 0


@pytest.mark.parametrize("name", ["min_p", "top_h", "top_n_sigma", "top_k", "top_p", "typical", "eta", "p_less"])
def test_64_candidates_settle_rows_of_language_models(name: str) -> None:
    rng = np.random.default_rng(0)
    rows = -1.5 * np.log(rng.permutation(32_000) + 1.0) + 0.3 * rng.standard_normal(32_000)
    rows[rng.integers(32_000)] = 3.0  # the likeliest token
    wanted = {"min_p": 0.05, "top_k": 50, "top_p": 0.6, "typical_p": 0.2, "eta_cutoff": 0.01}
    value = {v.name: wanted.get(v.name, v.default) for v in RULES[name].values}
    crop = rule_rows(torch.from_numpy(rows)[None], RuleParameters(rule=name, **value))
    assert crop.stage.tolist() == [CropStage.CANDIDATES]


BEYOND = {
    "typical": ([0.0] + [-3.0] * 100 + [-5.0] * 2000, {"typical_p": 0.05}),  # those at -5 are nearer to the mean
    "min_k": (list(np.linspace(1, 0.9, 100)) + [-50.0] * 100, {"rule": "min_k"}),  # the steepest drop is the 100th
    "top_k": ([1.0, 2.0] * 2500, {"top_k": 10}),  # equal logits within and outside the list
    "top_h": (list(np.linspace(0, -0.5, 400)), {"top_h": 0.6}),
    "top_n_sigma": (list(np.linspace(0, -5, 900)), {"top_n_sigma": 1.0}),
}


@pytest.mark.parametrize("rule", BEYOND)
def test_candidates_do_not_settle_rows_that_other_tokens_decide(rule: str) -> None:
    row, choices = BEYOND[rule]
    order = np.random.default_rng(1).permutation(len(row))
    logits = torch.tensor(row)[order][None]
    crop = rule_rows(logits, RuleParameters(**choices))
    wanted = kept_set(logits[0], rule, RuleParameters(**choices).values)
    assert crop.stage.tolist() == [CropStage.POOL]
    assert crop.ids[0, : crop.kept[0]].tolist() == wanted.kept.tolist()
    assert crop.certified.tolist() == [wanted.certified]


def test_invalid_rows_keep_nothing() -> None:
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    crop = rule_rows(logits, RuleParameters(min_p=0.1))
    assert crop.kept.tolist() == [9, 0, 0, 0]
    assert crop.stage.tolist() == [CropStage.CANDIDATES, CropStage.INVALID, CropStage.INVALID, CropStage.INVALID]


def test_wrong_arguments_are_refused_by_name() -> None:
    logits = torch.zeros(2, 9)
    with pytest.raises(ParameterError, match="crop_rows computes it"):
        rule_rows(logits, RuleParameters())
    with pytest.raises(ParameterError, match="give its rows to crop_rows"):
        rule_rows(logits, (torch.tensor([0, 3]), torch.zeros(2, 2)))
    with pytest.raises(ParameterError, match=r"must be integers \[2\] and numbers \[2, 2\]"):
        rule_rows(logits, (torch.tensor([3]), torch.zeros(2, 2)))
    with pytest.raises(ParameterError, match=r"must be floating point \[B, V\]"):
        rule_rows(logits[0], RuleParameters(min_p=0.1))
