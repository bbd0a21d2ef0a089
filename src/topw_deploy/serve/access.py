"""Middleware for every request: ids, the log, API keys, and the answer if the application fails."""

from __future__ import annotations

import json
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
"""Paths that need no key: probes have none."""

_ID_HEADER = "X-Request-Id"
_LONGEST_ID = 128
_GONE = 499  # nginx' status for a client that closed the connection


@dataclass
class Record:
    """A request's log entry.

    id: the client's X-Request-Id, or a random one.
    facts: added by the endpoints.
    status: 0 until the response begins.
    """

    id: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def record_of(request: Request) -> Record:
    """The record that `AccessLog` made for a request."""
    record: Record = request.scope["topw.record"]
    return record


class AccessLog:
    """Gives each request an id, writes its line to the log, and answers 500 if the application fails.

    on_request: called with 1 when a POST request begins and with -1 when it ends.
    on_answer: called with the path and the status of each request when it ends.
    """

    def __init__(self, app: ASGIApp, on_request: Callable[[int], None], on_answer: Callable[[str, int], None]) -> None:
        self._app, self._on_request, self._on_answer = app, on_request, on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["topw.record"] = Record(_request_id(scope))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[_ID_HEADER] = record.id
            await send(message)

        counted = int(scope["method"] == "POST")
        self._on_request(counted)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # one request must not end the server
            LOG.exception("the request failed", extra={"facts": {"request_id": record.id}})
            if not record.status:
                failure = failure_of(error)
                await JSONResponse(failure.as_dict(), failure.status)(scope, receive, send_with_id)
        finally:
            self._on_request(-counted)
            self._on_answer(scope["path"].removeprefix(scope.get("root_path", "")), record.status or _GONE)
            _write(scope, record)


def _write(scope: Scope, record: Record) -> None:
    client = scope.get("client")
    facts = {
        "request_id": record.id,
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status or _GONE,
        "seconds": round(time.perf_counter() - record.started, 6),
        "client": client[0] if client else None,
        **record.facts,
    }
    level = logging.DEBUG if scope["method"] == "GET" and record.status < 400 else logging.INFO
    LOG.log(level, "request", extra={"facts": facts})


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(_ID_HEADER, "")
    usable = 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable()
    return given if usable else secrets.token_hex(16)


class Keys:
    """Refuses requests without one of the keys, given as `Authorization: Bearer KEY`.

    open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app, self._keys, self._open = app, [key.encode() for key in keys], open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._knows(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'."
        failure = Failure(401, INVALID, "invalid_api_key", message)
        response = JSONResponse(failure.as_dict(), failure.status, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        # All keys are compared, so that the time reveals nothing about them.
        return bool(sum([secrets.compare_digest(key, each) for each in self._keys])) and scheme.lower() == "bearer"


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, event, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _stamp(record), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Lines to read: time, level, event, and `name=value` for each fact."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        told = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.items())
        line = f"{_stamp(record)} {record.levelname} {record.getMessage()} {told}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _stamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
