"""The deployments of the Ray Serve application: the gateway, the router and the replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application, metrics
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from topw_deploy.errors import GenerationError, ParameterError, QueueFullError
from topw_deploy.runtime.parameters import integer, real
from topw_deploy.serve.app import create_app
from topw_deploy.serve.failures import RequestError, failure_of
from topw_deploy.serve.metrics import COUNTERS, GAUGES, MODEL, REASON, Metrics
from topw_deploy.serve.ray import choose_replica, order_replicas, prefix_key
from topw_deploy.serve.server import start_log
from topw_deploy.serve.service import ServeOptions, Service
from topw_deploy.serve.stream import read_bytes

LOG = logging.getLogger("ray.serve")
ATTEMPTS = 2
"""Number of replicas to try. If a replica dies before it answers, the request is sent to another replica."""

_PASSED_FIELDS = ("method", "path", "query_string", "headers", "http_version", "scheme", "client", "server")
_LOST = RequestError("the replica ended before its answer; send the request again.", None, "replica_lost", 503)
_MOST_CALLS = 1024  # one gateway passes on at most this many at once
PREFIX_ARGUMENT = "prefix"
"""Name of the argument of `Replica.relay` with the key of the prompt's beginning."""

REPORT_INTERVAL = 5.0
"""Seconds between reports of the engines' counts."""

Head = tuple[int, list[tuple[bytes, bytes]]]
"""(status, headers) of an answer."""


def build_application(given: dict[str, Any]) -> Application:
    """Build the application of `build`."""
    characters = integer(0)("prefix_characters", given.pop("prefix_characters", 256))
    at_least_one = real(lambda number: 1 <= number < float("inf"), "a finite number >= 1")
    factor = at_least_one("load_factor", given.pop("load_factor", 1.25))
    unknown = given.keys() - {each.name for each in dataclasses.fields(ServeOptions)}
    if unknown:
        raise ParameterError(f"unknown argument {min(unknown)!r}; see ServeOptions.")
    models = given.get("models")
    if not isinstance(models, Mapping):
        raise ParameterError("models is missing; give the path of an exported folder for each name.", "models")
    for folder in models.values():  # each replica runs in a working directory of its own
        if not Path(folder).is_absolute():
            raise ParameterError(f"models has the path {folder}, but must have absolute ones.", "models")
    given["models"] = {str(name): Path(folder) for name, folder in models.items()}
    given |= {name: tuple(given[name]) for name in ("api_keys", "cors_origins") if name in given}
    options = ServeOptions(**given)
    slots, queue = int(options.engine.get("max_batch", 8)), int(options.engine.get("max_queue", 256))
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"load_factor": factor})
    replicas = serve.deployment(Replica, name="Replica").options(
        max_ongoing_requests=2 * slots,
        max_queued_requests=queue,
        graceful_shutdown_timeout_s=options.drain_timeout,
        request_router_config=router,
    )
    gateway = serve.deployment(Gateway, name="Gateway").options(
        max_ongoing_requests=_MOST_CALLS, graceful_shutdown_timeout_s=options.drain_timeout
    )
    return gateway.bind(replicas.bind(options), options, characters)


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
                # They would be those of only one of the replicas.
                message = "every node's Ray agent exports the metrics of its replicas; see --metrics-export-port."
                raise RequestError(f"/metrics: {message}", None, "not_found", 404)
            options = self._options
            body = await read_bytes(request, options.max_body, options.body_timeout)
            return await self._pass_on(request, body)
        except RequestError as error:
            return error.response()

    async def _pass_on(self, request: Request, body: bytes) -> Response:
        scope = {"type": "http", "root_path": "", **{name: request.scope.get(name) for name in _PASSED_FIELDS}}
        key = prefix_key(body, self._characters) if body else ""
        for attempt in range(ATTEMPTS):
            parts = self._relay.remote(scope, body, **{PREFIX_ARGUMENT: key})
            try:
                status, headers = await anext(parts)
                if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                    response: Response = StreamingResponse(_relay_events(parts), status)
                else:
                    response = Response(b"".join([part async for part in parts]), status)
            except BackPressureError:
                full = QueueFullError(f"{self._options.engine.get('max_queue', 256)} requests wait; try again later.")
                return failure_of(full).response()
            except RayActorError:
                LOG.warning("a replica ended before it answered, attempt %d of %d", attempt + 1, ATTEMPTS)
                continue
            # Ray sets the id of a request again.
            response.raw_headers = [(name, value) for name, value in headers if name.lower() != b"x-request-id"]
            return response
        return _LOST.response()


