"""A few rows of `fuzz.sampler`; it detects wrong shortcuts."""

import math

import numpy as np
import pytest

from fuzz.sampler import fuzz, report
from tests.support.sampler_cases import SMALL
from topw_deploy.sampling.fast import alternation as fast_alternation
from topw_deploy.sampling.fast import crop as fast

pytestmark = pytest.mark.slow

ROWS = 900


def unexplained(rows=ROWS, seed=5):
    return fuzz(rows, seed, ["fast"], SMALL).sides["fast"].unexplained


def test_random_and_adversarial_rows_keep_the_references_sets():
    outcome = fuzz(3000, 6, ["fast"], SMALL)
    assert outcome.sides["fast"].unexplained == []
    assert sum(outcome.certified.values()) < 0.75 * 3000
    assert {"logit at threshold", "equal phi", "pool cut tied", "invalid"} <= set(outcome.rows)
    assert min(outcome.tied, outcome.nearly_tied - outcome.tied) > 50
    assert "| unexplained | 0" in report(outcome)


def test_a_certificate_that_always_holds_is_noticed(monkeypatch):
    monkeypatch.setattr(fast, "warm_start", lambda p, share: (len(p), math.inf))
    assert len(unexplained()) > 20


def test_a_gap_that_is_too_narrow_is_noticed(monkeypatch):
    monkeypatch.setattr(fast, "gap", lambda lam, c, mass: 0.7 * c / lam if lam else math.inf)
    assert len(unexplained()) > 3


def test_a_row_test_that_is_too_strict_is_noticed(monkeypatch):
    monkeypatch.setattr(fast_alternation, "loss_of_share", lambda y: np.zeros_like(y))
    assert len(unexplained()) > 3


@pytest.mark.long
def test_stopping_at_a_nested_knn_set_of_any_size_is_noticed(monkeypatch):
    def hasty(**given):
        return fast_alternation.Alternation(**given | {"final_size": 1})

    monkeypatch.setattr(fast, "Alternation", hasty)
    assert unexplained(8000, 7)


def test_equal_logits_in_another_order_are_noticed(monkeypatch):
    def backwards(logits, ids):
        return ids[::-1][np.argsort(-logits[ids[::-1]], kind="stable")]

    monkeypatch.setattr(fast, "sort_in_pool_order", backwards)
    assert len(unexplained()) > 20
