"""Writes the log from a thread, so that a blocked stderr delays no request."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import IO

MOST = 10_000
"""Maximum number of lines that wait to be written. More are dropped and counted."""

_ENDING = 2.0  # seconds for the last lines
_RETRY = 0.05  # seconds between attempts to write to a terminal that another process made non-blocking


class LogWriter(logging.Handler):
    """A handler whose lines wait in a queue for a thread that writes them.

    After dropped lines, a line says how many there were.

    stream: where the lines go, such as sys.stderr.
    most: number of lines that may wait.
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
                self._write(self.format(_notice(dropped)))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: nobody can read it any more
            if self._descriptor is None:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            else:
                _write_all(self._descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))


def _descriptor(stream: IO[str]) -> int | None:
    """The stream's file, to be written without the stream's lock: Python takes that lock when it ends."""
    try:
        return stream.fileno()
    except (OSError, ValueError):  # not a file
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            time.sleep(_RETRY)


def _notice(dropped: int) -> logging.LogRecord:
    record = logging.LogRecord("topw_deploy.serve", logging.WARNING, __file__, 0, "lines were dropped", None, None)
    record.facts = {"lines": dropped}
    return record
