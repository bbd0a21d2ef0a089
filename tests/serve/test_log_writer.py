"""The log never delays the server, and says how many lines it dropped."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from topw_deploy.serve.access import JsonLines
from topw_deploy.serve.log_writer import LogWriter

SIZE = 1000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def logger(writer: LogWriter) -> logging.Logger:
    writer.setFormatter(JsonLines())
    found = logging.Logger("test", logging.INFO)
    found.addHandler(writer)
    return found


def test_an_unread_pipe_delays_nobody(pipe: tuple[int, int]) -> None:
    out, into = pipe
    with os.fdopen(into, "w", closefd=False) as stream:
        writer = LogWriter(stream, most=10)
        log = logger(writer)
        for number in range(SIZE):  # far more than a pipe and the queue hold
            log.info("x" * 1000, extra={"facts": {"number": number}})
        numbers, dropped = [], 0
        with os.fdopen(out, "r", closefd=False) as reader:
            while len(numbers) + dropped < SIZE:
                line = json.loads(reader.readline())
                dropped += line.get("lines", 0)
                numbers += [line["number"]] if "number" in line else []
        writer.close()
    assert dropped > 0
    assert numbers == sorted(set(numbers))
    assert len(numbers) + dropped == SIZE


def test_closing_writes_the_last_lines(pipe: tuple[int, int]) -> None:
    out, into = pipe
    with os.fdopen(into, "w", closefd=False) as stream:
        writer = LogWriter(stream)
        log = logger(writer)
        for number in range(20):
            log.info("line %d \udfff", number)
        writer.close()
        writer.close()
    lines = os.read(out, 2**16).decode().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [f"line {number} \udfff" for number in range(20)]


def test_closing_gives_up_on_a_pipe_that_nobody_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topw_deploy.serve.log_writer._ENDING", 0.05)
    _, into = pipe
    with os.fdopen(into, "w", closefd=False) as stream:
        writer = LogWriter(stream, most=2)
        for _ in range(200):
            logger(writer).info("x" * 1000)
        writer.close()
        os.read(pipe[0], 2**20)  # lets the thread go on


def test_a_pipe_without_a_reader_is_ignored() -> None:
    out, into = os.pipe()
    os.close(out)
    with os.fdopen(into, "w") as stream:
        writer = LogWriter(stream)
        log = logger(writer)
        log.info("lost")
        log.info("lost too")
        writer.close()
        assert not writer._thread.is_alive()


def test_a_stream_without_a_file(pipe: tuple[int, int]) -> None:
    stream = io.StringIO()
    writer = LogWriter(stream)
    logger(writer).info("line")
    writer.close()
    assert json.loads(stream.getvalue())["event"] == "line"
