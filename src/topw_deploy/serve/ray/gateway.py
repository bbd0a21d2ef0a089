"""The gateway: receives HTTP requests and passes each to a replica that the router chooses."""

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
from topw_deploy.serve.failures import Failure, RequestError, failure_of, invalid_request, server_unavailable
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.ray.router import PREFIX_ARGUMENT

LOG = logging.getLogger("ray.serve")
ATTEMPTS = 2
"""Number of replicas to try. If a replica dies before it answers, the request is sent to another replica."""

_PASSED_FIELDS = ("method", "path", "query_string", "headers", "http_version", "scheme", "client", "server")
_OWN_HEADERS = {b"content-length", b"x-request-id"}  # set again by the response, or by Ray
_LOST = server_unavailable(
    "the replica ended before the answer was whole; send the request again.", "replica_lost"
).failure


class Gateway:
    """Passes requests to replicas.

    replicas: Ray's handle of the replicas.
    prefix_characters: number of a prompt's first characters that choose its replica.
    """

    def __init__(self, replicas: DeploymentHandle, options: ServeOptions, prefix_characters: int) -> None:
        self._relay = replicas.options(method_name="relay", stream=True)
        self._options, self._characters = options, prefix_characters

    async def __call__(self, request: Request) -> Response:
        """Answer a request. If the client disconnects, Ray cancels this call and the call of the replica."""
        try:
            if request.url.path == "/metrics":
                raise _metrics_refusal()
            options = self._options
            body = await read_bytes(request, max_bytes=options.max_body, seconds=options.body_timeout)
            return await self._pass_on(request, body)
        except RequestError as error:
            return _error_response(error.failure)

    async def _pass_on(self, request: Request, body: bytes) -> Response:
        scope = {"type": "http", "root_path": "", **{name: request.scope.get(name) for name in _PASSED_FIELDS}}
        key = prefix_key(body, self._characters) if body else ""
        for attempt in range(ATTEMPTS):
            parts = self._relay.remote(scope, body, **{PREFIX_ARGUMENT: key})
            try:
                status, headers = await anext(parts)
            except BackPressureError:
                full = QueueFullError(f"{self._options.engine.get('max_queue', 256)} requests wait; try again later.")
                return _error_response(failure_of(full))
            except RayActorError:
                LOG.warning("a replica ended before it answered, attempt %d of %d", attempt + 1, ATTEMPTS)
                continue
            return _relay_response(status, headers, parts)
        return _error_response(_LOST)


def _relay_response(status: int, headers: list[tuple[bytes, bytes]], parts: Any) -> Response:
    """The replica's answer. parts: yields its body."""
    is_event_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
    response = StreamingResponse(_relay_body(parts, is_event_stream), status)
    response.raw_headers = [(name, value) for name, value in headers if name.lower() not in _OWN_HEADERS]
    return response


async def _relay_body(parts: Any, is_event_stream: bool) -> AsyncIterator[bytes]:
    """Yield the parts of the body.

    If the replica dies, a stream of events ends with an error event, and without [DONE]. Any other answer is cut off,
    which its client sees as an error.
    """
    try:
        async for part in parts:
            yield part
    except RayActorError:
        LOG.warning("a replica ended in the middle of an answer")
        if not is_event_stream:
            raise
        yield f"data: {json.dumps(_LOST.as_dict())}\n\n".encode()
    finally:
        parts.cancel()


def _error_response(failure: Failure) -> Response:
    return JSONResponse(failure.as_dict(), failure.status, dict(failure.headers))


def _metrics_refusal() -> RequestError:
    """The answer to a request for metrics, which would reach only one of the replicas."""
    message = "/metrics: every node's Ray agent exports the metrics of its replicas; see --metrics-export-port."
    return invalid_request(message, code="not_found", status=404)
