"""Files of prompts and questions, and arguments of evaluations, that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.attacks import refused
from topw_deploy.cli.judge_files import read_questions
from topw_deploy.cli.prompt_lines import prompt_lines
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.harness.arguments import read_arguments
from topw_deploy.stats.request import prompts_of_json_lines

LINES: dict[str, bytes] = {
    "lists in lists": b"[" * 1_000_000,
    "objects in objects": b'{"prompt":' * 1_000_000,
    "an integer of a million digits": b'{"prompt": "a", "seed": 1' + b"0" * 1_000_000 + b"}",
    "UTF-16": '"text"\n'.encode("utf-16"),
    "a zero byte": b'"a\0b"',
    "half a character": b'"\xc3"',
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.",
    "nothing": b"\n\n",
}
"""Refused wherever a file of JSON lines is read."""

READERS: dict[str, Callable[[bytes], object]] = {
    "prompts": lambda data: prompt_lines(data, "in.jsonl", {}, chat=False, system=None),
    "stats": lambda data: prompts_of_json_lines(data, "in.jsonl"),
    "AlpacaEval": lambda data: read_questions(data, "in.jsonl", "alpaca_eval"),
    "MT-Bench": lambda data: read_questions(data, "in.jsonl", "mt_bench"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LINES)
def test_lines_that_are_a_bomb_are_refused(reader: str, name: str) -> None:
    with refused(PromptError, "in.jsonl"):
        READERS[reader](LINES[name])


PROMPTS: dict[str, tuple[bytes, str]] = {
    "a name twice": (b'{"prompt": "a", "prompt": "b"}', "has 'prompt' twice"),
    "half a surrogate pair": (b'"\\ud800"', "half of a surrogate pair"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    "an overflow": (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
    "2**40 answers": (b'{"prompt": "a", "num_return_sequences": 1099511627776}', "num_return_sequences is 1099"),
    "a Python object": (b'{"prompt": "a", "streamer": "os.system"}', "streamer is not allowed here"),
    "an unknown parameter": (b'{"prompt": "a", "__class__": 1}', "__class__"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_with_values_that_no_model_takes_is_refused_by_its_line(name: str) -> None:
    line, reason = PROMPTS[name]
    with refused(PromptError, rf"line 1 of in\.jsonl.*{reason}"):
        READERS["prompts"](line)


def test_depth_alone_decides_nothing_but_a_typed_error() -> None:
    """Parsing, checking and writing JSON have bounds of their own, which differ by a few levels."""
    for depth in (*range(90, 110), *range(900, 1000)):
        for line in (b"[" * depth + b"]" * depth, b'{"messages": [{"a": ' + b"[" * depth + b"]" * depth + b"}]}"):
            try:
                for found in prompt_lines(line, "in.jsonl", {}, chat=False, system=None):
                    found.request({})
            except PromptError:
                continue


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
        read_arguments({"path": "out", **given})
