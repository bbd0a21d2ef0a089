"""One replica: the server's ASGI application with its models, which the gateway calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from topw_deploy.errors import GenerationError
from topw_deploy.serve.app import create_app
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.ray.metrics import RayMetrics, report_engines
from topw_deploy.serve.server import start_log
from topw_deploy.serve.service import Service

Head = tuple[int, list[tuple[bytes, bytes]]]
"""(status, headers) of an answer."""


class Replica:
    """Opens the models. Ray sends requests after the models are open.

    Raises the errors of opening a model.
    """

    async def __init__(self, options: ServeOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        start_log(json_lines=True, verbose=False)
        self._app = create_app(options)
        self._service: Service = self._app.state.service
        self._service.metrics = RayMetrics(self._service.served)
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

        Cancelling the generator frees the request's rows.
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
