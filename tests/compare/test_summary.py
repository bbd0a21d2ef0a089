"""Metrics and intervals of a few hand-made texts, computed by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from topw_lab.compare.comparison import (
    TEXT_METRICS,
    MetricValue,
    as_dict,
    quotient_with_interval,
    report_lines,
)

from .conftest import comparison, sample


def test_an_interval_has_the_quantiles_of_the_quotient_over_resampled_prompts() -> None:
    weights = np.array([[2, 0], [1, 1], [1, 1], [1, 1], [0, 2]], np.float64)
    terms = np.array([[1, 1], [3, 1]], np.float64)
    found = quotient_with_interval(terms, weights)  # the resamples have the means 1, 2, 2, 2 and 3
    assert (found.value, found.low, found.high) == (2, pytest.approx(1.1), pytest.approx(2.9))
    exponential = quotient_with_interval(terms, weights, is_exponential=True)
    assert exponential.value == pytest.approx(math.exp(2))
    # Prompts with more terms count more; resamples without terms do not count.
    assert quotient_with_interval(np.array([[1, 1], [9, 3]], np.float64), weights).value == 2.5
    assert quotient_with_interval(np.array([[1, 1], [0, 0]], np.float64), weights) == MetricValue(1.0)
    assert quotient_with_interval(np.zeros((2, 2)), weights) == MetricValue(None)
    assert quotient_with_interval(np.array([[math.inf, 1], [1, 1]]), weights) == MetricValue(None)


def test_each_metric_of_two_prompts_is_as_computed_by_hand() -> None:
    def samples(rule: object, temperature: float, place: int) -> list:
        if place:
            return [sample("x", (1, 2, 3, 4, 5), surprisal=1.0), sample("y", (1, 2, 3, 4, 5), surprisal=2.0)]
        first = sample("a", (7, 7), drawn=3, kept=12, certified=2, surprisal=math.log(8) * 3, mass=1.8)  # fmt: skip
        return [first, sample("", (), surprisal=0.0)]

    (cell,) = comparison(samples, rules="top_w", temperatures=(1.0,)).cells
    value = {name: found.value for name, found in cell.values.items()}
    assert (len(cell.texts), cell.tokens) == (4, 13)
    assert value["perplexity"] == pytest.approx(math.exp((math.log(8) * 3 + 3) / 13))
    assert value["distinct_1"] == pytest.approx((1 / 2 + 5 / 10) / 2)
    assert value["distinct_2"] == pytest.approx((1 + 4 / 8) / 2)
    assert value["distinct_3"] == pytest.approx(3 / 6)  # the first prompt has no 3-gram
    assert value["self_bleu"] == pytest.approx(1.0)  # the first prompt has one text with tokens
    assert value["repetition"] == 0
    assert value["kept_mean"] == pytest.approx((1 + 2 + 9 + 10 * 2) / 13)
    assert value["mass"] == pytest.approx((1.8 + 10 * 0.5) / 13)
    assert value["certified"] == pytest.approx(12 / 13)
    assert cell.values.keys() == {metric.name for metric in TEXT_METRICS}
    assert cell.values["self_bleu"].low is None  # one prompt has it


def test_metrics_that_need_a_missing_output_are_left_out_with_advice() -> None:
    compared = comparison(
        lambda *_: [sample(surprisal=None, mass=None)], missing=("logits", "mass"), temperatures=(1.0,)
    )
    assert {name for name, found in compared.cells[0].values.items() if found.value is None} == {
        "accuracy", "perplexity", "mass", "self_bleu", "distinct_3", "repetition",
    }  # fmt: skip
    text = "\n".join(report_lines(compared))
    assert "export again with --with-logits" in text
    assert "export again with --with-mass" in text
    assert "Self-BLEU needs two texts per prompt" in text
    report = as_dict(compared)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["missing_outputs"] == ["logits", "mass"]
