"""Middleware for every request: its id and log entry, ambiguous lengths, API keys, and the answer to a failure."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topw_deploy.serve.failures import INVALID, Failure, failure_of

LOG = logging.getLogger("topw_deploy.serve")
OPEN_PATHS = frozenset({"/health", "/live"})
"""Paths that need no key, because probes have none."""

_ID_HEADER = "X-Request-Id"
_LONGEST_ID = 128  # characters
_CLIENT_GONE = 499  # nginx' status for a client that closed the connection
_AMBIGUOUS_LENGTH = Failure(
    400,
    INVALID,
    "ambiguous_length",
    "the body's length is stated twice, or in a way that HTTP/1.0 lacks; send Content-Length or Transfer-Encoding.",
)


@dataclass
class LogEntry:
    """The log's entry of one request, written when the request has ended.

    id: the client's X-Request-Id, or a random one.
    started: time.perf_counter() at the beginning of the request.
    status: of the response; 0 until it begins.
    facts: further fields of the entry, which the endpoints add.
    """

    id: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def log_entry_of(request: Request) -> LogEntry:
    """The entry that `AccessLog` made for a request."""
    entry: LogEntry = request.scope["topw.log_entry"]
    return entry


class AccessLog:
    """Gives each request an id, writes its log entry, and answers 500 if the application fails.

    on_request: called with 1 when a POST request begins and with -1 when it ends.
    on_answer: called with the path and the status of each request when it ends.
    """

    def __init__(self, app: ASGIApp, on_request: Callable[[int], None], on_answer: Callable[[str, int], None]) -> None:
        self._app, self._on_request, self._on_answer = app, on_request, on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope["topw.log_entry"] = LogEntry(_request_id(scope))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)[_ID_HEADER] = entry.id
            await send(message)

        counted = int(scope["method"] == "POST")
        self._on_request(counted)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # one request must not end the server
            LOG.exception("the request failed", extra={"facts": {"request_id": entry.id}})
            if not entry.status:
                failure = failure_of(error)
                await JSONResponse(failure.as_dict(), failure.status)(scope, receive, send_with_id)
        finally:
            self._on_request(-counted)
            self._on_answer(scope["path"].removeprefix(scope.get("root_path", "")), entry.status or _CLIENT_GONE)
            _write(scope, entry)


def _write(scope: Scope, entry: LogEntry) -> None:
    client = scope.get("client")
    facts = {
        "request_id": entry.id,
        "method": scope["method"],
        "path": scope["path"],
        "status": entry.status or _CLIENT_GONE,
        "seconds": round(time.perf_counter() - entry.started, 6),
        "client": client[0] if client else None,
        **entry.facts,
    }
    level = logging.DEBUG if scope["method"] == "GET" and entry.status < 400 else logging.INFO
    LOG.log(level, "request", extra={"facts": facts})


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(_ID_HEADER, "")
    usable = 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable()
    return given if usable else secrets.token_hex(16)


class LengthCheck:
    """Answers 400 and closes the connection if a request has both Content-Length and Transfer-Encoding.

    RFC 9112, 6.1: if a proxy uses one header and this server the other, they see the end of the body at different
    places, and a part of the body counts as the next request (request smuggling). Transfer-Encoding in HTTP/1.0 is
    refused for the same reason.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_ambiguous_length(scope):
            failure = _AMBIGUOUS_LENGTH
            await JSONResponse(failure.as_dict(), failure.status, {"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _has_ambiguous_length(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return False
    return b"content-length" in names or scope["http_version"] < "1.1"


class KeyCheck:
    """Refuses requests without one of the keys, given as `Authorization: Bearer KEY`.

    open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app, self._keys, self._open_paths = app, [key.encode() for key in keys], open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'."
        failure = Failure(401, INVALID, "invalid_api_key", message)
        response = JSONResponse(failure.as_dict(), failure.status, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        # All keys are compared, so that the time reveals nothing about them.
        return bool(sum([secrets.compare_digest(key, each) for each in self._keys])) and scheme.lower() == "bearer"
