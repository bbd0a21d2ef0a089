"""`topw generate --format`: read questions and write answers in the file formats of AlpacaEval and MT-Bench.

AlpacaEval reads a JSON list of objects with `instruction`, `output`, `generator` and `dataset`. MT-Bench's tools
(FastChat) read JSON lines with `question_id`, `answer_id`, `model_id`, `choices` (each with `index` and `turns`) and
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
from topw_deploy.plain_text import decode_text, numbered_lines

FORMATS = ("alpaca_eval", "mt_bench")
_LISTS = {
    "alpaca_eval": 'a JSON list, or JSON lines, of texts or {"instruction": "text"}',
    "mt_bench": 'JSON lines of {"question_id": 81, "turns": ["text", "text"]}',
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    turns: the user's messages; AlpacaEval has one.
    dataset: AlpacaEval's name for the question's origin, or None.
    """

    id: str | int
    turns: tuple[str, ...]
    dataset: str | None = None


def read_questions(data: bytes, where: str, form: str) -> list[Question]:
    """Read and check the questions of a file. Other fields, such as reference answers, are ignored.

    Raises PromptError for a question of another format, an id that occurs twice, and a file without questions.
    """
    found: list[Question] = []
    seen: set[str | int] = set()
    for place, value in _values(data, where, form):
        question = _alpaca(value, len(found)) if form == "alpaca_eval" else _mt_bench(value)
        if question is None:
            raise PromptError(f"{place} is not a question of {form}; write {_LISTS[form]}.")
        if question.id in seen:
            raise PromptError(f"{place} has the question_id {question.id!r:.60} of another question; make ids unique.")
        seen.add(question.id)
        found.append(question)
    if not found:
        raise PromptError(f"{where} holds no question; write {_LISTS[form]}.")
    return found


def turn_prompts(
    questions: Sequence[Question], answers: Sequence[Mapping[str | int, str]], system: str | None
) -> list[dict[str, Any]]:
    """The prompts of the next turn: `{"id", "prompt"}` for the first turn, else `{"id", "messages"}`.

    answers: for each turn so far, question id -> answer.
    """
    turn = len(answers)
    if turn == 0:
        return [{"id": question.id, "prompt": question.turns[0]} for question in questions]
    start = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        if len(question.turns) > turn:
            messages = list(start)
            for asked, answered in zip(question.turns[:turn], answers, strict=True):
                messages.append({"role": "user", "content": asked})
                messages.append({"role": "assistant", "content": answered[question.id]})
            found.append(
                {"id": question.id, "messages": [*messages, {"role": "user", "content": question.turns[turn]}]}
            )
    return found


def judged_text(
    form: str, questions: Sequence[Question], answers: Sequence[Mapping[str | int, str]], generator: str, dataset: str
) -> str:
    """The text of the output file.

    generator: the model's name in the file.
    dataset: used for questions that do not name theirs.
    """
    if form == "alpaca_eval":
        listed = [
            {
                "instruction": question.turns[0],
                "output": answers[0][question.id],
                "generator": generator,
                "dataset": question.dataset or dataset,
            }
            for question in questions
        ]
        return json.dumps(listed, indent=2) + "\n"
    now = time.time()
    lines = []
    for question in questions:
        turns = [answers[turn][question.id] for turn in range(len(question.turns))]
        line = {
            "question_id": question.id,
            "answer_id": _digest([generator, question.id, turns]),
            "model_id": generator,
            "choices": [{"index": 0, "turns": turns}],
            "tstamp": now,
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def texts_of(path: Path, questions: Sequence[Question]) -> dict[str | int, str]:
    """Read the answers of a finished run of `topw generate --prompts-jsonl`: prompt id -> text without outer spaces.

    questions: those that the run answered, in order. Raises PromptError for other lines: a resumed run keeps the lines
    that it finds.
    """
    found: dict[str | int, str] = {}
    lines = path.read_bytes().split(b"\n")
    for number, question in enumerate(questions, 1):
        text = _answer_in(lines[number - 1] if number <= len(lines) else b"", question)
        if text is None:
            raise PromptError(
                f"line {number} of {path} is not the answer to question {question.id!r:.60}; start again with "
                "--overwrite."
            )
        found[question.id] = text.strip()
    return found


def _answer_in(line: bytes, question: Question) -> str | None:
    try:
        given = json.loads(line)
        if given["id"] != question.id or not isinstance(given["text"], str):
            return None
        given["text"].encode()  # half of a surrogate pair
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(given["text"])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:22]  # as long as FastChat's


def _values(data: bytes, where: str, form: str) -> list[tuple[str, Any]]:
    """(The place of each question, for messages; its JSON value)."""
    text = decode_text(data, where)
    if text.lstrip().startswith("["):
        return [(f"question {number} of {where}", value) for number, value in enumerate(_parsed(text, where, form), 1)]
    lines = numbered_lines(data, where)
    return [(f"line {number} of {where}", _parsed(line, f"line {number} of {where}", form)) for number, line in lines]


def _parsed(text: str, place: str, form: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise PromptError(f"{place} is not JSON; write {_LISTS[form]}.") from None


def _alpaca(value: Any, index: int) -> Question | None:
    value = {"instruction": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("instruction"), str):
        return None
    dataset = value.get("dataset")
    return Question(index, (value["instruction"],), dataset if isinstance(dataset, str) else None)


def _mt_bench(value: Any) -> Question | None:
    if not isinstance(value, dict):
        return None
    number, turns = value.get("question_id"), value.get("turns")
    if not isinstance(number, (str, int)) or isinstance(number, bool) or not isinstance(turns, list) or not turns:
        return None
    return Question(number, tuple(turns)) if all(isinstance(turn, str) for turn in turns) else None
