"""The task of sums: its problems, scores, and training at a toy size."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.sums import __main__ as command
from benchmarks.sums.problems import Problem, columns, is_held_out, problems, stated_total
from benchmarks.sums.scores import Cell, accuracy_table, difference_table, mean_difference, wilson
from benchmarks.sums.sides import NEW_TOKENS, Reply, read_rule
from topw_deploy.runtime.rule_settings import RuleSetting

SOME = list(islice(problems(3), 200))


def test_every_written_step_is_true_and_the_last_is_the_answer() -> None:
    for problem in SOME:
        steps = re.findall(r" (\d+)\+(\d+): ((?:\d\+\d\+\d=\d\d ?)+).*? (\d+)", problem.answer)
        assert len(steps) in (1, 2)
        for a, b, written, result in steps:
            assert written.strip() == columns(int(a), int(b))
            assert int(a) + int(b) == int(result)
        assert int(steps[-1][3]) == problem.total == stated_total(problem.answer)


def test_a_problem_asks_for_the_sum_of_its_numbers() -> None:
    for problem in SOME:
        # Distractors have other units.
        told = re.sub(r"\d+ (years old|minutes|miles away|days ago)", "", problem.question)
        numbers = [int(n) for n in re.findall(r"\d+", told)]
        if re.search(r"has \d+ more .* than", told):
            assert problem.total == 2 * numbers[0] + numbers[1]
        else:
            assert problem.total == sum(numbers)


def test_a_seed_gives_the_same_problems_and_no_number_is_on_both_sides() -> None:
    assert list(islice(problems(3), 200)) == SOME
    assert list(islice(problems(4), 200)) != SOME

    def numbers(problem: Problem) -> tuple[str, ...]:
        first, *more = re.findall(r"(\d+)\+(\d+):", problem.answer)
        return (*first, *(b for _, b in more)) if " than " not in problem.question else first

    assert not any(is_held_out([int(n) for n in numbers(p)]) for p in SOME)
    assert all(is_held_out([int(n) for n in numbers(p)]) for p in islice(problems(3, held_out=True), 50))


def test_the_stated_total_is_the_number_after_the_first_marker() -> None:
    assert stated_total(" so 12.\n#### 12\n#### 13") == 12
    assert stated_total("12") is None
    assert stated_total("#### twelve") is None


def test_intervals_are_those_of_wilson_and_of_paired_differences() -> None:
    # 81 of 263: the example of Newcombe (1998), Statistics in Medicine 17, table I.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    one = Cell("a", 1.0, (True, True, False, True), 0, 5.0, None)
    other = Cell("b", 1.0, (True, False, False, False), 0, 5.0, None)
    assert mean_difference(one, other) == pytest.approx((0.5, 1.959964 * 0.5 / 2))


class Answering:
    """Solves every problem if greedy, else every other problem."""

    def replies(self, asked: list[Problem], rule: RuleSetting, temperature: float, seed: int) -> list[Reply]:
        return [
            Reply(p.answer if not temperature or place % 2 == 0 else "none", 10, None) for place, p in enumerate(asked)
        ]

    def close(self) -> None: ...


def test_accuracy_is_counted_by_rule_and_temperature() -> None:
    asked = [SOME[:4], SOME[4:8]]
    rules = [read_rule(text) for text in ("greedy", "top_w", "none")]
    cells = command.measure(Answering(), rules, [1.0, 2.0], asked)
    assert [(c.rule, c.temperature, c.accuracy, c.unanswered) for c in cells] == [
        ("greedy", None, 1.0, 0),
        *((rule, t, 0.5, 4) for rule in ("top_w", "none") for t in (1.0, 2.0)),
    ]
    assert accuracy_table(cells).count("50.0 (21.5-78.5)") == 4
    assert "+0.0 ± 0.0" in difference_table(cells)
    assert "greedy" not in difference_table(cells)


@pytest.mark.slow
@pytest.mark.long
def test_a_toy_model_trains_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from benchmarks.sums.train import Recipe, Training, evaluate, write_model
    from topw_deploy.export import export_model

    recipe = Recipe(
        vocab_size=400, hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=2, batch=2, steps=6, warmup=1,
        easy=0.5, group=2, evaluate_every=3, evaluated=2,
    )  # fmt: skip
    training = Training(recipe, tmp_path / "model")
    before = evaluate(training.model, training.tokenizer, recipe)["held_out_loss"]
    training.run()
    assert [point["step"] for point in training.progress.curve] == [3, 6]
    assert training.progress.curve[-1]["held_out_loss"] < before - 0.1
    write_model(training)
    export_model(str(tmp_path / "model"), tmp_path / "out", verify=False)
    rules = ["greedy", "top_w", "min_p=0.1"]
    common = ["--temperatures", "1", "--seeds", "1", "--problems", "2", "--json", str(tmp_path / "counts.json")]
    command.main(["--folder", str(tmp_path / "out"), "--rules", *rules, *common])
    assert "2 problems" in capsys.readouterr().out
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert [(cell["rule"], cell["asked"]) for cell in counts["cells"]] == [
        (rule.replace("=", " "), 2) for rule in rules
    ]
    assert all(0 < cell["tokens"] <= NEW_TOKENS for cell in counts["cells"])
