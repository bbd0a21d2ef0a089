"""HTTP on a connection: uvicorn's protocol, with answers that arrive also if the request cannot be read."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from topw_deploy.serve.failures import RequestError

MOST_HEADERS = 64 * 2**10
"""Bytes of a request line and headers that always fit. What arrives in one read of the socket may be longer."""

_LINGER = 5  # seconds in which a closed connection discards what its client still sends


class Protocol(H11Protocol):
    """uvicorn's protocol. Answers bytes that are not HTTP, and headers that are too long, as the server's other errors.

    A connection that closes amid a request first discards the rest of it. Otherwise the operating system resets the
    connection, and the client loses an answer that it has not read (RFC 9112, 9.6).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles the error of bytes that are not HTTP."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        failure = RequestError("the request is not valid HTTP/1.1; send it again.", None, "invalid_http", status)
        if status == 431:
            message = f"the headers have more than {MOST_HEADERS} bytes; send shorter ones."
            failure = RequestError(message, None, "headers_too_large", status)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = failure.response({"Connection": "close"})
            start = h11.Response(status_code=status, headers=answer.raw_headers)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # of a request with a wrong body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _Lingering:
    """A transport whose `close` lets the client read the answer, if it has not sent its whole request."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol) -> None:
        self._transport, self._protocol, self._closed = transport, protocol, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        lingers = self._protocol.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if self.is_closing() or not lingers:
            self._transport.close()
            return
        self._closed = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._protocol.loop.call_later(_LINGER, self._transport.close)
