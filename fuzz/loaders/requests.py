"""The loaders of requests: files of prompts and answers, bodies of HTTP and Triton, and arguments of evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.loaders.loader import TEMPLATE, Loader
from tests.support.toy_model import Toy, export
from topw_deploy.errors import ParameterError, PromptError


def prompts(_scratch: Path) -> Loader:
    """Files of prompts and of questions; the first byte of an input chooses which."""
    from topw_deploy.cli.prompts import read_prompt_lines
    from topw_lab.judges import read_questions

    def lines(data: bytes) -> None:
        for line in read_prompt_lines(data, "in", {}, chat=False, system=None):
            line.digest({})

    readers: tuple[Callable[[bytes], object], ...] = (
        lines,
        lambda data: read_questions(data, "in", "alpaca_eval"),
        lambda data: read_questions(data, "in", "mt_bench"),
    )
    seeds = (
        b'\0"text"\n{"prompt_ids": [1, 2], "seed": 3, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}}',
        b'\0{"messages": [{"role": "user", "content": "a"}], "id": 7, "structured_outputs": {"regex": "a+"}}',
        b'\1[{"instruction": "a", "dataset": "b"}]',
        b'\2{"question_id": 1, "turns": ["a", "b"]}',
    )
    return Loader(lambda data: readers[data[0] % 3](data[1:]) if data else None, seeds)


def answers(scratch: Path) -> Loader:
    """The answers of an interrupted `topw generate`, which `--resume` reads.

    If the first byte of an input is 1, the run is one of questions, whose answers become prompts.
    """
    from topw_deploy.cli.batch import answer_stream, check_answers, line_bytes, read_finished
    from topw_deploy.sampling.seeds import prompt_seed
    from topw_lab.judges import Question, judged_text, read_texts, turn_prompts

    path = scratch / "answers.jsonl"
    head = {"model": "m", "run_seed": 3}
    lines = [{"index": 0, "id": 1, "request": "r", **head, "text": "a", "token_ids": [1]},
             {"index": 1, "id": "b", "request": "s", **head, "error": "no", "error_type": "PromptError"},
             {"index": 2, "id": 3, "request": "t", **head, "text": "b"}]  # fmt: skip
    questions = [Question(1, ("a", "b")), Question("b", ("a",)), Question(3, ("a",))]
    seed = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def read(data: bytes) -> None:
        path.write_bytes(data[1:])
        check_answers(path, resume=True, overwrite=False)
        found = read_finished(path, ["r", "s", "t"], [1, 1, 2], "m")
        if found.run_seed is not None:
            prompt_seed(found.run_seed, found.prompts)
        with answer_stream(path, found.size) as stream:
            stream.write(line_bytes({"index": found.prompts}))
        path.write_bytes(data[1:])
        if data[:1] == b"\1" and read_finished(path, ["r", "s", "t"], [1, 1, 1], "m").prompts == 3:
            texts = read_texts(path, questions)
            json.dumps(turn_prompts(questions, [texts], None)).encode()
            judged_text("alpaca_eval", questions, [texts], "g", "d").encode()

    good = seed.replace(b'"error": "no", "error_type": "PromptError"', b'"text": "c"')
    return Loader(read, (b"\0" + seed, b"\0" + seed[:-20], b"\1" + good, *(b"\0" + json.dumps(line).encode()
                         for line in lines)))  # fmt: skip


def triton(scratch: Path) -> Loader:
    """Triton's inputs for an engine with a toy model; the bits of the first byte of an input choose which there are."""
    import asyncio

    from topw_deploy.engine import Engine
    from topw_deploy.runtime import TopWModel
    from topw_deploy.triton.repository import read_request, response_outputs

    place = export(scratch / "toy", Toy.random(3), form="grouped", chat_template=TEMPLATE)
    engine = Engine(TopWModel.from_pretrained(place, provider="cpu", intra_op_num_threads=1), max_batch=2)
    loop = asyncio.new_event_loop()

    async def ask(inputs: dict[str, np.ndarray]) -> None:
        prompt, bounded, streams = read_request(inputs.get)
        if isinstance(bounded.get("max_new_tokens"), int):
            bounded["max_new_tokens"] = min(bounded["max_new_tokens"], 4)
        bounded.setdefault("max_new_tokens", 2)
        async for _ in response_outputs(engine, prompt, bounded, streams):
            pass

    def read(data: bytes) -> None:
        kind, rest = data[:1] or b"\0", data[1:]
        inputs: dict[str, np.ndarray] = {}
        if kind[0] & 1:
            inputs["input_ids"] = np.frombuffer(rest[: len(rest) // 8 * 8][:64], np.int64)
        else:
            inputs["text_input"] = np.array([b"ab" if kind[0] & 4 else rest], np.object_)
        if kind[0] & 2:
            inputs["parameters"] = np.array([rest], np.object_)
        if kind[0] & 8:
            inputs["seed"] = np.frombuffer(rest[:8].ljust(8), np.uint64)
        if kind[0] & 16:
            inputs["stream"] = np.array([[True]])
        loop.run_until_complete(ask(inputs))

    parameters = {"temperature": 0.5, "lam": 0.2, "max_new_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1.5},
                  "structured_outputs": {"regex": "a+"}, "num_return_sequences": 2, "rule": "top_p", "top_p": 0.9,
                  "logprobs": 1, "bad_words_ids": [[1, 2]], "eos_token_id": [1]}  # fmt: skip
    written = json.dumps(parameters).encode()
    ids = np.array([3, 4, 5], np.int64).tobytes()
    return Loader(read, (b"\6" + written, b"\x16" + written, b"\x0dabcdefgh", b"\1" + ids, b"\0text"))


def harness(_scratch: Path) -> Loader:
    """The arguments of the model class for evaluations, as JSON."""
    from topw_lab.harness import read_arguments

    def read(data: bytes) -> None:
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ParameterError("not arguments")
        read_arguments(given)

    whole = {"path": "out", "max_gen_toks": 5, "batch_size": "auto:2", "max_batch_size": 4, "seed": "3",
             "chat_template_args": '{"a": 1}', "enable_thinking": False, "temperature": 0.5, "lam": 0.3}  # fmt: skip
    return Loader(read, (json.dumps(whole).encode(),))


def bodies(scratch: Path) -> Loader:
    """Bodies of HTTP requests to a server with a toy model; the first byte of an input chooses the path.

    A status of 500 or more but 503 is a finding.
    """
    from starlette.testclient import TestClient

    from topw_deploy.serve.app import create_app
    from topw_deploy.serve.service import ServeOptions

    place = export(scratch / "toy", Toy.random(3), form="grouped", with_logits=True, chat_template=TEMPLATE)
    opening: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}
    client = TestClient(create_app(ServeOptions(models={"toy": place}, opening=opening)), raise_server_exceptions=False)
    client.__enter__()
    while client.get("/health").status_code != 200:
        pass
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/topw/inspect")
    message = {"role": "user", "content": "Hi"}
    common = {"temperature": 0.5, "seed": 1, "max_tokens": 2, "stop": ["x"], "top_p": 0.9, "rule": "top_p"}
    seeds = (
        (0, {"messages": [message], **common, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (0, {"messages": [message], "max_tokens": 2, "response_format": {"type": "json_object"}, "logprobs": True}),
        (0, {"messages": [message], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
        (1, {"prompt": ["a", "b"], **common, "n": 2, "logit_bias": {"5": 1.5}, "logprobs": 1, "echo": False}),
        (2, {"input": "a", "max_output_tokens": 2}),
        (3, {"prompt": "a"}),
        (4, {"tokens": [3, 4]}),
        (5, {"prompt_token_ids": [3, 4], "token_ids": [5, 6], "position": 1, **common, "repetition_penalty": 1.2}),
    )

    def read(data: bytes) -> None:
        if data:
            response = client.post(paths[data[0] % len(paths)], content=data[1:])
            assert response.status_code < 500 or response.status_code == 503, (
                response.status_code,
                response.text[:200],
            )
            assert "internal_error" not in response.text
            if response.status_code >= 400:
                raise PromptError(response.json()["error"]["message"])

    return Loader(read, tuple(bytes([path]) + json.dumps(body).encode() for path, body in seeds))
