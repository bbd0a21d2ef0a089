"""Files of prompts and questions that must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.attacks import refused
from topw_deploy.cli.prompts import read_prompt_lines
from topw_deploy.errors import PromptError
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
