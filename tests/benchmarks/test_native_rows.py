"""The tables of `python -m benchmarks.native_rows`: what they count, not what they time."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loops import median_interval
from benchmarks.native_rows import RULES, TimedRow, rule_table, time_rules
from tests.support.native_cases import opened
from topw_deploy.sampling.rules import RULES_BY_CODE, kept_set


def cells(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_slow_rows_without_a_certificate_are_kept_out_of_the_certified_ratio() -> None:
    rows = [TimedRow(1.2, True, 10), TimedRow(435.0, False, 900), TimedRow(1.4, True, 30), TimedRow(1.3, True, 2)]
    text = rule_table({"top_p 0.95": rows, "none": [TimedRow(80.25, False, 151_936)]})
    assert cells(text, "top_p 0.95") == ["top_p 0.95", "3 of 4", "1.30 (1.20-1.40)", "1.35 (1.20-435)", "2 to 900"]
    assert cells(text, "none") == ["none", "0 of 1", "-", "80.2 (80.2-80.2)", "151,936 to 151,936"]


def test_the_timed_calls_are_those_of_the_named_rules(tmp_path: Path) -> None:
    rows = (np.random.default_rng(0).standard_normal((2, 300)) * 3).astype(np.float32)
    found = time_rules(opened(tmp_path), rows, 0.5, 1)
    assert list(found) == ["Top-W", *RULES]
    for label, (code, values) in RULES.items():
        assert label.split()[0] == RULES_BY_CODE[code].name
        for row, timed in zip(rows, found[label], strict=True):
            wanted = kept_set(row, code, values, temperature=0.5)
            assert (timed.kept, timed.certified) == (len(wanted.kept), wanted.certified), label
            assert timed.ratio > 0


@pytest.mark.slow
def test_rows_of_the_trained_model_are_its_logits_over_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydoc_data.topics import topics

    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from benchmarks import trained_rows
    from topw_deploy.tiny import TINY_MODEL

    monkeypatch.setattr(trained_rows, "_TEXTS", 2)
    monkeypatch.setattr(trained_rows, "_TOKENS", 12)
    folder = TINY_MODEL
    first, *_, last = trained_rows.logits_of(folder, 3)
    longest = sorted(topics.values(), key=len, reverse=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, place, row in ((longest[0], 0, first), (longest[1], 11, last)):
        with torch.inference_mode():
            wanted = model(torch.tensor([tokenizer.encode(text).ids[:12]])).logits[0, place].numpy()
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, wanted, atol=1e-3)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    draws = random.Random(0)
    samples = [[draws.lognormvariate(0, 1) for _ in range(40)] for _ in range(2000)]
    held = sum(low <= 1.0 <= high for low, high in map(median_interval, samples))
    # 95 % of 2,000 trials is 1,900, with a standard deviation of 10; ranks are whole numbers
    assert 1860 <= held <= 1960
