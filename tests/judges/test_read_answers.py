"""AlpacaEval and FastChat read the answers of `topw generate --format`, in an environment without this package.

`make judges` makes that environment and runs these tests. No real judge is called.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import Invoke, invoke  # noqa: F401  # a fixture
from tests.support.toy_model import Toy, export

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-judges"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"
SETTINGS = ("--chat", "--model-id", "mine", "--max-new-tokens", 6, "--temperature", 2, "--seed", 4)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Also in CI, only `make judges` installs these packages."""
    if not (ENVIRONMENT / "ready.stamp").exists():
        pytest.skip(f"{ENVIRONMENT.name} is missing: `make judges` makes it and runs these tests")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("judges") / "out", Toy.random(7), chat_template=TEMPLATE)


def read(*words: object) -> Any:
    program = [str(ENVIRONMENT / "bin" / "python"), "-I", str(HERE / "read_answers.py"), *map(str, words)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_alpaca_eval_pairs_our_answers_with_those_of_another_model(
    model: Path,
    invoke: Invoke,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked = [{"instruction": f"größe {word}", "dataset": "words"} for word in ("one", "two", "three")]
    questions, answers = tmp_path / "questions.json", tmp_path / "answers.json"
    questions.write_text(json.dumps(asked))
    command = ("generate", model, "--prompts-jsonl", questions, "--output", answers, "--format", "alpaca_eval")
    assert invoke(*command, *SETTINGS).exit_code == 0
    ours = json.loads(answers.read_text())
    lengths = (1, 200, 1)  # ours win, lose, win
    others = [{**one, "output": "y" * length, "generator": "other"} for one, length in zip(ours, lengths, strict=True)]
    (tmp_path / "others.json").write_text(json.dumps(others))
    found = read("alpaca_eval", answers, tmp_path / "others.json", tmp_path)
    assert found["pairs"] == [
        [one["instruction"], other["output"], one["output"], "other", "mine", "words", preference]
        for one, other, preference in zip(ours, others, (2.0, 1.0, 2.0), strict=True)
    ]
    assert found["board"]["mine"]["n_total"] == 3
    assert found["board"]["mine"]["win_rate"] == pytest.approx(200 / 3)


def test_fastchat_matches_our_answers_with_its_questions(
    model: Path,
    invoke: Invoke,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked = [
        {"question_id": 81, "category": "writing", "turns": ["größe", "more"]},
        {"question_id": 90, "category": "writing", "turns": ["once"]},
    ]
    questions, answers, folder = tmp_path / "question.jsonl", tmp_path / "mine.jsonl", tmp_path / "model_answer"
    questions.write_text("".join(json.dumps(one) + "\n" for one in asked))
    command = ("generate", model, "--prompts-jsonl", questions, "--output", answers, "--format", "mt_bench")
    assert invoke(*command, *SETTINGS).exit_code == 0
    folder.mkdir()
    answers.rename(folder / answers.name)  # FastChat would take the files of the turns for other models
    lines = [json.loads(line) for line in (folder / answers.name).read_text().splitlines()]
    one_turn, two_turns = read("mt_bench", questions, folder)
    assert one_turn == [[one["question_id"], "mine", one["choices"][0]["turns"], "mine"] for one in lines]
    assert [(match[0], len(match[2])) for match in one_turn] == [(81, 2), (90, 1)]
    assert two_turns == one_turn[:1]
