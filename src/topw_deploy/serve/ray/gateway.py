"""The gateway: takes HTTP requests and passes each to a replica that the router chooses."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from topw_deploy.errors import QueueFullError
from topw_deploy.serve.affinity import prefix_key
from topw_deploy.serve.bodies import read_bytes
from topw_deploy.serve.failures import Failure, RequestError, failure_of, invalid, unavailable
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.ray.router import PREFIX

LOG = logging.getLogger("ray.serve")
ATTEMPTS = 2
"""Number of replicas tried. If a replica dies before it answers, the request is sent to another one."""

_PASSED = ("method", "path", "query_string", "headers", "http_version", "scheme", "client", "server")
_OWN = {b"content-length", b"x-request-id"}  # set again by the response, or by Ray
_LOST = unavailable("the replica ended before the answer was whole; send the request again.", "replica_lost").failure


class Gateway:
    """Passes requests to replicas.

    replicas: handle of the replicas.
    prefix_characters: number of a prompt's first characters that choose its replica.
    """

    def __init__(self, replicas: DeploymentHandle, options: ServeOptions, prefix_characters: int) -> None:
        self._relay = replicas.options(method_name="relay", stream=True)
        self._options, self._characters = options, prefix_characters

    async def __call__(self, request: Request) -> Response:
        """Called by Ray for each request. If the client disconnects, Ray cancels this and the call of the replica."""
        try:
            if request.url.path == "/metrics":
                raise _no_metrics()
            options = self._options
            body = await read_bytes(request, most=options.max_body, seconds=options.body_timeout)
            return await self._pass_on(request, body)
        except RequestError as error:
            return _response(error.failure)

    async def _pass_on(self, request: Request, body: bytes) -> Response:
        scope = {"type": "http", "root_path": "", **{name: request.scope.get(name) for name in _PASSED}}
        key = prefix_key(body, self._characters) if body else ""
        for attempt in range(ATTEMPTS):
            parts = self._relay.remote(scope, body, **{PREFIX: key})
            try:
                status, headers = await anext(parts)
            except BackPressureError:
                full = QueueFullError(f"{self._options.engine.get('max_queue', 256)} requests wait; try again later.")
                return _response(failure_of(full))
            except RayActorError:
                LOG.warning("a replica ended before it answered, attempt %d of %d", attempt + 1, ATTEMPTS)
                continue
            return _streaming(status, headers, parts)
        return _response(_LOST)


def _streaming(status: int, headers: list[tuple[bytes, bytes]], parts: Any) -> Response:
    names = dict(headers)
    events = names.get(b"content-type", b"").startswith(b"text/event-stream")
    response = StreamingResponse(_rest(parts, events), status)
    response.raw_headers = [(name, value) for name, value in headers if name.lower() not in _OWN]
    return response


async def _rest(parts: Any, events: bool) -> AsyncIterator[bytes]:
    """The parts of the body. If the replica dies, the stream ends with an error event, and without [DONE].

    events: whether it is a stream of events; any other answer is cut off, which its client sees as an error.
    """
    try:
        async for part in parts:
            yield part
    except RayActorError:
        LOG.warning("a replica ended in the middle of an answer")
        if not events:
            raise
        yield f"data: {json.dumps(_LOST.as_dict())}\n\n".encode()
    finally:
        parts.cancel()


def _response(failure: Failure) -> Response:
    return JSONResponse(failure.as_dict(), failure.status, dict(failure.headers))


def _no_metrics() -> RequestError:
    """A request for metrics would reach only one of the replicas."""
    message = "/metrics: every node's Ray agent exports the metrics of its replicas; see --metrics-export-port."
    return invalid(message, code="not_found", status=404)
