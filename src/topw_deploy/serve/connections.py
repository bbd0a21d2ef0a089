"""HTTP/1.1 connections with timeouts, which uvicorn leaves to a proxy."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("topw_deploy.serve")

READ = 16 * 1024
"""Bytes read from a connection at a time. A body may consist of one-byte chunks; to parse asyncio's usual 256 KiB of
them at once would delay all streams."""


class Connection(H11Protocol):
    """uvicorn's connection, closed if its client is too slow.

    header_timeout: seconds in which the head of a request must arrive, from the connection's start or the end of the
        last answer. They include reading the rest of a body whose answer was sent early.
    send_timeout: seconds in which the client must read some bytes of an answer.
    """

    def __init__(self, *, header_timeout: float, send_timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self._header_timeout, self._send_timeout = header_timeout, send_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Any byte that the client has not read pauses writing, which starts the timer.
        transport.set_write_buffer_limits(0)
        if hasattr(transport, "max_size"):  # asyncio's own transport
            transport.max_size = READ
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._stop_awaiting()

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()  # begins the next request if it has arrived
        if self._answering():
            self._stop_awaiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_awaiting()
        self._head_timer = self.loop.call_later(self._header_timeout, self._head_is_late)

    def _stop_awaiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self._log("no request arrived in time")
            self.transport.close()

    def _watch(self) -> None:
        self._stop_watching()
        left = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._send_timeout, self._check_progress, left)

    def _stop_watching(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_progress(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch()
            return
        self._log("a client took no bytes")
        self.transport.abort()  # `close` would wait until the client has read them

    def _log(self, event: str) -> None:
        LOG.info(event, extra={"facts": {"client": self.client[0] if self.client else None}})
