"""Hostile bytes: each gets an answer or a closed connection, and then others still get their own texts."""

from __future__ import annotations

import contextlib
import json
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import HELLO, HOT
from tests.serve.live import SEEDS, TEXT, Live, ask, live, post, read_answer, read_until_closed
from tests.support.waiting import HANG, until
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime import guide as grammars

pytestmark = pytest.mark.slow

MIB = 2**20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: t\r\n"


@pytest.fixture(scope="module")
def texts(model: TopWModel) -> dict[int, str]:
    """The answers to `ask`, by seed."""
    return {seed: model.generate("ab", max_new_tokens=6, seed=seed, **HOT).text for seed in SEEDS}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(folder, max_body=MIB, engine={"max_queue": 64}) as running:
        yield running


@pytest.fixture(autouse=True)
def others_get_their_own_texts(server: Live, texts: dict[int, str]) -> Iterator[None]:
    yield
    assert [server.text(seed) for seed in SEEDS] == list(texts.values())


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health\r\n\r\n",  # HTTP/0.9
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /he\x00alth HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : t\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: t\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: t\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: t\r\n" + b"X: " + b"a" * 700_000 + b"\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: +5\r\n\r\nabcde",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;" + b"x" * 70_000 + b"\r\nabcde\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabcde\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    ],
)
def test_bytes_that_are_no_http_are_refused(server: Live, sent: bytes) -> None:
    answer = server.send(sent)
    assert set(statuses(answer)) <= {400, 404, 431, 501}
    assert not answer or b'{"error":{"message":' in answer


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_a_length_that_is_stated_twice_smuggles_no_request(server: Live, head: bytes) -> None:
    answer = server.send(head + b"0\r\n\r\n" + HEALTH + b"\r\n")
    assert statuses(answer) == [400]
    assert b'"code":"ambiguous_length"' in answer


LENGTH = b"Content-Length: 3145728\r\n"
LONG = b"a" * 3 * MIB


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nHost: t\r\nX: " + LONG, 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nHost: t\r\n" + b"X: a\r\n" * MIB, 431, "headers_too_large"),
        (b"GET /" + LONG, 431, "headers_too_large"),
        (b"no HTTP\r\n\r\n" + LONG, 400, "invalid_http"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nz\r\n" + LONG, 400, "invalid_http"),
        (HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n300000\r\n" + LONG, 400, "ambiguous_length"),
        (HEAD + b"Connection: close\r\n" + LENGTH + b"\r\n" + LONG, 413, "body_too_large"),
        (HEAD.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + LONG, 413, "body_too_large"),
        (
            HEAD + b"Content-Encoding: br\r\nConnection: close\r\n" + LENGTH + b"\r\n" + LONG,
            415,
            "unsupported_encoding",
        ),
    ],
    ids=range(9),
)
def test_an_answer_arrives_although_the_request_was_not_read_to_its_end(
    server: Live, sent: bytes, status: int, code: str
) -> None:
    with server.connect() as raw:
        raw.sendall(sent)  # raises if the server closes the connection, which over TCP loses the answer
        found, answer = read_answer(raw)
    assert (found, answer["error"]["code"]) == (status, code)
    until(lambda: server.connections == 0)


def test_pipelined_requests_are_answered_in_their_order(server: Live, texts: dict[int, str]) -> None:
    seeds = [*SEEDS] * 4
    requests = [post(ask(seed), close=index == len(seeds) - 1) for index, seed in enumerate(seeds)]
    answer = server.send(b"".join(requests))
    assert statuses(answer) == [200] * len(seeds)
    found = [json.loads(body)["choices"][0]["text"] for body in re.findall(rb"^(\{.*?\})(?=HTTP/|\Z)", answer, re.M)]
    assert found == [texts[seed] for seed in seeds]