async def _relay_events(parts: Any) -> AsyncIterator[bytes]:
    """Yield the parts of a stream of events. If the replica dies, the last one is an error event, without [DONE]."""
    try:
        async for part in parts:
            yield part
    except RayActorError:
        LOG.warning("a replica ended in the middle of an answer")
        yield f"data: {json.dumps(_LOST.as_dict())}\n\n".encode()
    finally:
        parts.cancel()


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to one replica, within a bound on its load.

    For requests without a prompt, Ray chooses the replica.
    """

    def initialize_state(self, load_factor: float = 1.25, **_: Any) -> None:
        """Called by Ray.

        load_factor: no replica gets more than this many times the mean number of requests.
        """
        self._load_factor = load_factor

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray. Returns [[the chosen replica], [all others]].

        If the chosen replica takes no more requests, Ray tries the others, those with the fewest requests first.
        """
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # If no replica takes more requests, Ray waits before it tries again.
        pending_request.routing_context.should_backoff = True
        key = pending_request.kwargs.get(PREFIX_ARGUMENT, "")
        if not key:
            return [candidate_replicas]
        replicas = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        loads = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas]
        order = order_replicas(key, tuple(replica.replica_id.unique_id for replica in replicas))
        chosen = replicas[choose_replica(order, loads, self._load_factor)]
        return [[chosen], [replica for replica in replicas if replica is not chosen]]


class Replica:
    """Opens the models. Ray sends requests after the models are open.

    Raises the errors of opening a model.
    """

    async def __init__(self, options: ServeOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        start_log(json_lines=True, verbose=False)
        self._app = create_app(options)
        self._service: Service = self._app.state.service
        self._service.metrics = RayMetrics(self._service.engine_stats)
        self._service.start()
        await self._service.wait_until_open()
        self._reports = asyncio.ensure_future(report_engines(self._service))

    async def relay(
        self, scope: dict[str, Any], body: bytes, *, prefix: str = ""
    ) -> AsyncGenerator[Head | bytes, None]:
        """Answer one HTTP request. Yields (status, headers), then the parts of the body.

        scope: the request's ASGI scope.
        body: the whole body of the request.
        prefix: read only by the router.

        Cancelling the generator frees the request's slots.
        """
        parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
        gone = asyncio.Event()
        unread = [body]

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                parts.put_nowait((message["status"], list(message.get("headers", ()))))
            elif message.get("body"):
                parts.put_nowait(bytes(message["body"]))

        async def answer() -> None:
            try:
                await self._app({**scope, "app": self._app}, receive, send)
            finally:
                parts.put_nowait(None)

        task = asyncio.ensure_future(answer())
        try:
            while True:
                part = await parts.get()
                if part is None:
                    break
                yield part
        finally:
            gone.set()
            if not task.done():
                task.cancel()
            await asyncio.wait({task})
        task.result()

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises.

        Raises GenerationError unless the replica accepts requests or finishes running ones.
        """
        if self._service.state not in ("ready", "draining"):
            raise GenerationError(f"the replica is {self._service.state}.")

    def __del__(self) -> None:
        """Free the models. Called by Ray when all requests have ended, or after `graceful_shutdown_timeout_s`."""
        service = getattr(self, "_service", None)
        for each in service.served() if service is not None else ():
            each.close()


class RayMetrics(Metrics):
    """The metrics of each request and token, as histograms and counters of Ray.

    Names have the prefix `topw_`, because names in Ray cannot have a colon. Ray adds labels for deployment, replica
    and application.
    """

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Any:
        return metrics.Histogram(f"topw_{name}", text, list(map(float, buckets)), (MODEL,))

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return metrics.Counter(f"topw_{name}", text, (MODEL, *labels))

    def _observe(self, histogram: Any, model: str, values: Iterable[float]) -> None:
        for value in values:
            histogram.observe(float(value), tags={MODEL: model})

    def _increase(self, counter: Any, amount: int, *labels: str) -> None:
        if amount > 0:  # Ray refuses 0
            counter.inc(float(amount), tags=dict(zip((MODEL, REASON), labels, strict=False)))


async def report_engines(service: Service) -> None:
    """Send the engines' counts to Ray every REPORT_INTERVAL seconds, until the task is cancelled."""
    gauges = [(metrics.Gauge(f"topw_{name}", text, (MODEL,)), read) for name, text, read in GAUGES]
    counters = [(metrics.Counter(f"topw_{name}", text, (MODEL,)), read) for name, text, read in COUNTERS]
    sent: dict[tuple[str, int], float] = {}  # (model, counter) -> its last value
    while True:
        for served in service.served():
            stats, tags = served.engine.stats(), {MODEL: served.name}
            for gauge, read in gauges:
                gauge.set(read(stats), tags=tags)
            for index, (counter, read) in enumerate(counters):
                now = read(stats)
                gained = now - sent.get((served.name, index), 0)
                sent[served.name, index] = now
                if gained > 0:
                    counter.inc(gained, tags=tags)
        await asyncio.sleep(REPORT_INTERVAL)
