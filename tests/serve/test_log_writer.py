"""Writing the log never delays the server. A line says how many lines were dropped."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from tests.support.waiting import HANG
from topw_deploy.serve import log_writer
from topw_deploy.serve.log_writer import JsonLines, LogWriter

SIZE = 1000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait for the thread as long as it takes."""
    monkeypatch.setattr(log_writer, "_ENDING", HANG)


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


def test_a_pipe_that_nobody_reads_delays_no_line(pipe: tuple[int, int]) -> None:
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
    monkeypatch.setattr(log_writer, "_ENDING", 0.05)
    out, into = pipe
    os.set_blocking(into, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(into, bytes(SIZE)):  # fills the pipe
            pass
    os.set_blocking(into, True)
    with os.fdopen(into, "w", closefd=False) as stream:
        writer = LogWriter(stream)
        logger(writer).info("x" * SIZE)
        writer.close()
        assert writer._thread.is_alive()
        while writer._thread.is_alive():  # lets it end
            os.read(out, 2**20)
            writer._thread.join(0.05)


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


def test_a_stream_without_a_file_gets_the_lines_too() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream)
    logger(writer).info("line")
    writer.close()
    assert json.loads(stream.getvalue())["event"] == "line"
