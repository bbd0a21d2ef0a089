"""Texts are right or wrong by their words, and accuracy is counted by rule and temperature and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from topw_deploy.runtime.rule_settings import RuleSetting
from topw_lab.compare.comparison import MetricValue, Sample, is_right, report_lines
from topw_lab.compare.page import page
from topw_lab.compare.picture import save_plot

from .conftest import comparison, sample

QUESTIONS = Path(__file__).parents[2] / "examples" / "questions.jsonl"


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("The capital of France is Paris.", ["Paris"], True),
        ("PARIS!", ["Paris"], True),
        ("The Parisian", ["Paris"], False),
        ("2 + 2 = 4", ["4", "four"], True),
        ("It is four.", ["4", "four"], True),
        ("14", ["4"], False),
        ("4.5", ["4"], False),
        ("4,000", ["4"], False),
        ("It is 4, I think", ["4"], True),
        ("c-a-t", ["c a t"], True),
        ("C, A, T", ["c a t"], True),
        ("I'm not sure", ["m"], False),
        ("so 12 is right\n#### 12", ["#### 12"], True),
        ("so 12 is right\n#### 13", ["#### 12"], False),
        ("", ["4"], False),
    ],
)
def test_a_text_is_right_if_it_has_an_answer_as_whole_words(text: str, answers: list[str], right: bool) -> None:
    assert is_right(text, answers) is right


def test_no_question_is_answered_by_repeating_it_but_those_that_ask_for_it() -> None:
    lines = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines}) == len(lines) == 200
    echoed = [line["id"] for line in lines if is_right(line["prompt"], line["answers"])]
    assert {name.split("-")[0] for name in echoed} == {"copy"}
    assert len(echoed) == 20
    assert all(is_right(answer, line["answers"]) for line in lines for answer in line["answers"])


def answered(rule: RuleSetting, temperature: float, place: int) -> list[Sample]:
    """Top-W is right, the other rules are right at low temperatures. The third prompt has no answers."""
    right = None if place == 2 else rule.label == "top_w" or (temperature < 1 and place == 0)
    return [sample(right=right), sample(right=right)]


def test_accuracy_is_the_share_of_right_texts_of_prompts_with_answers(tmp_path: Path) -> None:
    compared = comparison(answered, ("one", "two", "three"), "top_w,none,greedy", answers=(["1"], ["2"], []))
    values = [(cell.rule.label, cell.temperature, cell.values["accuracy"]) for cell in compared.cells]
    assert [(label, temperature, found.value) for label, temperature, found in values] == [
        ("top_w", 0.5, 1.0), ("none", 0.5, 0.5), ("greedy", 0.5, 0.5),
        ("top_w", 2.0, 1.0), ("none", 2.0, 0.0), ("greedy", 2.0, 0.0),
    ]  # fmt: skip
    assert values[1][2] == MetricValue(0.5, 0.0, 1.0)  # of two questions
    assert "| accuracy |" in next(line for line in report_lines(compared) if line.startswith("| temperature"))
    assert "1 token, right" not in page(compared)
    assert "2 tokens, right" in page(compared)
    save_plot(compared, tmp_path / "accuracy.svg")
    drawn = re.findall("<!-- (.+) -->", (tmp_path / "accuracy.svg").read_text("utf-8"))  # the texts
    assert {"Top-W", "no rule", "greedy", "0.5", "2.0"} <= set(drawn)
    assert "3 questions" not in "".join(drawn)
    assert "2 questions, 2 texts each, 95% intervals." in drawn
    without = comparison(answered, rules="top_w")
    assert "accuracy" not in "".join(report_lines(without))