def test_a_body_in_chunks_of_one_byte_is_read_whole(server: Live, texts: dict[int, str]) -> None:
    data = json.dumps(ask(1)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
    answer = server.send(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == texts[1]


def test_a_body_of_100_mb_is_refused_before_it_is_sent(server: Live) -> None:
    with server.connect() as raw:
        raw.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n{")
        status, answer = read_answer(raw)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_a_body_without_a_length_is_read_to_the_limit(server: Live) -> None:
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    with server.connect() as raw:
        raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        while not select.select([raw], [], [], 0)[0]:
            raw.sendall(chunk)
            sent += len(chunk)
            assert sent < 100 * MIB
        status, answer = read_answer(raw)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_connections_of_clients_that_leave_amid_a_body_are_closed(server: Live) -> None:
    for sent in (HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
        with server.connect() as raw:
            raw.sendall(sent)
    until(lambda: server.connections == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(50_000)}}, "logit_bias"),
        ({"bad_words": ["x"] * 100_000}, "bad_words"),
        ({"bad_words_ids": [[5, 6]] * 50_000}, "bad_words_ids"),
        ({"suppress_tokens": [5] * 100_000}, "suppress_tokens"),
        ({"n": 1_000_000}, "n"),
        ({"prompt": ["ab"] * 50_000}, "prompt"),
        ({"prompt": ["ab"] * 60, "n": 60}, "prompt"),
        ({"prompt": [5] * 200_000}, "prompt"),
        ({"prompt": "ab" * 200_000}, "prompt"),
    ],
)
def test_lists_that_are_too_long_are_refused(
    server: Live, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    status, answer = server.call(ask(stream=stream, **fields))
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert len(json.dumps(answer)) < 4000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/v1/responses"])
def test_others_are_answered_while_a_grammar_compiles(
    server: Live, texts: dict[int, str], monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    compiling, opened, compile_grammar = threading.Event(), threading.Event(), grammars.compile_grammar

    def slow(*arguments: Any) -> Any:
        compiling.set()
        assert opened.wait(HANG)
        return compile_grammar(*arguments)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    prompt = {TEXT: {"prompt": "ab"}, "/v1/responses": {"input": "Hi"}}.get(path, {"messages": HELLO})
    new = {"structured_outputs": {"regex": f"[ab]{{{len(path)}}}{'c' * stream}"}}  # the server keeps those it compiled
    with server.connect() as raw:
        raw.sendall(post({**prompt, **new, "seed": 1, "stream": stream}, path))
        assert compiling.wait(HANG)
        try:
            assert [server.text(seed) for seed in SEEDS] == list(texts.values())
        finally:
            opened.set()
        assert statuses(read_until_closed(raw)) == [200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"bad_words": ["xyz"]}, {"allowed_token_ids": [5, 6] * 600}])
def test_parameters_that_take_long_to_check_are_checked_in_another_thread(
    server: Live, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], stream: bool
) -> None:
    threads: list[int] = []
    prepare = TopWModel.prepare

    def recording(*arguments: Any, **parameters: Any) -> Any:
        threads.append(threading.get_ident())
        return prepare(*arguments, **parameters)

    monkeypatch.setattr(TopWModel, "prepare", recording)
    assert statuses(server.send(post(ask(stream=stream, **fields)))) == [200]
    assert threads
    assert server.thread not in threads


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def nested(expression: str, depth: int) -> str:
    for _ in range(depth):
        expression = f"({expression}){{9}}"
    return expression


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a{1,900}){1,900}"},
        {"regex": nested("a|b", 12)},
        {"regex": "(.*a){60}"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"json": nested_schema(60)},
        {"json": nested_schema(300)},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"anyOf": [nested_schema(3)] * 200}},
        {"json": {"type": "array", "minItems": 10**9}},
        {"json": {"type": "string", "pattern": "(x+x+)+y", "maxLength": 10**9}},
        {"grammar": "start: a\na: a a | b\nb: a b | /x*/"},
        {"choice": ["ab" * 10] * 2500},
    ],
)
def test_bombs_as_grammars_are_answered(server: Live, constraint: dict[str, Any]) -> None:
    """How long each may take is bounded in runtime/structured."""
    status, answer = server.call(ask(structured_outputs=constraint, max_tokens=2))
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]["code"] in ("invalid_grammar", "invalid_json"), answer


def test_connections_above_the_limit_are_refused(folder: Path) -> None:
    with live(folder, max_connections=3) as small, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(small.connect()).sendall(b"G")
        until(lambda: small.connections == 3)
        assert statuses(small.send(HEALTH + b"Connection: close\r\n\r\n")) == [503]
