"""A sample of `python -m fuzz.peers`: transformers' warpers and direct formulas against the definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.peers import FILES, REST, Outcome, fuzz
from fuzz.rule_peers import TRANSFORMERS
from tests.support.samples import thinned


@pytest.mark.parametrize("rule", thinned(REST, 3))
def test_every_difference_has_a_cause(rule: str) -> None:
    outcome = fuzz(48, seed=3, rules=(rule,), most_vocabulary=1000)
    assert not outcome.unexplained, outcome.unexplained[0]
    assert sum(count for (_, _, cause), count in outcome.causes.items() if "same" in cause) > 24


def test_a_peer_that_keeps_a_token_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = TRANSFORMERS["top_k"]
    monkeypatch.setitem(TRANSFORMERS, "top_k", lambda logits, values: exact(logits, (values[0] + 1, 0.0)))
    assert len(fuzz(48, seed=3, rules=("top_k",), most_vocabulary=1000).unexplained) > 10


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
    file = folder / f"theirs_{len(list(folder.iterdir()))}.py"  # a new name: the time of a .pyc has whole seconds
    file.write_text(code, "utf-8")
    return fuzz(64, seed=2, rules=(rule,), authors={rule: FILES[rule][1](file)}, most_vocabulary=1000)


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
