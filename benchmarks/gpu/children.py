"""Child processes with a time limit; a hung child is killed with its children."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu import unpack
from benchmarks.gpu.job import Job
from benchmarks.gpu.worker import EVENTS

ROOT = Path(__file__).parents[2]
_LAST_WORDS = 6  # lines of output recorded when a child dies


class ChildEndedError(Exception):
    """The child was killed at its limit or gave no answer."""


def environment() -> dict[str, str]:
    """A child's environment variables, with this checkout before installed packages."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


class Child:
    """A process that runs one part's steps."""

    def __init__(self, part: str, job: Job) -> None:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", part, job.as_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(writing,),
            env={**unpack.environment(job.packed, environment()), EVENTS: str(writing)}, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        self._events, self._unread = reading, b""
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listener = threading.Thread(target=self._pass_on, daemon=True)
        self._listener.start()

    def plan(self, limit: float) -> list[tuple[str, float, float, list[str]]]:
        """The (name, expected seconds, limit, inputs) of each step. Raises ChildEndedError."""
        return [tuple(step) for step in self._event(time.monotonic() + limit, limit)["plan"]]

    def ask(self, step: str, earlier: dict[str, Any], end: float, limit: float,
            kept: Callable[[dict[str, Any]], None]) -> dict[str, Any]:  # fmt: skip
        """Run a step and return its event, with `result` and `seconds`.

        kept: called with the data of the unfinished step.
        end: time by which the step should end, on time.monotonic's clock.
        limit: seconds until the child is killed.

        Raises ChildEndedError.
        """
        assert self._process.stdin is not None
        killed_at = time.monotonic() + limit
        line = json.dumps({"step": step, "earlier": earlier, "end": end}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildEndedError(self._how_it_ended()) from None
        while True:
            event = self._event(killed_at, limit)
            if "result" in event:
                return event
            kept(event["kept"])

    def close(self, wait: bool = True) -> None:
        """End the child and its children. wait: let it exit first."""
        assert self._process.stdin is not None
        if wait and self._process.poll() is None and not self._process.stdin.closed:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(timeout=10)
        self._kill()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1

    def _event(self, until: float, limit: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._events], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._kill()
                raise ChildEndedError(f"killed after {limit:.0f} s without an answer{self._last_words()}.")
            got = os.read(self._events, 1 << 16)
            if not got:
                raise ChildEndedError(self._how_it_ended())
            self._unread += got
        line, self._unread = self._unread.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        return event

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            return f"its process stopped answering{self._last_words()}."
        self._listener.join(timeout=2)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}{self._last_words()}."

    def _last_words(self) -> str:
        words = " / ".join(line.strip() for line in self._said if line.strip("~^ "))
        return f"; its last lines: {words[-1500:]}" if words else ""

    def _kill(self) -> None:
        """Kill without waiting, because a process blocked in the driver survives SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()  # before its children, so that it starts no others
        for process in _session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            self._said.append(text.rsplit("\r", 1)[-1])
            print(text, file=sys.stderr, flush=True)


def _session(leader: int) -> list[int]:
    """Process ids of the leader's session, including those in other process groups."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended
            fields = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
            if int(fields[3]) == leader:
                found.append(int(stat.parent.name))
    return found
