"""Draining, full queues, time limits, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from tests.serve.conftest import CPU, HELLO, UNLIMITED, Gate, NewClient
from tests.support.waiting import HANG, set_when, until_async
from topw_deploy.errors import LogitsError
from topw_deploy.runtime import TopWModel
from topw_deploy.serve.app import create_app
from topw_deploy.serve.service import PREPARING_THREADS, ServeOptions, Service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"messages": HELLO, "ignore_eos": True, "seed": 1}


class Call:
    """One request to the application, without a socket.

    whole: whether all of the body arrives.
    reads: whether the client takes the answer.
    sent: messages that the application has sent.
    gone: set by the test to disconnect the client.
    """

    def __init__(
        self, app: Starlette, path: str, body: Any = None, method: str = "POST", whole: bool = True, reads: bool = True
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self._whole, self._reads = whole, reads
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("test", 80), "state": {},
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if "status" in message), None)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": not self._whole}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if not self._reads:
            await asyncio.Event().wait()


def with_service(folder: Path, test: Callable[[Starlette, Service], Awaitable[None]], **options: Any) -> None:
    """Run a test in the event loop of a ready server.

    options: of ServeOptions, by default without limits of time.
    """

    async def main() -> None:
        app = create_app(ServeOptions(models={"toy": folder}, opening=CPU, **{**UNLIMITED, **options}))
        async with app.router.lifespan_context(app):
            service: Service = app.state.service
            await until_async(lambda: service.state == "ready")
            await test(app, service)

    asyncio.run(main())


def in_use(service: Service) -> int:
    """Number of sequences that have a row of the cache."""
    (served,) = service.served()
    return served.engine.stats().in_use


def posted(service: Service) -> int:
    """Number of messages that wait for the engine's thread, which a gate holds."""
    (served,) = service.served()
    return served.engine._worker._inbox.qsize()


def by_label(service: Service, name: str, label: str, **others: str) -> dict[str, float]:
    """The values of a metric, by one of its labels. others: the other labels' values."""
    samples = (sample for family in service.metrics.registry.collect() for sample in family.samples)
    found = [each for each in samples if each.name == name and others.items() <= each.labels.items()]
    return {each.labels[label]: each.value for each in found}


def ended(service: Service) -> dict[str, float]:
    """Number of sequences that ended, by reason."""
    return by_label(service, "topw:request_success_total", "finished_reason")


def counted(service: Service, path: str) -> dict[str, float]:
    """Number of answers, by status."""
    return by_label(service, "topw:http_responses_total", "status", path=path)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(folder: Path, gate: Gate, stream: bool) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, CHAT, {**ENDLESS, "stream": stream})
        await until_async(lambda: in_use(service) == 1)
        if stream:
            await until_async(lambda: call.status == 200)
        call.gone.set()
        await asyncio.wait_for(call.task, HANG)
        await until_async(lambda: posted(service))
        gate.opened.set()
        await until_async(lambda: in_use(service) == 0)
        (served,) = service.served()
        assert served.engine.stats().new_tokens <= 2
        assert ended(service) == {"abort": 1}
        assert counted(service, CHAT) == {"200": 1} if stream else {"499": 1}
        other = Call(app, CHAT, {**ENDLESS, "max_tokens": 2})
        await asyncio.wait_for(other.task, HANG)
        assert other.status == 200
        assert ended(service) == {"abort": 1, "length": 1}

    with_service(folder, test, engine={"max_batch": 1})


@pytest.mark.parametrize("stream", [False, True])
def test_all_sequences_of_a_client_that_goes_away_count_as_aborted(folder: Path, gate: Gate, stream: bool) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, TEXT, {"prompt": ["a", "b"], "n": 3, "ignore_eos": True, "stream": stream})
        await until_async(lambda: in_use(service) > 0)
        call.gone.set()
        await asyncio.wait_for(call.task, HANG)
        await until_async(lambda: posted(service))
        gate.opened.set()
        assert ended(service) == {"abort": 6}

    with_service(folder, test, engine={"max_batch": 2})


def test_a_stream_that_the_engine_fails_ends_with_its_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = TopWModel.prepare

    begun = threading.Event()

    def fails(ids: Any) -> bool:
        assert begun.wait(HANG)  # an earlier error would be the whole answer
        raise LogitsError("there is no token left to draw; relax the constraints.")

    def failing(model: TopWModel, prompt: Any, **parameters: Any) -> Any:
        return prepare(model, prompt, **{**parameters, "stopping_criteria": [fails]})

    monkeypatch.setattr(TopWModel, "prepare", failing)
    monkeypatch.setattr("topw_deploy.serve.stream.FIRST_PIECE_SECONDS", 0.0)

    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, TEXT, {"prompt": "a", "n": 2, "ignore_eos": True, "stream": True})
        await until_async(lambda: call.status == 200)
        begun.set()
        await asyncio.wait_for(call.task, HANG)
        last = json.loads(call.text.split("data: ")[-2])
        assert last["error"]["code"] == "no_token_to_draw"
        assert ended(service) == {}
        assert by_label(service, "topw:failed_requests_total", "model_name") == {"toy": 1}

    with_service(folder, test)


