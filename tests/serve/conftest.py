"""Servers in this process, over toy models."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.toy_model import EOS, Toy, byte_ids, export
from tests.support.waiting import HANG, until
from topw_deploy.runtime import TopWModel
from topw_deploy.serve.app import create_app
from topw_deploy.serve.service import ServeOptions

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}a:"
)
HELLO = [{"role": "user", "content": "Hi"}]
RENDERED = "u:Hi;a:"
HOT: dict[str, Any] = {"temperature": 2.5, "lam": 0.2}
CPU: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}
UNLIMITED: dict[str, float] = dict.fromkeys(
    (
        "body_timeout", "request_timeout", "drain_timeout", "ping_interval",
    ),
    10 * HANG,
)  # fmt: skip
"""The server's limits in seconds, which no test reaches. A test of a limit replaces that limit."""

NewClient = Callable[..., TestClient]
"""The fixture `serve`: (folders by name or one folder, wait=True, **options) -> a client."""


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(3)


@pytest.fixture(scope="session")
def folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with the output `logits`."""
    place = tmp_path_factory.mktemp("served") / "toy"
    return export(place, toy, form="grouped", with_logits=True, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def model(folder: Path) -> TopWModel:
    return TopWModel.from_pretrained(folder, **CPU)


TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'


def export_caller(place: Path) -> Path:
    """Export a chat model that answers the 7 tokens of HELLO with text and a call of a tool."""
    toy = Toy.script([*byte_ids("So: " + CALL), EOS], prompt_tokens=7)
    return export(place, toy, form="grouped", with_logits=True, chat_template=TEMPLATE + "{# <tool_call> #}")


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_caller(tmp_path_factory.mktemp("caller") / "toy")


def until_ready(client: TestClient) -> None:
    until(lambda: client.get("/health").status_code == 200)


def new_client(folders: Path | dict[str, Path], **options: Any) -> TestClient:
    models = folders if isinstance(folders, dict) else {"toy": folders}
    headers = options.pop("headers", None)
    serve_options = ServeOptions(models=models, **{"opening": CPU, **UNLIMITED, **options})
    return TestClient(create_app(serve_options), headers=headers)


@pytest.fixture(scope="session")
def client(folder: Path) -> Iterator[TestClient]:
    """A server that tests share."""
    with new_client(folder) as client:
        until_ready(client)
        yield client


@pytest.fixture
def serve() -> Iterator[NewClient]:
    """A server with other options."""
    clients: list[TestClient] = []

    def start(folders: Path | dict[str, Path], wait: bool = True, **options: Any) -> TestClient:
        client = new_client(folders, **options)
        clients.append(client.__enter__())
        if wait:
            until_ready(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


def events_of(response: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events. The last one is [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def refused(response: Any, status: int, code: str, param: str | None = None) -> str:
    """Check OpenAI's error object. Returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    message: str = error["message"]
    return message


class Gate:
    """Holds the engine's thread at the first token of a sequence, until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        prepare = TopWModel.prepare
        gate = self

        def held(ids: Any) -> bool:
            assert gate.opened.wait(HANG)
            return False

        def watched(model: TopWModel, prompt: Any, *, limits: Any = None, **parameters: Any) -> Any:
            if limits is not None:  # the engine's run, not the model's own
                parameters["stopping_criteria"] = [held]
            return prepare(model, prompt, limits=limits, **parameters)

        monkeypatch.setattr(TopWModel, "prepare", watched)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr("topw_deploy.serve.stream.FIRST_PIECE_SECONDS", 0.05)
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()
