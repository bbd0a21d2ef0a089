"""HTTP/1.1 connections with timeouts for slow clients, which uvicorn lacks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("topw_deploy.serve")

READ = 16 * 1024
"""Bytes read from a connection at a time. A body may consist of one-byte chunks: parsing asyncio's usual 256 KiB of
such chunks at once would delay all streams."""


class Connection(H11Protocol):
    """uvicorn's connection, closed if its client is too slow.

    header_timeout: seconds in which the head of a request must arrive, from the start of the connection or the end of
        the last answer. They include the time that reading the rest of a body takes whose answer was sent early.
        uvicorn itself closes a connection that is idle after an answer (server._IDLE).
    send_timeout: seconds in which the client must read some bytes of an answer.
    """

    def __init__(self, *, header_timeout: float, send_timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self._header_timeout, self._send_timeout = header_timeout, send_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # With a limit of 0, writing pauses, and `_send_timer` starts, as soon as a byte cannot be sent at once.
        transport.set_write_buffer_limits(0)
        if hasattr(transport, "max_size"):  # only asyncio's own transport has it
            transport.max_size = READ
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._stop_head_timer()

    def on_response_complete(self) -> None:
        self._start_head_timer()
        super().on_response_complete()  # begins the next request if it has arrived
        if self._is_answering():
            self._stop_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._header_timeout, self._close_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_without_head(self) -> None:
        if not self.transport.is_closing():
            self._log("no request arrived in time")
            self.transport.close()

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        left = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._send_timeout, self._check_progress, left)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_progress(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._start_send_timer()
            return
        self._log("a client took no bytes")
        self.transport.abort()  # `close` would wait until the client has read them

    def _log(self, event: str) -> None:
        LOG.info(event, extra={"facts": {"client": self.client[0] if self.client else None}})
