"""Clients that send or read too slowly lose their connection; others do not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from tests.serve.conftest import Gate
from tests.serve.live import Live, ask, live, post, read_answer, until, until_closed
from topw_deploy.serve.connections import READ, Connection

SHORT = 0.2
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(folder, header_timeout=SHORT, send_timeout=SHORT, max_body=2**22) as running:
        yield running


def test_a_client_that_sends_nothing_is_cut_off(server: Live) -> None:
    with server.connect() as raw:
        assert until_closed(raw) == b""


@pytest.mark.parametrize("start", [b"", post(ask(), close=False)], ids=["first request", "second request"])
def test_headers_that_trickle_are_cut_off(server: Live, start: bytes) -> None:
    with server.connect() as raw:
        if start:
            raw.sendall(start)
            assert read_answer(raw)[0] == 200
        raw.sendall(HEAD)
        raw.settimeout(SHORT / 10)
        for _ in range(6000):
            try:
                raw.sendall(b"X: a\r\n")
                assert raw.recv(1) == b""
                return
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
    raise AssertionError("the connection stayed open")


def test_a_body_that_trickles_after_its_answer_is_cut_off(server: Live) -> None:
    with server.connect() as raw:
        raw.sendall(HEAD + b"Content-Length: 99999999\r\n\r\n")
        assert read_answer(raw)[0] == 413
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(6000):
                raw.sendall(b" ")
                if server.connections == 0:
                    return
                time.sleep(0.01)
            raise AssertionError("the connection stayed open")


def test_an_answer_may_take_longer_than_the_headers(folder: Path, gate: Gate) -> None:
    with live(folder, header_timeout=SHORT) as slow, slow.connect() as raw:
        raw.sendall(post(ask()))
        until(lambda: slow.in_use == 1)
        with slow.connect() as idle:
            assert until_closed(idle) == b""  # the time is over
        gate.opened.set()
        assert read_answer(raw)[0] == 200


def test_a_client_that_does_not_read_a_whole_answer_is_cut_off(server: Live) -> None:
    tokens = [70] * 1_000_000  # more text than a socket holds
    keeping, closing = (post({"tokens": tokens}, "/detokenize", close=close) for close in (False, True))
    with server.connect() as raw:
        raw.sendall(keeping)
        until(lambda: server.connections == 1)
        until(lambda: server.connections == 0)
        answer = until_closed(raw)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(answer) < len(tokens)
    with server.connect() as raw:
        raw.sendall(closing)
        assert len(read_answer(raw)[1]["prompt"]) == len(tokens)


class Loop:
    """An event loop's timers, run by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> Any:
        timer = (delay, call, arguments)
        self.timers.append(timer)

        class Handle:
            def cancel(_) -> None:  # noqa: N805
                if timer in self.timers:
                    self.timers.remove(timer)

        return Handle()

    def run(self, delay: float) -> None:
        """Run the timer of this delay."""
        (timer,) = [each for each in self.timers if each[0] == delay]
        self.timers.remove(timer)
        timer[1](*timer[2])


class Transport:
    max_size = 2**18
    left, high, closed, aborted = 0, 2**16, False, False

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def connection() -> tuple[Connection, Loop, Transport]:
    config = uvicorn.Config(Starlette(), log_config=None, lifespan="off")
    loop, transport = Loop(), Transport()
    made = Connection(
        config=config, server_state=ServerState(), app_state={}, _loop=loop, header_timeout=3.0, send_timeout=7.0
    )
    made.connection_made(transport)
    return made, loop, transport


def test_a_client_that_reads_slowly_is_waited_for(connection: tuple[Connection, Loop, Transport]) -> None:
    made, loop, transport = connection
    assert (transport.high, transport.max_size) == (0, READ)
    transport.left = 100
    made.pause_writing()
    transport.left = 99
    loop.run(7.0)
    assert not transport.aborted
    loop.run(7.0)
    assert transport.aborted


def test_no_timer_outlives_what_it_waits_for(connection: tuple[Connection, Loop, Transport]) -> None:
    made, loop, transport = connection
    transport.left = 100
    made.pause_writing()
    made.resume_writing()
    assert [delay for delay, *_ in loop.timers] == [3.0]
    made.pause_writing()
    made.connection_lost(None)
    assert not loop.timers
