"""Prompts in JSON lines: what a line may hold, and errors that name the line."""

from __future__ import annotations

from typing import Any

import pytest

from topw_deploy.cli.prompts import PromptLine, read_prompt_lines
from topw_deploy.errors import ParameterError, PromptError


def read(data: str | bytes, given: dict[str, Any] | None = None, **chat: Any) -> list[PromptLine]:
    data = data.encode() if isinstance(data, str) else data
    return read_prompt_lines(data, "in.jsonl", given or {}, **({"chat": False, "system": None} | chat))


def test_a_line_is_a_text_or_an_object_with_text_token_ids_or_messages() -> None:
    lines = read(
        '\ufeff"a"\r\n\n   \n{"prompt": "b", "id": "x"}\n{"prompt_ids": [1, 2]}\n{"token_ids": [3], "id": 4}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}'
    )
    assert [(line.index, line.id, line.kind, line.prompt) for line in lines] == [
        (0, None, "prompt", "a"),
        (1, "x", "prompt", "b"),
        (2, None, "prompt_ids", [1, 2]),
        (3, 4, "prompt_ids", [3]),
        (4, None, "messages", [{"role": "user", "content": "hi"}]),
    ]
    assert [line.where for line in lines][:2] == ["line 1 of in.jsonl", "line 4 of in.jsonl"]


def test_a_lines_parameters_replace_those_of_the_command() -> None:
    first, second, third = read(
        '"a"\n{"prompt": "b", "temperature": 2, "lambda_geom": 0.5}\n{"prompt": "c", "max_length": 9}',
        {"temperature": 0.5, "max_new_tokens": 7},
    )
    assert first.parameters == {"temperature": 0.5, "max_new_tokens": 7}
    assert second.parameters == {"temperature": 2.0, "max_new_tokens": 7, "lam": 0.5}
    assert third.parameters == {"temperature": 0.5, "max_length": 9}


def test_a_line_may_use_the_names_of_openai_and_vllm() -> None:
    (line,) = read('{"prompt": "a", "n": 2, "max_tokens": 4, "stop": "."}')
    assert line.parameters == {"num_return_sequences": 2, "max_new_tokens": 4, "stop_strings": (".",)}
    assert line.samples == 2


def test_a_text_of_a_chat_is_the_users_message() -> None:
    text, messages = read('"hi"\n{"messages": [{"role": "user", "content": "ho"}]}', chat=True, system="Be brief.")
    assert text.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert messages.prompt == [{"role": "user", "content": "ho"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('"\\ud800"', "is not JSON"),
        ('{"prompt": "a", "temperature": NaN}', "is not JSON"),
        ('{"prompt": "a", "temperature": 1e999}', "is not JSON"),
        ("{}", "no prompt given"),
        ('{"prompt": "a", "messages": []}', "prompt and messages given"),
        ('{"prompt": [1, 2]}', "must be a text; give token ids as prompt_ids"),
        ('{"prompt_ids": [1, true]}', "must be a list of integers"),
        ('{"messages": ["hi"]}', "must be a list of objects"),
        ('{"prompt": "a", "id": [1]}', "id is .*must be a text or an integer"),
        ('{"prompt": "a", "temprature": 1}', "unknown parameter 'temprature': did you mean temperature"),
        ('{"prompt": "a", "generation_config": {"lam": 1}}', "generation_config is not allowed here"),
        ('{"prompt": "a", "num_return_sequences": 1099511627776}', "num_return_sequences is 1099"),
        ('{"prompt": "a", "temperature": [1]}', r"temperature is \[1\]"),
        ('{"prompt": "a", "max_new_tokens": 1, "max_length": 5}', "both given"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(line: str, message: str) -> None:
    with pytest.raises(PromptError, match=rf"^line 3 of in\.jsonl:? .*{message}"):
        read(f'"fine"\n\n{line}\n"fine"')


def test_a_wrong_parameter_of_the_command_is_refused_without_a_line() -> None:
    with pytest.raises(ParameterError, match=r"^temperature is -1"):
        read('"a"', {"temperature": -1})


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf\n"])
def test_a_file_without_prompts_is_refused(data: bytes) -> None:
    with pytest.raises(PromptError, match=r"in\.jsonl holds no prompt"):
        read(data)


def test_the_digest_differs_for_all_that_determines_the_answer() -> None:
    lines = read(
        '{"prompt": "1"}\n{"prompt": "1", "id": 1}\n{"prompt": "1", "lam": 1}\n{"prompt_ids": [1]}\n"2"\n'
        '{"prompt": "1", "logit_bias": {"5": 1}}\n{"prompt": "1", "stop_strings": "."}\n'
        '{"prompt": "1", "structured_outputs": {"regex": "a"}}\n{"prompt": "1", "structured_outputs": {"regex": "b"}}'
    )
    digests = [line.digest({}) for line in lines]
    assert len(set(digests)) == len(lines)
    assert lines[0].digest({}) != lines[0].digest({"max_context": 5})
    assert read('"1"')[0].digest({}) == digests[0]
