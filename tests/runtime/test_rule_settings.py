"""`--rules` and `--temperatures`: every spelling, and what is refused."""

from __future__ import annotations

import pytest

from topw_deploy.cli.lab import DEFAULT_RULES
from topw_deploy.errors import ParameterError
from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
from topw_deploy.sampling.rules import RULES
from topw_lab.bench.base import MIN_P, TOP_K, TOP_P


@pytest.mark.parametrize(
    ("text", "label", "parameters"),
    [
        ("top_w", "top_w", {"rule": "top_w"}),
        ("min_p=0.05", "min_p 0.05", {"rule": "min_p", "min_p": 0.05}),
        ("min-p", "min_p 0.1", {"rule": "min_p", "min_p": 0.1}),
        ("top_k=20", "top_k 20", {"rule": "top_k", "top_k": 20}),
        ("top_h=0.5:top_h_pool=50", "top_h 0.5 top_h_pool=50", {"rule": "top_h", "top_h": 0.5, "top_h_pool": 50}),
        ("typical_p=0.9", "typical 0.9", {"rule": "typical", "typical_p": 0.9}),
        ("none", "none", {"rule": "none"}),
        ("greedy", "greedy", {"rule": "none", "temperature": 0.0}),
        ("top_w:lam=2:warm-p=0.5", "top_w lam=2 init_top_p=0.5", {"rule": "top_w", "lam": 2, "init_top_p": 0.5}),
        ("top_w:preset=lively", "top_w preset=lively", {"rule": "top_w", "preset": "lively"}),
        (
            "min_p=0.1 : selection_temperature=1",
            "min_p 0.1 selection_temperature=1",
            {"rule": "min_p", "min_p": 0.1, "selection_temperature": 1},
        ),
    ],
)
def test_a_rule_is_read_with_its_values_and_a_label(text: str, label: str, parameters: dict[str, object]) -> None:
    (found,) = read_rules(text)
    assert (found.label, found.parameters) == (label, parameters)


def test_titles_are_those_of_texts() -> None:
    found = read_rules("top_w,top_w:preset=lively,top_h,min_p,none,greedy")
    assert [rule.title for rule in found] == [
        "Top-W", "Top-W lively", "Top-H 0.4", "min-p 0.1", "no rule", "greedy",
    ]  # fmt: skip


def test_the_default_rules_are_the_paper_s_and_plain_sampling() -> None:
    labels = [rule.label for rule in read_rules(DEFAULT_RULES)]
    assert labels == ["top_w", "min_p 0.1", "top_p 0.9", "top_h 0.4", "top_k 50", "none"]


def test_all_stands_for_every_rule_at_its_usual_values() -> None:
    found = read_rules(" all , top_w:preset=lively")
    assert [rule.parameters["rule"] for rule in found] == [*RULES, "top_w"]
    assert [rule.label for rule in found] == [
        "top_w", "top_k 50", "top_p 0.9", "min_p 0.1", "top_h 0.4", "typical 0.95", "epsilon 0.0003", "eta 0.0002",
        "top_n_sigma 1", "p_less", "min_k 3", "none", "top_w preset=lively",
    ]  # fmt: skip


def test_the_benchmarks_baselines_have_the_values_of_a_comparison() -> None:
    assert (TOP_K, TOP_P, MIN_P) == (50, 0.9, 0.1)
    given = {name: value for rule in read_rules("top_k,top_p,min_p") for name, value in rule.parameters.items()}
    assert (given["top_k"], given["top_p"], given["min_p"]) == (TOP_K, TOP_P, MIN_P)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_x", r"rules has 'top_x': did you mean top_"),
        ("min_p=2", r"rules has 'min_p=2': min_p is 2, but must be in \[0, 1\]"),
        ("top_w=3", "the rule top_w takes no value; write top_w:lam=2:beta=3"),
        ("min_p=0.1:top_p=0.9", "unknown parameter 'top_p'"),
        ("top_w:lam", "'lam' is not NAME=VALUE"),
        ("top_w:lam=1:lam=2", "lam is given twice"),
        ("min_p,min_p=0.1", "rules has 'min_p 0.1' twice"),
        ("top_w,all", "rules has 'top_w' twice"),
        ("all=2", "rules has 'all=2': known are top_w"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        read_rules(text)
    assert caught.value.parameters == ("rules",)


def test_temperatures_are_sorted_and_distinct() -> None:
    assert read_temperatures("2, 0.5,1,1.0") == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,x", "temperatures is '1,x'"), ("", "temperatures is ''"),
     ("1,-1", "temperatures is '1,-1', but must be finite numbers >= 0"),
     ("nan", "temperatures is 'nan'"), ("inf", "temperatures is 'inf'")],
)  # fmt: skip
def test_a_wrong_temperature_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        read_temperatures(text)
