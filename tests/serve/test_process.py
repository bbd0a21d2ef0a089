"""A server's process: opening its models, wrong options, and signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import CPU, NewClient, refused
from tests.support.waiting import HANG, until_async
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.serve.app import create_app
from topw_deploy.serve.server import Server
from topw_deploy.serve.service import Served, ServeOptions, Service

CHAT = "/v1/chat/completions"


def test_until_the_models_are_open_requests_get_503(
    serve: NewClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, load = threading.Event(), TopWModel.from_pretrained

    def slow(*arguments: Any, **options: Any) -> TopWModel:
        assert opened.wait(HANG)
        return load(*arguments, **options)

    monkeypatch.setattr(TopWModel, "from_pretrained", slow)
    client = serve(folder, wait=False)
    try:
        response = client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        refused(client.post(CHAT, content=b"{"), 503, "loading")
        refused(client.get("/v1/models"), 503, "loading")
        assert client.get("/metrics").status_code == client.get("/live").status_code == 200
    finally:
        opened.set()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"models": {}}, "no model"),
        ({"models": {"a\n": Path()}}, "name of a model"),
        ({"api_keys": ("",)}, "api_key"),
        ({"max_body": 0}, "max_body"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"ping_interval": float("inf")}, "ping_interval"),
        ({"tool_parser": "none"}, "tool_parser"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        ServeOptions(**{"models": {"toy": Path("toy")}, **options})


@pytest.mark.parametrize(
    ("loaded", "signals", "codes"), [(True, 1, []), (True, 2, [128 + 15]), (False, 1, [0]), (False, 2, [0, 128 + 15])]
)
def test_a_second_signal_and_one_while_models_are_opened_end_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool, signals: int, codes: list[int]
) -> None:
    """Threads inside onnxruntime cannot be interrupted, and may take minutes."""
    armed, found, opened = list[float](), list[int](), threading.Event()
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, exit: armed.append(seconds))
    real = Served.open.__func__  # type: ignore[attr-defined]

    def slowly(cls: Any, *arguments: Any) -> Any:
        assert opened.wait(HANG)
        return real(cls, *arguments)

    monkeypatch.setattr(Served, "open", classmethod(slowly))
    if loaded:
        opened.set()

    async def main() -> None:
        options = ServeOptions(models={"toy": folder}, opening=CPU, drain_timeout=7.0)
        app = create_app(options)
        service: Service = app.state.service
        server = Server(app)
        server.end = found.append
        async with app.router.lifespan_context(app):
            if loaded:
                await until_async(lambda: service.state == "ready")
            for _ in range(signals):
                server.handle_exit(signal.SIGTERM, None)
                await asyncio.sleep(0)
            await until_async(lambda: server.should_exit)
            opened.set()

    asyncio.run(main())
    assert found == codes
    assert armed == [37.0], "seconds after which a server that is stuck ends"


def test_a_signal_before_the_server_has_a_loop_ends_the_process(folder: Path) -> None:
    options, found = ServeOptions(models={"toy": folder}, opening=CPU), list[int]()
    server = Server(create_app(options))
    server.end = found.append
    server.handle_exit(signal.SIGINT, None)
    assert found == [0]


def test_a_signal_logs_nothing_at_once(folder: Path) -> None:
    """It may interrupt the writing of a line, and would wait for a lock that is held until it returns."""
    said: list[str] = []

    async def main() -> None:
        options = ServeOptions(models={"toy": folder}, opening=CPU)
        app = create_app(options)
        service: Service = app.state.service
        service.loop = asyncio.get_running_loop()
        server = Server(app)
        server.handle_exit(signal.SIGTERM, None)
        assert said == []
        await until_async(lambda: server.should_exit)

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, kept = logging.getLogger("topw_deploy.serve"), Kept()
    before = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    try:
        asyncio.run(main())
    finally:
        log.removeHandler(kept)
        log.setLevel(before)
    assert said == ["stopping", "draining"]
