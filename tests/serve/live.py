"""A server at a Unix socket, as `topw serve` runs it, in a thread of the test's process. Requests to it are bytes."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from tests.serve.conftest import CPU, UNLIMITED
from tests.support.waiting import HANG, until
from topw_deploy.serve.app import create_app
from topw_deploy.serve.server import Server, open_socket
from topw_deploy.serve.service import ServeOptions, Service

TEXT = "/v1/completions"
SEEDS = range(4)


def ask(seed: int = 0, **fields: Any) -> dict[str, Any]:
    """The body of a completion request. Each seed gives another text."""
    return {"prompt": "ab", "max_tokens": 6, "temperature": 2.5, "lam": 0.2, "seed": seed, **fields}


def post(body: Any, path: str = TEXT, headers: str = "", close: bool = True) -> bytes:
    """The bytes of a POST request.

    body: bytes, or an object to send as JSON.
    close: whether to ask the server to close the connection after the answer.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    end = "Connection: close\r\n" if close else ""
    return f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n{end}{headers}\r\n".encode() + data


class Live:
    """A running server.

    thread: ident of the thread that runs its event loop.
    """

    def __init__(self, uds: Path, server: Server, service: Service, thread: int | None) -> None:
        self._uds, self._server, self.service, self.thread = uds, server, service, thread

    def connect(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(HANG)
        raw.connect(str(self._uds))
        return raw

    def begin(self, data: bytes) -> socket.socket:
        """Open a connection and send `data` before the server accepts it, so that no timeout has begun."""
        reached, sent = threading.Event(), threading.Event()

        def hold() -> None:
            reached.set()
            assert sent.wait(HANG)

        assert self.service.loop is not None
        self.service.loop.call_soon_threadsafe(hold)
        assert reached.wait(HANG)
        try:
            raw = self.connect()
            raw.sendall(data)
            return raw
        finally:
            sent.set()

    def send(self, data: bytes) -> bytes:
        """Send bytes. Returns all that the server sends until it closes the connection."""
        with self.connect() as raw:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has everything
                raw.sendall(data)
            return read_until_closed(raw)

    def call(self, body: Any, path: str = TEXT, headers: str = "") -> tuple[int, Any]:
        """Post `body`. Returns (status, JSON of the answer)."""
        with self.connect() as raw:
            raw.sendall(post(body, path, headers))
            return read_answer(raw)

    def text(self, seed: int) -> str:
        """The text of the answer to `ask(seed)`."""
        status, answer = self.call(ask(seed))
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    @property
    def in_use(self) -> int:
        (served,) = self.service.served()
        return served.engine.stats().in_use


def read_answer(raw: socket.socket) -> tuple[int, Any]:
    """Read the next answer. Returns (status, its JSON)."""
    with HTTPResponse(raw) as response:
        response.begin()
        return response.status, json.loads(response.read())


def read_until_closed(raw: socket.socket) -> bytes:
    """Read until the server closes the connection. Returns the bytes."""
    found = []
    with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
        while data := raw.recv(2**16):
            found.append(data)
    return b"".join(found)


@contextlib.contextmanager
def live(folder: Path, **options: Any) -> Iterator[Live]:
    """Serve `folder` under the name toy.

    options: of ServeOptions, by default without limits of time; and max_connections.
    """
    most = options.pop("max_connections", None)
    serve_options = ServeOptions(models={"toy": folder}, opening=CPU, **{**UNLIMITED, **options})
    place = Path(tempfile.mkdtemp(prefix="topw"))  # short: a socket's path has at most 107 characters
    app = create_app(serve_options)
    server = Server(app, most)
    listener, _ = open_socket("", 0, place / "s")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        service: Service = app.state.service
        until(lambda: service.state == "ready")
        yield Live(place / "s", server, service, thread.ident)
    finally:
        server.should_exit = True
        thread.join(HANG)
        listener.close()
        shutil.rmtree(place)
