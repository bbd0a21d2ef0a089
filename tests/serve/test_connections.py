"""A client that sends or reads too slowly loses its connection; another one keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from tests.serve.conftest import Gate
from tests.serve.live import Live, ask, live, post, read_answer, read_until_closed
from tests.support.waiting import until
from topw_deploy.serve.connections import READ, Connection

SHORT = 0.2
"""Seconds of a timeout that a test waits for. A slower machine only makes that longer."""

LONG = {"tokens": [70] * 400_000}  # more text than a socket holds
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(folder, header_timeout=SHORT, send_timeout=SHORT, max_body=2**22) as running:
        yield running


def test_a_client_that_sends_nothing_is_cut_off(server: Live) -> None:
    with server.connect() as raw:
        assert read_until_closed(raw) == b""


@pytest.mark.parametrize("start", [b"", post(ask(), close=False)], ids=["first request", "second request"])
def test_headers_that_trickle_are_cut_off(server: Live, start: bytes) -> None:
    with server.begin(start) as raw:
        if start:
            assert read_answer(raw)[0] == 200
        raw.settimeout(SHORT / 10)

        def is_cut_off() -> bool:
            try:
                raw.sendall(b"X: a\r\n")
                assert raw.recv(1) == b""
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                pass
            return True

        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(HEAD)
        until(is_cut_off)


def test_a_body_that_trickles_after_its_answer_is_cut_off(server: Live) -> None:
    with server.begin(HEAD + b"Content-Length: 99999999\r\n\r\n") as raw:
        assert read_answer(raw)[0] == 413

        def is_cut_off() -> bool:
            raw.sendall(b" ")
            return server.connections == 0

        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            until(is_cut_off)


def test_an_answer_may_take_longer_than_the_headers(folder: Path, gate: Gate) -> None:
    with live(folder, header_timeout=SHORT) as slow, slow.begin(post(ask())) as raw:
        until(lambda: slow.in_use == 1)
        with slow.connect() as idle:
            assert read_until_closed(idle) == b""  # the time is over
        gate.opened.set()
        assert read_answer(raw)[0] == 200


def test_a_client_that_does_not_read_a_whole_answer_is_cut_off(server: Live) -> None:
    sent = post(LONG, "/detokenize", close=False)
    with server.begin(sent[:1000]) as raw:
        raw.sendall(sent[1000:])
        until(lambda: server.connections == 0)
        answer = read_until_closed(raw)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(answer) < len(LONG["tokens"])


def test_a_client_that_reads_gets_the_whole_of_a_long_answer(folder: Path) -> None:
    with live(folder) as patient:
        assert len(patient.call(LONG, "/detokenize")[1]["prompt"]) == len(LONG["tokens"])


class Loop:
    """An event loop whose timers the test runs."""

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
        """Call the function of the only timer with this delay."""
        (timer,) = [each for each in self.timers if each[0] == delay]
        self.timers.remove(timer)
        timer[1](*timer[2])


class Transport:
    """A connection's transport, of which the test sets how many bytes the client has not read (`left`)."""

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


def test_every_timer_is_cancelled_when_its_wait_ends(connection: tuple[Connection, Loop, Transport]) -> None:
    made, loop, transport = connection
    transport.left = 100
    made.pause_writing()
    made.resume_writing()
    assert [delay for delay, *_ in loop.timers] == [3.0]
    made.pause_writing()
    made.connection_lost(None)
    assert not loop.timers
