"""Files of prompts, questions and answers, and arguments of evaluations, that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import refused
from topw_deploy.cli.batch import read_finished
from topw_deploy.cli.prompts import read_prompt_lines
from topw_deploy.errors import ParameterError, PromptError
from topw_lab.harness import Arguments
from topw_lab.judges import read_questions

LINES: dict[str, bytes] = {
    "lists in lists": b"[" * 1_000_000,
    "an integer of a million digits": b'{"prompt": "a", "seed": 1' + b"0" * 1_000_000 + b"}",
    "UTF-16": '"text"\n'.encode("utf-16"),
    "a zero byte": b'"a\0b"',
    "half a character": b'"\xc3"',
    "nothing": b"\n\n",
}
"""Refused wherever a file of JSON lines is read."""

READERS: dict[str, Callable[[bytes], object]] = {
    "prompts": lambda data: read_prompt_lines(data, "in.jsonl", {}, chat=False, system=None),
    "AlpacaEval": lambda data: read_questions(data, "in.jsonl", "alpaca_eval"),
    "MT-Bench": lambda data: read_questions(data, "in.jsonl", "mt_bench"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LINES)
def test_lines_that_are_a_bomb_are_refused(reader: str, name: str) -> None:
    with refused(PromptError, "in.jsonl"):
        READERS[reader](LINES[name])


PROMPTS: dict[str, tuple[bytes, str]] = {
    "half a surrogate pair": (b'"\\ud800"', "is not JSON"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "is not JSON"),
    "an overflow": (b'{"prompt": "a", "temperature": 1e999}', "is not JSON"),
    "2**40 answers": (b'{"prompt": "a", "num_return_sequences": 1099511627776}', "num_return_sequences is 1099"),
    "a Python object": (b'{"prompt": "a", "streamer": "os.system"}', "streamer is not allowed here"),
    "an unknown parameter": (b'{"prompt": "a", "__class__": 1}', "__class__"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_with_values_that_no_model_takes_is_refused_by_its_line(name: str) -> None:
    line, reason = PROMPTS[name]
    with refused(PromptError, rf"line 1 of in\.jsonl.*{reason}"):
        READERS["prompts"](line)


HEAD = {"index": 0, "request": "r", "model": "m", "run_seed": 3}
ANSWERS: dict[str, tuple[Any, str]] = {
    "lists in lists": ("[" * 1_000_000, "was not written by this command"),
    "an integer of a million digits": ('{"index": 1' + "0" * 1_000_000 + "}", "was not written by this command"),
    "a negative seed": ({**HEAD, "run_seed": -1}, "was not written by this command"),
    "another seed": (
        {**HEAD, "index": 1, "request": "s", "run_seed": 4},
        "answers another prompt, or one with another",
    ),
    "another model": ({**HEAD, "model": "n"}, "was made with another model"),
    "a prompt beyond the last": ({**HEAD, "index": 2}, "answers another prompt"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_another_run_are_not_continued(tmp_path: Path, name: str) -> None:
    line, reason = ANSWERS[name]
    second = isinstance(line, dict) and line["index"] == 1
    lines = ([json.dumps(HEAD)] if second else []) + [line if isinstance(line, str) else json.dumps(line)]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    with refused(ParameterError, f"line {len(lines)} of .*{reason}"):
        read_finished(tmp_path / "out.jsonl", ["r", "s"], [1, 1], "m")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat_template_args": "[" * 1_000_000}, "must be a JSON object"),
        ({"chat_template_args": '{"a": 1' + "0" * 1_000_000 + "}"}, "must be a JSON object"),
        ({"max_gen_toks": "9" * 1_000_000}, "max_gen_toks is '9"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"tokenizer": "/etc/passwd"}, "tokenizer"),
    ],
)
def test_evaluation_arguments_that_are_bombs_or_run_code_are_refused(given: dict[str, Any], said: str) -> None:
    with refused(ParameterError, said):
        Arguments({"path": "out", **given})
