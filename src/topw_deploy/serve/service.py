"""The models of a server, and its state: loading, ready, draining or failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from starlette.requests import Request

from topw_deploy.errors import TopWError
from topw_deploy.runtime.outputs import gives_logits
from topw_deploy.serve.failures import invalid_request, server_unavailable
from topw_deploy.serve.metrics import Metrics
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.served import Served

LOG = logging.getLogger("topw_deploy.serve")
_CANCELLED_SECONDS = 5.0  # a drain waits this long for the answers to cancelled requests
_NO_LOGITS = "the export has no logits, so the page cannot show which tokens it could draw; use --with-logits"


class Service:
    """The models. They are opened in a thread, so that the server answers probes meanwhile.

    state: "loading", "ready", "draining" or "failed".
    failure: the error of opening a model, in the state "failed".
    on_failure: called in the event loop when the state becomes "failed".
    loop: the event loop, once `start` was called.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.state = "loading"
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self.served)
        self._served: dict[str, Served] = {}
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._opening: asyncio.Task[None] | None = None

    def served(self) -> Iterable[Served]:
        """The opened models."""
        return tuple(self._served.values())

    def start(self) -> None:
        """Begin to open the models. Call it in the event loop."""
        self.loop = asyncio.get_running_loop()
        self._opening = asyncio.ensure_future(self._open())

    async def wait_until_open(self) -> None:
        """Wait until the models are open. Raises the error of opening them. Call it after `start`."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Cancel running requests, and free the models."""
        if self._opening is not None:
            await asyncio.wait({self._opening})  # a thread cannot be cancelled
        self.state = "failed" if self.failure else "draining"
        for each in self.served():
            await asyncio.to_thread(each.close)

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the running ones. Returns whether all of them ended by themselves.

        After `drain_timeout` seconds those that still run are cancelled, and answered with an error.
        """
        self.state = "draining"
        LOG.info("draining", extra={"facts": {"active": self._active}})
        if await self._wait_until_idle(self.options.drain_timeout):
            return True
        LOG.warning("cancelling what still runs", extra={"facts": {"active": self._active}})
        for each in self.served():
            await asyncio.to_thread(each.engine.shutdown)
        await self._wait_until_idle(_CANCELLED_SECONDS)
        return False

    def count_request(self, change: int) -> None:
        """Count a request that begins (`change` is 1) or ends (-1)."""
        self._active += change
        if self._active:
            self._idle.clear()
        else:
            self._idle.set()

    def check_ready(self) -> None:
        """Raises RequestError (503) unless requests are accepted."""
        if self.state != "ready":
            raise server_unavailable(f"the server is {self.state}; try again later.", self.state)

    def find(self, name: str | None) -> Served:
        """The model that a request names. Raises RequestError for an unknown one (404), or if none is ready (503)."""
        self.check_ready()
        names = ", ".join(self._served)
        if name is None and len(self._served) == 1:
            return next(iter(self._served.values()))
        if name is None:
            raise invalid_request(f"model is missing; give one of {names}.", "model", "missing_required_parameter")
        if name not in self._served:
            message = f"the model {name[:80]!r} is not served; give one of {names}."
            raise invalid_request(message, "model", "model_not_found", 404)
        return self._served[name]

    async def _wait_until_idle(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _open(self) -> None:
        opened: dict[str, Served] = {}
        try:
            for name, folder in self.options.models.items():
                opened[name] = await asyncio.to_thread(Served.open, name, folder, self.options)
                LOG.info("opened", extra={"facts": {"model": name, "folder": str(folder)}})
                if self.options.page and not gives_logits(opened[name].model.manifest):
                    LOG.info(_NO_LOGITS, extra={"facts": {"model": name}})
        except Exception as error:  # server.run raises it
            for each in opened.values():
                await asyncio.to_thread(each.close)
            self.failure, self.state = error, "failed"
            if not isinstance(error, TopWError):
                LOG.exception("a model cannot be opened")
            self.on_failure()
            return
        self._served = opened
        if self.state == "loading":  # unless it was stopped
            self.state = "ready"


def service_of(request: Request) -> Service:
    """The service of the application that received `request`."""
    service: Service = request.app.state.service
    return service
