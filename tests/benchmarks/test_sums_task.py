"""examples/lm_eval/topw_sums_cot: the problems of benchmarks.sums, prompted and scored as that benchmark does."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sums.problems import NEW_TOKENS, problems, stated_total

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"
PROBLEMS = list(islice(problems(0, held_out=True), 100))


def test_the_data_is_what_the_generator_prints() -> None:
    lines = (TASKS / "sums.json").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"question": p.question, "answer": p.answer} for p in PROBLEMS]


def test_the_task_asks_and_scores_as_the_benchmark_does() -> None:
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    truth = {problem.prompt: problem for problem in PROBLEMS}
    said: dict[str, str] = {}

    class Answering(LM):
        """Answers a third of the problems correctly and a third wrongly; the rest get no total."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            for place, request in enumerate(requests):
                prompt, settings = request.args
                assert settings == {"until": ["Question:"], "max_gen_toks": NEW_TOKENS, "do_sample": False}
                problem = truth[prompt]
                wrong = problem.completion.replace(f"#### {problem.total}", f"#### {problem.total + 1}\n#### 3")
                said[prompt] = (f"{problem.completion}\n#### 7", wrong, f" {problem.total}")[place % 3]
            return [said[request.args[0]] for request in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise NotImplementedError

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(Answering(), tasks=["topw_sums_cot"], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    assert list(said) == list(truth)
    right = sum(stated_total(text) == truth[prompt].total for prompt, text in said.items())
    assert right == 34
    assert found["results"]["topw_sums_cot"]["exact_match,strict-match"] == pytest.approx(right / 100)
