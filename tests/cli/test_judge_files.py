"""`topw generate --format`: files that AlpacaEval and MT-Bench's judge read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import Invoke
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.seeds import prompt_seed
from topw_lab.judges import Question, judged_text, read_questions, turn_prompts

ALPACA: list[Any] = [
    {"instruction": "ab", "dataset": "koala", "output": "a reference", "generator": "other"},
    {"instruction": "cde"},
    "a story",
]
MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["hi", "again"]},
    {"question_id": 90, "turns": ["one turn"]},
    {"question_id": 82, "turns": ["ho", "more"], "reference": ["x", "y"]},
]
SETTINGS = ("--max-new-tokens", 6, "--temperature", 2, "--seed", 4)


def lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text(lines(MT_BENCH))
    return path


@pytest.mark.parametrize("written", [json.dumps, lines])
def test_alpaca_evals_list_has_four_fields_in_the_order_of_the_questions(
    invoke: Invoke, random_model: Path, tmp_path: Path, written: Any
) -> None:
    source, out = tmp_path / "creative.json", tmp_path / "out.json"
    source.write_text(written(ALPACA))
    command = ("generate", random_model, "--prompts-jsonl", source, "--output", out, "--format", "alpaca_eval")
    assert invoke(*command, "--model-id", "mine", "--batch-size", 2, *SETTINGS).exit_code == 0
    found = json.loads(out.read_text())
    model = TopWModel.from_pretrained(random_model, provider="cpu")
    texts = [
        model.generate(text, max_new_tokens=6, temperature=2, seed=prompt_seed(4, index)).text.strip()
        for index, text in enumerate(("ab", "cde", "a story"))
    ]
    assert found == [
        {"instruction": "ab", "output": texts[0], "generator": "mine", "dataset": "koala"},
        {"instruction": "cde", "output": texts[1], "generator": "mine", "dataset": "creative"},
        {"instruction": "a story", "output": texts[2], "generator": "mine", "dataset": "creative"},
    ]
    with pytest.raises(ParameterError, match=r"out.json exists; continue it with --resume"):
        invoke(*command, *SETTINGS)


def test_mt_benchs_second_turn_follows_the_answer_to_the_first(
    invoke: Invoke, random_model: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", questions, "--output", out, "--format", "mt_bench")
    assert invoke(*command, "--chat", "--system", "be brief", *SETTINGS).exit_code == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [list(line) for line in found] == [["question_id", "answer_id", "model_id", "choices", "tstamp"]] * 3
    assert [(line["question_id"], len(line["choices"][0]["turns"])) for line in found] == [(81, 2), (90, 1), (82, 2)]
    assert len({line["answer_id"] for line in found}) == 3
    model = TopWModel.from_pretrained(random_model, provider="cpu")
    history = [{"role": "system", "content": "be brief"}]
    for turn, asked in enumerate(("ho", "more")):
        history.append({"role": "user", "content": asked})
        seed = prompt_seed(4, 2 - turn)  # its place among the prompts of that turn
        text = model.chat(history, max_new_tokens=6, temperature=2, seed=seed).text.strip()
        history.append({"role": "assistant", "content": text})
    assert found[2]["choices"] == [{"index": 0, "turns": [history[2]["content"], history[4]["content"]]}]


def test_an_interrupted_run_is_resumed_in_the_turn_that_it_had_reached(
    invoke: Invoke, random_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model.jsonl"
    command = ("generate", random_model, "--prompts-jsonl", questions, "--output", out, "--format", "mt_bench",
               "--chat", "--max-new-tokens", 6, "--temperature", 2)  # fmt: skip
    calls, generate = [], TopWModel.generate

    def counted(model: TopWModel, prompt: Any, **given: Any) -> Any:
        calls.append(prompt)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(model, prompt, **given)

    monkeypatch.setattr(TopWModel, "generate", counted)
    assert invoke(*command).exit_code != 0
    assert not out.exists()
    assert invoke(*command, "--resume").exit_code == 0
    assert len(calls) == 6, "three first turns, two second ones, one of them twice"
    first = [json.loads(line)["run_seed"] for line in Path(f"{out}.turn-1.jsonl").read_text().splitlines()]
    second = [json.loads(line)["run_seed"] for line in Path(f"{out}.turn-2.jsonl").read_text().splitlines()]
    assert len({*first, *second}) == 1


def test_a_question_that_fails_leaves_no_file_for_the_judge(invoke: Invoke, random_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "q.json", tmp_path / "out.json"
    source.write_text(json.dumps(["ab", "x" * 500]))
    with pytest.raises(PromptError, match=r"1 of 2 prompts failed; their lines in .*out.json.turn-1.jsonl hold"):
        invoke(
            "generate", random_model, "--prompts-jsonl", source, "--output", out, "--format", "alpaca_eval", *SETTINGS
        )
    assert not out.exists()


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("alpaca_eval", "", "holds no question; write a JSON list"),
        ("alpaca_eval", '["a", 3]', "question 2 of f is not a question of alpaca_eval"),
        ("alpaca_eval", '{"prompt": "a"}', "line 1 of f is not a question of alpaca_eval"),
        ("alpaca_eval", "[1,", "f is not JSON"),
        ("mt_bench", "plain text", "line 1 of f is not JSON; write JSON lines of"),
        ("mt_bench", '{"question_id": 1, "turns": []}', "line 1 of f is not a question of mt_bench"),
        ("mt_bench", '{"question_id": 1, "turns": ["a"]}\n' * 2, "line 2 of f has the question_id 1 of another"),
    ],
)
def test_other_files_are_refused_with_the_place(form: str, text: str, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        read_questions(text.encode(), "f", form)


def test_options_that_do_not_fit_are_refused(invoke: Invoke, random_model: Path, questions: Path) -> None:
    command = ("generate", random_model, "--prompts-jsonl", questions)
    for words, said in (
        (("--model-id", "x"), "--model-id needs --format"),
        (("--format", "mt_bench"), "--format needs --output"),
        (("--format", "mt_bench", "--output", questions.parent / "o"), "have up to 2 turns"),
        (
            ("--format", "mt_bench", "--output", questions.parent / "o", "--num-return-sequences", 2),
            "one answer per question",
        ),
    ):
        result = invoke(*command, *words)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert "--format needs --prompts-jsonl" in invoke("generate", random_model, "x", "--format", "mt_bench").stderr


def test_characters_outside_ascii_survive() -> None:
    questions = [Question("q", ("größe",), None)]
    assert turn_prompts(questions, [], "unused") == [{"id": "q", "prompt": "größe"}]
    answers: list[Any] = [{"q": "grün 😀\u2028"}]
    (one,) = json.loads(judged_text("alpaca_eval", questions, answers, "m", "d"))
    other = json.loads(judged_text("mt_bench", questions, answers, "m", "d"))
    assert one["output"] == other["choices"][0]["turns"][0] == "grün 😀\u2028"
