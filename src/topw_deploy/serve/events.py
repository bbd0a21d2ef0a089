"""Streams of server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from topw_deploy.serve.access import LogEntry
from topw_deploy.serve.failures import failure_of, is_expected
from topw_deploy.serve.options import ServeOptions

LOG = logging.getLogger("topw_deploy.serve")
DONE = ServerSentEvent("[DONE]", sep="\n")


def json_event(data: Mapping[str, Any], name: str | None = None) -> ServerSentEvent:
    """A server-sent event whose data is JSON.

    name: type of the event; None for an event without one.
    """
    return ServerSentEvent(json.dumps(data, ensure_ascii=False, separators=(",", ":")), event=name, sep="\n")


def record_failure(error: BaseException, entry: LogEntry) -> dict[str, Any]:
    """Log an error in a stream whose status was already sent. Returns the data of the event that reports it."""
    failure = failure_of(error)
    entry.facts["error"] = failure.code
    if not is_expected(error):
        LOG.error("a stream failed", exc_info=error, extra={"facts": {"request_id": entry.id}})
    return failure.as_dict()


class EventStream(EventSourceResponse):
    """Sends events. While there are none, sends comments, which keep the connection open.

    close: frees the source of the events; called at the end, or when the client disconnects.
    """

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent, None],
        close: Callable[[], Awaitable[None]],
        options: ServeOptions,
    ) -> None:
        self._events, self._close = events, close
        super().__init__(
            events,
            ping=options.ping_interval,
            send_timeout=options.send_timeout,
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:  # the client read nothing for `send_timeout`; the server closes the connection
            LOG.info("a client took no bytes", extra={"facts": {"path": scope["path"]}})
        finally:
            await self._events.aclose()
            await self._close()
