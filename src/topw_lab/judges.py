"""`topw generate --format`: read questions, and write answers, in the file formats of AlpacaEval and MT-Bench.

AlpacaEval reads a JSON list of objects with `instruction`, `output`, `generator` and `dataset`. FastChat, MT-Bench's
tool, reads JSON lines with `question_id`, `answer_id`, `model_id`, `choices` (each with `index` and `turns`) and
`tstamp`. An MT-Bench question has several turns; each turn follows the answer to the previous one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import PromptError
from topw_deploy.text import decode_text, numbered_lines

FORMATS = ("alpaca_eval", "mt_bench")
_EXPECTED = {
    "alpaca_eval": 'a JSON list, or JSON lines, of texts or {"instruction": "text"}',
    "mt_bench": 'JSON lines of {"question_id": 81, "turns": ["text", "text"]}',
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    id: MT-Bench's `question_id`; for AlpacaEval, the place in the file.
    turns: the user's messages. A question of AlpacaEval has one.
    dataset: AlpacaEval's name for the origin of the question; None without.
    """

    id: str | int
    turns: tuple[str, ...]
    dataset: str | None = None


def read_questions(data: bytes, where: str, form: str) -> list[Question]:
    """Read and check the questions of a file. Other fields, such as reference answers, are ignored.

    form: one of FORMATS.

    Raises PromptError for a question of another format, an id that occurs twice, and a file without questions.
    """
    text, found = decode_text(data, where), dict[str | int, Question]()
    if text.lstrip().startswith("["):
        values = enumerate(_parse_json(text, where, form), 1)
        places = [(f"question {number} of {where}", value) for number, value in values]
    else:
        lines = ((f"line {number} of {where}", line) for number, line in numbered_lines(data, where))
        places = [(place, _parse_json(line, place, form)) for place, line in lines]
    for place, value in places:
        question = _alpaca_question(value, len(found)) if form == "alpaca_eval" else _mt_bench_question(value)
        if question is None:
            raise PromptError(f"{place} is not a question of {form}; write {_EXPECTED[form]}.")
        if question.id in found:
            raise PromptError(f"{place} has the question_id {question.id!r:.60} of another question; make ids unique.")
        found[question.id] = question
    if not found:
        raise PromptError(f"{where} holds no question; write {_EXPECTED[form]}.")
    return list(found.values())


def turn_prompts(
    questions: Sequence[Question], answers: Sequence[Mapping[str | int, str]], system: str | None
) -> list[dict[str, Any]]:
    """The prompts of the next turn: `{"id", "prompt"}` for the first turn, `{"id", "messages"}` for later ones.

    answers: for each earlier turn, question id -> answer.
    system: system message of later turns. None: no such message.
    """
    turn = len(answers)
    if turn == 0:
        return [{"id": question.id, "prompt": question.turns[0]} for question in questions]
    prompts = []
    for question in questions:
        if len(question.turns) > turn:
            messages = [] if system is None else [{"role": "system", "content": system}]
            for number, content in enumerate(question.turns[: turn + 1]):
                messages.append({"role": "user", "content": content})
                if number < turn:
                    messages.append({"role": "assistant", "content": answers[number][question.id]})
            prompts.append({"id": question.id, "messages": messages})
    return prompts


def judged_text(
    form: str, questions: Sequence[Question], answers: Sequence[Mapping[str | int, str]], generator: str, dataset: str
) -> str:
    """The text of the file that the benchmark's judge reads.

    form: one of FORMATS.
    answers: for each turn, question id -> answer.
    generator: the model's name in the file.
    dataset: origin of the questions that do not name their own.
    """
    if form == "alpaca_eval":
        fields = ("instruction", "output", "generator", "dataset")
        listed = [
            dict(zip(fields, (one.turns[0], answers[0][one.id], generator, one.dataset or dataset), strict=True))
            for one in questions
        ]
        return json.dumps(listed, indent=2) + "\n"
    now, lines = time.time(), []
    for question in questions:
        turns = [answers[turn][question.id] for turn in range(len(question.turns))]
        digest = hashlib.sha256(json.dumps([generator, question.id, turns]).encode()).hexdigest()
        line = {
            "question_id": question.id,
            "answer_id": digest[:22],  # as long as FastChat's
            "model_id": generator,
            "choices": [{"index": 0, "turns": turns}],
            "tstamp": now,
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def read_texts(path: Path) -> dict[str | int, str]:
    """Read the answers of a finished run of `topw generate --prompts-jsonl`: question id -> text without outer spaces.

    The run has checked that each line answers its question, also the lines that a resumed run found.
    """
    answers = map(json.loads, path.read_bytes().splitlines())
    return {answer["id"]: answer["text"].strip() for answer in answers}


def _parse_json(text: str, place: str, form: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise PromptError(f"{place} is not JSON; write {_EXPECTED[form]}.") from None


def _alpaca_question(value: Any, index: int) -> Question | None:
    value = {"instruction": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("instruction"), str):
        return None
    dataset = value.get("dataset")
    return Question(index, (value["instruction"],), dataset if isinstance(dataset, str) else None)


def _mt_bench_question(value: Any) -> Question | None:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    number, turns = fields.get("question_id"), fields.get("turns")
    is_id = isinstance(number, (str, int)) and not isinstance(number, bool)
    is_list = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
    return Question(fields["question_id"], tuple(fields["turns"])) if is_id and is_list else None