def test_a_stream_that_was_never_read_frees_its_row(folder: Path, gate: Gate) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, CHAT, {**ENDLESS, "stream": True}, reads=False)
        await until_async(lambda: call.status == 200 and in_use(service) == 1)
        call.gone.set()
        await asyncio.wait_for(call.task, HANG)
        await until_async(lambda: posted(service))
        gate.opened.set()
        await until_async(lambda: in_use(service) == 0)
        (served,) = service.served()
        assert served.engine.stats().new_tokens <= 2

    with_service(folder, test)


def test_a_thread_whose_client_left_still_counts_until_it_ends(folder: Path) -> None:
    """Otherwise clients that leave could start any number of slow grammars."""

    async def test(app: Starlette, service: Service) -> None:
        (served,) = service.served()
        opened, ran = threading.Event(), list[int]()
        tasks = [asyncio.ensure_future(served.prepare(lambda: opened.wait(HANG))) for _ in range(PREPARING_THREADS)]
        await until_async(lambda: served._preparing.borrowed_tokens == PREPARING_THREADS)
        late = asyncio.ensure_future(served.prepare(lambda: ran.append(1)))
        await asyncio.sleep(0)
        for task in (*tasks, late):
            task.cancel()
        await asyncio.wait({*tasks, late})
        assert served._preparing.borrowed_tokens == PREPARING_THREADS
        opened.set()
        await until_async(lambda: served._preparing.borrowed_tokens == 0)
        assert not ran
        assert await served.prepare(lambda: 5) == 5

    with_service(folder, test)


def test_a_stream_begins_before_its_first_token_and_is_kept_alive(folder: Path, gate: Gate) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, CHAT, {**ENDLESS, "max_tokens": 2, "stream": True})
        await until_async(lambda: call.text.count(": keep-alive\n\n") >= 2)
        assert call.status == 200
        gate.opened.set()
        await asyncio.wait_for(call.task, HANG)
        assert call.text.replace(": keep-alive\n\n", "").endswith("data: [DONE]\n\n")  # one may follow

    with_service(folder, test, ping_interval=0.05)


def test_a_body_that_does_not_arrive_is_not_waited_for(folder: Path) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, CHAT, ENDLESS, whole=False)
        await asyncio.wait_for(call.task, HANG)
        assert call.status == 408
        assert counted(service, CHAT) == {"408": 1}
        assert json.loads(call.text)["error"]["code"] == "request_timeout"

    with_service(folder, test, body_timeout=0.05)


def test_a_full_queue_is_a_429_also_for_streams(folder: Path, gate: Gate) -> None:
    async def test(app: Starlette, service: Service) -> None:
        first = Call(app, CHAT, {**ENDLESS, "max_tokens": 2})
        await until_async(lambda: in_use(service) == 1)
        for stream in (False, True):
            second = Call(app, CHAT, {**ENDLESS, "stream": stream})
            await asyncio.wait_for(second.task, HANG)
            assert second.status == 429
            assert json.loads(second.text)["error"]["code"] == "queue_full"
            assert (b"retry-after", b"1") in second.sent[0]["headers"]
        assert counted(service, CHAT) == {"429": 2}
        gate.opened.set()
        await asyncio.wait_for(first.task, HANG)
        assert first.status == 200

    with_service(folder, test, engine={"max_batch": 1, "max_queue": 0})


def test_a_request_out_of_time_returns_what_it_has(
    serve: NewClient, folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, passed = UNLIMITED["request_timeout"], 0.0
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed)
    monkeypatch.setattr("topw_deploy.engine.worker.time", clock)
    client = serve(folder, request_timeout=seconds)
    service: Service = client.app.state.service  # type: ignore[attr-defined]

    def is_out_of_time() -> bool:
        nonlocal passed
        passed = seconds * in_use(service)
        return passed > 0

    set_when(gate.opened, is_out_of_time)
    answer = client.post(CHAT, json=ENDLESS).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    assert answer["usage"]["completion_tokens"] == 2, "of the iteration that the gate held: the first one and a step's"


def test_draining_refuses_new_requests_and_finishes_the_running_ones(folder: Path, gate: Gate) -> None:
    async def test(app: Starlette, service: Service) -> None:
        running = Call(app, CHAT, {**ENDLESS, "max_tokens": 2})
        await until_async(lambda: in_use(service) == 1)
        drained = asyncio.ensure_future(service.drain())
        await asyncio.sleep(0)
        late = Call(app, CHAT, ENDLESS)
        await asyncio.wait_for(late.task, HANG)
        assert late.status == 503
        assert json.loads(late.text)["error"]["code"] == "draining"
        probes = [Call(app, path, method="GET") for path in ("/health", "/live")]
        await asyncio.gather(*(probe.task for probe in probes))
        assert [probe.status for probe in probes] == [503, 200]
        assert not drained.done()
        gate.opened.set()
        await asyncio.wait_for(running.task, HANG)
        assert running.status == 200
        assert await drained is True

    with_service(folder, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_does_not_end_in_time_is_cancelled_with_an_error(folder: Path, gate: Gate, stream: bool) -> None:
    async def test(app: Starlette, service: Service) -> None:
        call = Call(app, CHAT, {**ENDLESS, "stream": stream})
        await until_async(lambda: in_use(service) == 1)
        if stream:
            await until_async(lambda: call.status == 200)
        set_when(gate.opened, lambda: posted(service))
        assert await service.drain() is False
        await asyncio.wait_for(call.task, HANG)
        assert '"code":"draining"' in call.text
        assert call.status == (200 if stream else 503)
        assert ended(service) == {"abort": 1}

    with_service(folder, test, drain_timeout=0.05)
