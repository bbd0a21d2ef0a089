"""Formats the log's lines, and writes them in a thread, so that a blocked stderr delays no request."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from typing import IO

MOST = 10_000
"""Maximum number of lines that wait to be written. Further lines are dropped and counted."""

_ENDING = 2.0  # seconds that `close` waits for the last lines
_RETRY = 0.05  # seconds between attempts to write to a terminal that another process made non-blocking


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, event, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _timestamp(record), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Formats a record as text: time, level, event, and `name=value` for each fact."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        stated = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.items())
        line = f"{_timestamp(record)} {record.levelname} {record.getMessage()} {stated}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class LogWriter(logging.Handler):
    """A handler that queues lines for a thread, which writes them.

    After dropped lines, it writes a line with their number.

    stream: where the lines go, such as sys.stderr.
    most: maximum number of queued lines.
    """

    def __init__(self, stream: IO[str], most: int = MOST) -> None:
        super().__init__()
        self._stream, self._descriptor = stream, _descriptor(stream)
        self._most = most
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a signal may interrupt its put() and log
        self._counting = threading.RLock()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="topw-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < self._most:
            self._lines.put(self.format(record))
        else:
            with self._counting:
                self._dropped += 1

    def close(self) -> None:
        """Write the waiting lines, for at most a few seconds."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(_ENDING)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write(self.format(_dropped_lines(dropped)))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed: nobody can read it
            if self._descriptor is None:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            else:
                _write_all(self._descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))


def _descriptor(stream: IO[str]) -> int | None:
    """The stream's file descriptor; None for a stream without a file.

    Writing to the descriptor does not take the stream's lock, which Python takes when it exits.
    """
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            time.sleep(_RETRY)


def _dropped_lines(dropped: int) -> logging.LogRecord:
    record = logging.LogRecord("topw_deploy.serve", logging.WARNING, __file__, 0, "lines were dropped", None, None)
    record.facts = {"lines": dropped}
    return record
