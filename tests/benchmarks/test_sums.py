"""The task of sums: its problems, scores, and training at a toy size."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.sums import problems as command
from benchmarks.sums.problems import Problem, columns, is_held_out, problems, stated_total
from topw_deploy.runtime import TopWModel
from topw_lab.compare.comparison import is_right

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


def test_a_problem_for_a_comparison_is_answered_by_its_own_solution_and_by_no_other_total(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["problems", "--count", "20", "--prompts"])
    command.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line, problem in zip(lines, islice(problems(0, held_out=True), 20), strict=True):
        assert line["prompt"] == problem.prompt
        assert is_right(problem.completion, line["answers"])
        assert not is_right(problem.completion.replace(f"#### {problem.total}", "#### 1"), line["answers"])


@pytest.mark.slow
@pytest.mark.long
def test_a_toy_model_trains_and_answers(tmp_path: Path) -> None:
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
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        assert model.generate(SOME[0].prompt, max_new_tokens=4, ignore_eos=True, seed=1).token_ids
