"""Each rule's kept set on small rows, from its formula."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.rule_rows import WRONG
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import FLOAT32_TIES, FLOAT64_TIES, sample_row
from topw_deploy.sampling.rules import RULES, kept_set

P = [0.05, 0.5, 0.1, 0.2, 0.15]  # by probability: 1 3 4 2 0
ROW = np.log(P)


def kept(rule: str, *values: float, row: object = ROW, **temperatures: float) -> list[int]:
    return kept_set(row, rule, values, **temperatures).kept.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "values", "wanted"),
    [
        ("top_k", (1,), [1]),
        ("top_k", (3,), [1, 3, 4]),
        ("top_k", (9,), [1, 3, 4, 2, 0]),
        ("top_p", (0.4,), [1]),
        ("top_p", (0.6,), [1, 3]),
        ("top_p", (1.0,), [1, 3, 4, 2, 0]),
        ("min_p", (0.29,), [1, 3, 4]),
        ("min_p", (0.0,), [1, 3, 4, 2, 0]),
        ("min_p", (1.0,), [1]),
        ("epsilon", (0.12,), [1, 3, 4]),
        ("epsilon", (0.6,), [1]),
        ("eta", (0.12,), [1, 3, 4, 2]),  # sqrt(0.12) exp(-1.333) = 0.091
        ("eta", (0.02,), [1, 3, 4, 2, 0]),
        ("p_less", (), [1]),  # the sum of squares is 0.325
        ("none", (), [1, 3, 4, 2, 0]),
    ],
)
def test_a_rule_keeps_the_set_that_its_definition_gives(
    rule: str, values: tuple[float, ...], wanted: list[int]
) -> None:
    assert kept(rule, *values) == wanted


def test_top_h_bounds_the_sum_of_entropy_terms() -> None:
    terms = [-p * math.log(p) for p in sorted(P, reverse=True)]
    shares = np.cumsum(terms) / sum(terms)  # 0.26 0.50 0.71 0.89 1
    for alpha, size in ((0.1, 1), (0.4, 1), (0.55, 2), (0.75, 3), (0.9, 4), (1.0, 5)):
        assert len(kept("top_h", alpha, 100)) == size == max(1, int((shares <= alpha).sum()))


def test_top_h_measures_its_limit_in_the_pool() -> None:
    assert len(kept("top_h", 0.75, 5)) == 3
    assert len(kept("top_h", 0.75, 3)) == 2  # of E_3, not E_5
    assert len(kept("top_h", 1.0, 2)) == 2
    assert len(kept("top_h", 1.0, 1)) == 1


def test_top_h_keeps_the_first_token_of_a_row_without_entropy() -> None:
    assert kept("top_h", 1.0, 3, row=[900.0, 0.0, -5.0]) == [0]
    assert kept("top_h", 0.4, 9, row=[60.0, 0.0, 0.0, 0.0]) == [0, 1]
    assert kept("top_h", 0.4, 9, row=[30.0, 0.0, 0.0, 0.0]) == [0, 1]


def test_typical_may_drop_the_most_probable_token() -> None:
    H = -sum(p * math.log(p) for p in P)  # 1.333; -ln p is 0.69, 1.61, 1.90, 2.30, 3.00
    assert abs(H - 1.333) < 1e-3
    assert kept("typical", 0.15) == [3]
    assert kept("typical", 0.3) == [3, 4]
    assert kept("typical", 0.6) == [1, 3, 4]


def test_top_n_sigma_ignores_the_temperature() -> None:
    row = [0.0, 3.0, 1.0, -2.0]
    sigma = float(np.std(row, ddof=1))
    for temperature in (0.1, 1.0, 7.0):
        assert kept("top_n_sigma", 2.1 / sigma, row=row, temperature=temperature) == [1, 2]
    assert kept("top_n_sigma", 0.0, row=[1.0, 2.0, 2.0]) == [1, 2]
    assert kept("top_n_sigma", 1.0, row=[-math.inf, 5.0]) == [1]


def test_min_k_cuts_at_the_steepest_weighted_drop() -> None:
    row = [9.0, 8.0, 7.5, 3.0, 2.0, 1.0]  # drops 1, 0.5, 4.5, 1, 1 over 1, 2, 3, 4, 5
    for temperature in (0.5, 3.0):
        assert kept("min_k", 0.0, row=row, temperature=temperature) == [0, 1, 2]
    assert len(kept("min_k", 39.0, row=row)) == 4  # floor(39 / 8)
    assert len(kept("min_k", 1e6, row=row)) == 6


def test_min_k_of_equal_logits() -> None:
    assert kept("min_k", 3.0, row=[2.0, 2.0, 2.0]) == [0, 1, 2]
    assert kept("min_k", 0.0, row=[2.0, 2.0, 2.0]) == [0]
    assert kept("min_k", 3.0, row=[2.0, -math.inf]) == [0]


@pytest.mark.parametrize("rule", [name for name in RULES if name != "top_w"])
def test_every_rule_keeps_finite_tokens_in_draw_order(rule: str) -> None:
    values = [value.default or 0.5 for value in RULES[rule].values] if rule != "top_k" else [40]
    row = np.random.default_rng(3).normal(0, 2, 300).round(1)  # many ties
    row[::7] = -np.inf
    chosen = kept_set(row, rule, values)
    order = sorted(chosen.kept, key=lambda i: (-row[i], i))
    assert chosen.kept.tolist() == order
    assert np.isfinite(row[chosen.kept]).all()
    assert chosen.certified == (len(set(order) - set(np.lexsort((np.arange(300), -row))[:64])) == 0)


def test_temperatures_select_and_draw() -> None:
    row = np.array([0.0, 1.0, 2.0])
    assert len(kept("min_p", 0.2, row=row)) == 2
    assert len(kept("min_p", 0.2, row=row, temperature=2.0)) == 3
    assert len(kept("min_p", 0.2, row=row, temperature=2.0, selection_temperature=1.0)) == 2
    assert kept("none", row=row, temperature=0.0) == [2]


@pytest.mark.parametrize("name", ["temperature", "selection_temperature"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_temperature_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ParameterError, match=f"^{name} is {value!r}, but must be a finite number >= 0"):
        kept_set(ROW, "min_p", (0.2,), **{name: value})


def test_margins_are_relative_distances_from_the_threshold() -> None:
    assert kept_set(ROW, "min_p", (0.299,)).ties.rule == pytest.approx(0.3 / 0.299 - 1)
    assert kept_set(ROW, "epsilon", (0.2,)).ties.allow_other_set(FLOAT64_TIES)
    assert kept_set(ROW, "top_p", (0.7,)).ties.allow_other_set(FLOAT64_TIES)
    assert kept_set(ROW, "top_k", (3,)).ties.rule == math.inf
    near = kept_set(ROW, "epsilon", (0.2 * (1 + 5e-6),)).ties
    assert near.allow_other_set(FLOAT32_TIES)
    assert not near.allow_other_set(FLOAT64_TIES)


def test_typical_margin_is_small_where_another_token_could_come_first() -> None:
    # y = 0 and 2 m: both tokens are equally far from the mean m.
    found = kept_set([0.0, -1.0, -1.0 - 1e-9], "typical", (0.3,))
    assert found.ties.rule < math.inf
    y = np.array([0.0, 1.2, 2.0])
    for _ in range(60):  # shift the last token until the first and the second are equally far
        w = np.exp(-y)
        m = (w @ y) / w.sum()
        y[1] = 2 * m
    assert kept_set(-y, "typical", (0.3,)).ties.rule < 1e-9


def test_sample_row_draws_by_rule() -> None:
    for u, token in ((0.0, 1), (0.65, 3), (0.99, 4)):
        row = sample_row(ROW, {}, uniform=u, rule=3, rule_values=(0.29, 0.0))
        assert (row.next_token, row.kept, row.certified) == (token, 3, True)
        assert row.mass == pytest.approx(0.85)
        assert row.logprob == pytest.approx(math.log(P[token] / 0.85))


@pytest.mark.parametrize(("code", "values"), WRONG)
def test_a_wrong_rule_or_value_makes_the_row_invalid(code: int, values: tuple[float, float]) -> None:
    for temperature in (1.0, 0.0):
        assert not sample_row(ROW, {"temperature": temperature}, rule=code, rule_values=values).is_valid


def test_kept_set_refuses_top_w_and_invalid_arguments() -> None:
    with pytest.raises(ParameterError, match="rule is 'top_w', but must be one of: 1 top_k"):
        kept_set(ROW, "top_w")
    with pytest.raises(ParameterError, match=r"the rule top_h has the values \(0.4,\), but needs top_h in \(0, 1\], "):
        kept_set(ROW, "top_h", (0.4,))


def test_the_page_has_a_section_for_every_rule_and_no_other() -> None:
    page = Path(__file__).parents[2] / "docs" / "contract" / "rules.md"
    sections = re.findall(r"^### (.+)$", page.read_text("utf-8").partition("\n## 4. ")[2], re.MULTILINE)
    assert [name.replace("-", "_") for name in sections] == [name for name in RULES if name != "top_w"]
