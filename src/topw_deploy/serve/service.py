"""The served models, and the state of the server: loading, ready, draining or failed."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from topw_deploy.engine import Engine, EngineStats
from topw_deploy.errors import ManifestError, ParameterError, QueueFullError, TopWError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.loop import gives_logits
from topw_deploy.runtime.parameters import integer
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.runtime.tools.formats import PLAIN, REASONING, get_family
from topw_deploy.sampling import Geometry, preset_parameters
from topw_deploy.sampling.parameters import PRESETS
from topw_deploy.serve.failures import RequestError
from topw_deploy.serve.metrics import Metrics

LOG = logging.getLogger("topw_deploy.serve")
Result = TypeVar("Result")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PREPARING_THREADS = 4
"""Threads per model that render templates, tokenize and compile grammars."""

_CANCELLED_SECONDS = 5.0  # a drain waits this long for the answers to cancelled requests
_NO_LOGITS = "the export has no logits, so the page cannot show which tokens it could draw; use --with-logits"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Checked options of the server.

    models: name of a model in requests -> its exported folder.
    opening: options of `TopWModel.from_pretrained`.
    engine: options of each model's `Engine`.
    api_keys: accepted keys; empty for a server without keys.
    cors_origins: origins whose pages may call the server; "*" for all.
    max_body: maximum number of bytes of a request's body.
    body_timeout: seconds in which a body must arrive.
    request_timeout: maximum seconds of a generation, including the wait in the queue; None for no limit.
    ping_interval: seconds between the comments of a stream, which keep its connection open.
    drain_timeout: seconds in which running requests may finish after a signal to stop.
    log_prompts: whether the log contains prompts and answers.
    tool_parser: family of the models' tool calls; None for the family that the chat template shows.
    page: whether to serve the page at `/` and its endpoint `/topw/inspect`.

    Raises ParameterError for an invalid value.
    """

    models: Mapping[str, Path]
    opening: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8_000_000
    body_timeout: float = 30.0
    request_timeout: float | None = 600.0
    ping_interval: float = 15.0
    drain_timeout: float = 30.0
    log_prompts: bool = False
    tool_parser: str | None = None
    page: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise ParameterError("there is no model to serve; give at least one exported folder.", "models")
        for what, text in (
            *(("api_key", key) for key in self.api_keys),
            *(("the name of a model", n) for n in self.models),
        ):
            if not isinstance(text, str) or not text or not text.isprintable() or text.strip() != text:
                raise ParameterError(f"{what} is {text!r}, but must be printable text without spaces around it.", what)
        integer(1)("max_body", self.max_body)
        for name in ("body_timeout", "request_timeout", "ping_interval", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ParameterError(f"{name} is {value!r}, but must be a finite number of seconds > 0.", name)
        if self.tool_parser is not None:
            get_family(self.tool_parser, "tool_parser")


class Served:
    """A model and its engine.

    name: as requests state it.
    created: unix time at which the model was opened.
    length: maximum number of tokens of a sequence, prompt included.
    tool_family: family of the model's tool calls; None if unknown.
    family: how answers are read, also without tools.
    """

    def __init__(self, name: str, model: TopWModel, engine: Engine, options: ServeOptions) -> None:
        self.name, self.model, self.engine = name, model, engine
        self.created = int(time.time())
        context = model.manifest.decoder.context_length
        self.length = min(context, options.engine.get("max_length") or context)
        self.tool_family = options.tool_parser or model.tool_family
        unknown = REASONING if model.thinks else PLAIN
        self.family = get_family(self.tool_family) if self.tool_family else unknown
        self._most_waiting = int(options.engine.get("max_queue", 256))
        self._preparing = anyio.CapacityLimiter(PREPARING_THREADS)

    @cached_property
    def abilities(self) -> dict[str, Any]:
        """The field `topw` of the model's entry in `/v1/models`.

        chat: whether the model has a chat template.
        logits: whether log-probabilities and inspections are available.
        median_distance: of likely pairs, the unit of `geom_unit` median; None if it was not measured.
        rule: the export's default sampling rule.
        defaults, presets: Top-W's parameters; a `beta` that depends on the temperature is text.
        penalties: the export's repetition, presence and frequency penalty.
        limits: the export's defaults of the other fields of the page's form.
        """
        sampler = self.model.manifest.sampler
        default = self.sequences([0], {"seed": 0})[0].params
        return {
            "chat": self.model.has_chat_template,
            "logits": gives_logits(self.model.manifest),
            "metric": sampler.options.metric,
            "median_distance": self.model.manifest.median_distance,
            "top_m": sampler.options.top_m,
            "vocab_size": sampler.vocab_size,
            "rule": default.rule.chosen.name,
            "defaults": asdict(default.top_w),
            "penalties": {name: getattr(default, name) for name in PENALTIES},
            "limits": {
                "min_tokens": default.min_new_tokens,
                "no_repeat_ngram_size": default.no_repeat_ngram_size,
                "stop": list(default.stop_strings),
            },
            # `released` needs one metric, and an export made with it has its parameters as defaults.
            "presets": {name: preset_parameters(name, *sampler.geometry) for name in PRESETS if name != "released"},
        }

    @cached_property
    def geometry(self) -> tuple[Geometry | None, str | None]:
        """Returns (the model's geometry, None), or (None, the reason why it cannot be read)."""
        try:
            return read_geometry(self.model.path, self.model.manifest), None
        except ManifestError as error:
            return None, self.without_path(str(error))

    @classmethod
    def open(cls, name: str, folder: Path, options: ServeOptions) -> Served:
        """Open an exported folder. Raises the errors of `TopWModel.from_pretrained` and `Engine`."""
        model = TopWModel.from_pretrained(folder, **options.opening)
        try:
            return cls(name, model, Engine(model, **options.engine), options)
        except TopWError:
            model.close()
            raise

    def close(self) -> None:
        """Cancel the running requests, and free the memory."""
        self.engine.shutdown()
        self.model.close()

    async def prepare(self, function: Callable[[], Result]) -> Result:
        """Call a slow function in a thread. Raises QueueFullError if too many calls wait for a thread."""
        if self._preparing.statistics().tasks_waiting > self._most_waiting:
            raise QueueFullError(f"{self._most_waiting} requests wait to be prepared; try again later.", "max_queue")
        abandoned = threading.Event()

        def call() -> Result:
            if abandoned.is_set():
                raise ClientDisconnect
            return function()

        # A thread cannot be cancelled. Its task continues and counts in the limiter, so that clients that disconnect
        # cannot start more threads than the limit.
        task = asyncio.ensure_future(anyio.to_thread.run_sync(call, limiter=self._preparing))
        try:
            return await asyncio.shield(task)
        finally:
            abandoned.set()
            # Retrieves the error of a task that nobody awaits, so that asyncio does not log it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def sequences(self, prompt: Any, parameters: Mapping[str, Any], shown_tokens: Collection[int] = ()) -> Sequences:
        """The sequences of a request, as the engine runs them. Slow, as it tokenizes and compiles grammars.

        Raises ParameterError, PromptError and the errors of grammars.
        """
        found = self.model.prepare(prompt, limits=self.engine.limits, shown_tokens=shown_tokens, **parameters)
        self.model.compile_grammars(found)
        return found

    def without_path(self, message: str) -> str:
        """`message` with the model's name in place of the folder's path, which clients must not see."""
        return message.replace(str(self.model.path), self.name)


class Service:
    """The models. They are opened in a thread, so that the server answers probes meanwhile.

    state: "loading", "ready", "draining" or "failed".
    failure: the error of opening a model, in the state "failed".
    on_failure: called in the event loop when the state becomes "failed".
    loading: entered while the models are opened.
    loop: the event loop, once `start` was called.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.state = "loading"
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.loading: AbstractContextManager[None] = nullcontext()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self.engine_stats)
        self._served: dict[str, Served] = {}
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._opening: asyncio.Task[None] | None = None

    def served(self) -> Iterable[Served]:
        """The opened models."""
        return tuple(self._served.values())

    def engine_stats(self) -> list[tuple[str, EngineStats]]:
        """Each model's name and the state of its engine."""
        return [(each.name, each.engine.stats()) for each in self.served()]

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
            raise RequestError(f"the server is {self.state}; try again later.", None, self.state, 503)

    def find(self, name: str | None) -> Served:
        """The model that a request names. Raises RequestError for an unknown one (404), or if none is ready (503)."""
        self.check_ready()
        names = ", ".join(self._served)
        if name is None and len(self._served) == 1:
            return next(iter(self._served.values()))
        if name is None:
            raise RequestError(f"model is missing; give one of {names}.", "model", "missing_required_parameter")
        if name not in self._served:
            message = f"the model {name[:80]!r} is not served; give one of {names}."
            raise RequestError(message, "model", "model_not_found", 404)
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
            with self.loading:
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
