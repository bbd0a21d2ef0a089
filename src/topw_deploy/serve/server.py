"""Opens the socket, runs uvicorn, and drains at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette

from topw_deploy.engine.engine import sequence_length
from topw_deploy.errors import ParameterError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.serve.app import create_app
from topw_deploy.serve.protocol import Protocol
from topw_deploy.serve.service import ServeOptions, Service

LOG = logging.getLogger("topw_deploy.serve")
_CLOSING = 5  # seconds that a stopping server waits for connections whose clients do not read
_IDLE = 5  # seconds after an answer until uvicorn closes a connection on which no request begins
_STUCK = 30.0  # seconds after the drain until a server that still runs is ended


def run(
    options: ServeOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: Path | None = None,
    max_connections: int | None = None,
    json_logs: bool = True,
    verbose: bool = False,
    write_log: Callable[[str], object] | None = None,
    loading: AbstractContextManager[None] | None = None,
) -> None:
    """Serve until a signal arrives. The first SIGTERM or SIGINT drains, the second one ends the process at once.

    While a model is opened, which no thread can interrupt, the first signal ends the process at once. A server that
    does not end in time writes the stacks of its threads to stderr, and ends.

    uds: path of a Unix socket, used instead of host and port.
    max_connections: maximum number of connections; further ones are answered with 503.
    json_logs: whether each line of the log is a JSON object. If not, a line for people names the page.
    verbose: whether successful GET requests are logged.
    write_log: writes lines of the log; None for stderr.
    loading: entered while the models are opened.

    Raises ManifestError for a folder that is no exported model, ParameterError if the address cannot be used or a
    model cannot be served with these options, and the errors of opening a model.
    """
    app = create_app(options)
    service: Service = app.state.service
    listener, where = open_socket(host, port, uds)
    service.loading = loading or nullcontext()
    log = start_log(json_logs, verbose, write_log)

    def end(code: int) -> None:
        """End the process without its threads, which may be inside onnxruntime for long."""
        if uds is not None:
            uds.unlink(missing_ok=True)
        log.flush()
        os._exit(code)

    try:
        for folder in options.models.values():
            decoder = ModelFolder(folder, DecoderManifest).manifest.decoder
            sequence_length(folder, decoder, options.engine.get("max_length"))
        server = Server(app, max_connections)
        server.end = end
        LOG.info("listening", extra={"facts": {"address": where, "models": list(options.models)}})
        if uds is None and options.page and not json_logs:
            log.stream.write(f"Open {where}\n")
        if uds is None and not options.api_keys and not host.startswith("127.") and host not in ("localhost", "::1"):
            LOG.warning("the server has no API key, and other machines can reach it")
        server.run(sockets=[listener])
    finally:
        faulthandler.cancel_dump_traceback_later()
        listener.close()
        if uds is not None:
            uds.unlink(missing_ok=True)
        log.flush()
    if service.failure is not None:
        raise service.failure


class Server(uvicorn.Server):
    """uvicorn's server of the application. While it drains, it still answers health checks, with 503.

    end: function that ends the process with an exit code; None if the process is not the server's own.
    """

    def __init__(self, app: Starlette, max_connections: int | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                log_config=None,
                access_log=False,
                ws="none",
                lifespan="on",
                server_header=False,
                limit_concurrency=max_connections,
                timeout_keep_alive=_IDLE,
                timeout_graceful_shutdown=_CLOSING,
            )
        )
        self._service: Service = app.state.service
        self._draining: asyncio.Task[bool] | None = None
        self._has_signal = False
        self.end: Callable[[int], None] | None = None
        self._service.on_failure = self._should_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn at a signal. Logs nothing: the interrupted thread may hold a lock of the log."""
        loop = self._service.loop
        if self.end is not None and (self._has_signal or loop is None):
            self.end(128 + sig if self._has_signal else 0)
        if self._has_signal or loop is None:
            self.force_exit = self._has_signal
            self.should_exit = True
            return
        self._has_signal = True
        if self.end is not None:
            seconds = self._service.options.drain_timeout + _STUCK
            with contextlib.suppress(Exception):  # stderr is not a file
                faulthandler.dump_traceback_later(seconds, exit=True)
        loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, name: str) -> None:
        LOG.info("stopping", extra={"facts": {"signal": name}})
        if self.end is not None and self._service.state == "loading":
            self.end(0)
        self._draining = asyncio.ensure_future(self._service.drain())
        self._draining.add_done_callback(lambda _: self._should_exit())

    def _should_exit(self) -> None:
        self.should_exit = True


def open_socket(host: str, port: int, uds: Path | None) -> tuple[socket.socket, str]:
    """Returns (a listening socket, its address for the log). Raises ParameterError if the address cannot be used."""
    try:
        if uds is not None:
            return _unix_socket(uds), f"unix:{uds}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        name = "uds" if uds is not None else "port"
        where = str(uds) if uds is not None else f"{host}:{port}"
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]  # without Python's own remark
        raise ParameterError(f"the server cannot listen at {where}: {reason}; give another {name}.", name) from None
    shown = f"[{host}]" if ":" in host else host
    return listener, f"http://{shown}:{listener.getsockname()[1]}"


def _unix_socket(path: Path) -> socket.socket:
    """A listening Unix socket, to which only its owner can connect.

    Replaces a socket that a killed server left. Raises ParameterError for a socket at which a process listens.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a full backlog gives an error instead of blocking
            try:
                probe.connect(str(path))
                is_used = True
            except BlockingIOError:
                is_used = True
            except (ConnectionRefusedError, FileNotFoundError):
                is_used = False
        if is_used:
            raise ParameterError(f"another process listens at {path}; stop it, or give another uds.", "uds")
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(old)
    return listener


class LogFormatter(logging.Formatter):
    """Formats a record and the facts of its request: as one JSON object, or as text with `name=value` of each fact."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        when, event, facts = f"{seconds}.{int(record.msecs):03d}Z", record.getMessage(), getattr(record, "facts", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            line = {"time": when, "level": record.levelname.lower(), "event": event, **facts}
            return json.dumps({**line, "traceback": trace} if trace else line, default=str)
        stated = [f"{name}={json.dumps(value, default=str)}" for name, value in facts.items()]
        return " ".join([when, record.levelname, event, *stated]) + (f"\n{trace}" if trace else "")


def start_log(
    json_lines: bool, verbose: bool, write: Callable[[str], object] | None = None
) -> logging.StreamHandler[Any]:
    """Send the logs of the server, of uvicorn and of asyncio to `write`, or else to stderr."""
    handler = logging.StreamHandler[Any](sys.stderr if write is None else SimpleNamespace(write=write))
    handler.setFormatter(LogFormatter(json_lines))
    for name, level in (
        ("topw_deploy.serve", logging.DEBUG if verbose else logging.INFO),
        ("uvicorn", logging.WARNING),
        ("asyncio", logging.WARNING),
    ):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
    return handler
