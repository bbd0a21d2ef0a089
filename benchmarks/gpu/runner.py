"""Choose steps, run them in child processes with time limits, and record the results.

The parent never initialises CUDA, so it cannot hang. A child, `python -m benchmarks.gpu.runner PART JOB`, lists its
steps, then runs those requested by JSON lines on stdin. It writes events to the file descriptor TOPW_EVENTS. A hung
child is killed with its children.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import archives
from benchmarks.gpu.job import PART_LIMIT, Job, Result, Step, StepError, steps_of
from benchmarks.gpu.record import ABSENT, DONE, FAILED, PARTIAL, WAITING, Record

ROOT = Path(__file__).parents[2]
_LAST_WORDS = 6  # lines of output recorded when a child dies
EVENTS = "TOPW_EVENTS"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PLAN_LIMIT = 120.0  # seconds for a child to list its steps
_GRACE = 5.0  # seconds to end a child and write the record
_SHORTEST = 20.0  # a partial step continues only with at least this many seconds left


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
            [sys.executable, "-m", "benchmarks.gpu.runner", part, job.as_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(writing,),
            env={**archives.environment(job.packed, environment()), EVENTS: str(writing)}, cwd=ROOT,
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


def main() -> int:
    """The child process of a part."""
    part, given = sys.argv[1:]
    with suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = Job.from_json(given)
    with os.fdopen(int(os.environ.pop(EVENTS)), "w", encoding="utf-8") as events:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        steps = {step.name: step for step in steps_of(part, job)}
        tell(plan=[[s.name, s.seconds, s.longest, list(s.inputs)] for s in steps.values()])
        for line in sys.stdin:
            asked = json.loads(line)
            job.earlier, job.end = asked["earlier"], asked["end"]
            job.keep = lambda data: tell(kept=data)
            started = time.monotonic()
            result = run_step(steps[asked["step"]], job)
            tell(result=asdict(result), seconds=time.monotonic() - started)
    return 0


def run_step(step: Step, job: Job) -> Result:
    """The step's result; an exception is a failure."""
    try:
        return step.run(job)
    except StepError as error:
        return Result(failed=str(error))
    except Exception as error:  # noqa: BLE001 - any error is the step's result
        traceback.print_exc()
        return Result(failed=f"{type(error).__name__}: {error}"[:2000])


@dataclass
class Run:
    """One run of the command.

    base: digest of everything that all results depend on.
    end: end of the budget, on time.monotonic's clock.
    """

    record: Record
    job: Job
    base: str
    end: float = float("inf")
    again: bool = False
    open_child: Callable[[str, Job], Child] = Child

    def part(self, name: str) -> None:
        """Run the steps that are not done with these inputs. A failed step ends its process: CUDA errors persist."""
        part_end = min(self.end - _GRACE, time.monotonic() + PART_LIMIT)
        child: Child | None = None
        try:
            child = self.open_child(name, self.job)
            plan = child.plan(min(_PLAN_LIMIT, max(_SHORTEST, self.end - time.monotonic())))
            self._forget(name, {f"{name}/{step}" for step, *_ in plan})
            for step, expected, limit, inputs in plan:
                key = f"{name}/{step}"
                digest = hashlib.sha256("\0".join([self.base, *inputs]).encode()).hexdigest()[:16]
                known = self.record.steps.get(key, {})
                if self.again or known.get("inputs") != digest:
                    known = {}
                if known.get("state") == DONE:
                    continue
                left = part_end - time.monotonic()
                if left < (_SHORTEST if known.get("partial") else expected):
                    self.record.put(key, known or {"state": WAITING, "inputs": digest})
                    continue
                if child is None:
                    child = self.open_child(name, self.job)
                    child.plan(_PLAN_LIMIT)
                earlier = known["data"] if known.get("partial") else {}
                if not self._step(child, key, digest, earlier, min(limit, max(1.0, left))):
                    child.close()
                    child = None
        except ChildEndedError as reason:
            self._file(f"{name}/steps", {"state": FAILED, "inputs": "", "failed": str(reason)})
        finally:  # without waiting for the child
            if child is not None:
                child.close(wait=sys.exception() is None)

    def _forget(self, name: str, planned: set[str]) -> None:
        """Drop failures of unplanned steps, such as a failure to list them."""
        for key in [key for key in self.record.steps if key.startswith(f"{name}/") and key not in planned]:
            if self.record.steps[key]["state"] in (FAILED, WAITING):
                del self.record.steps[key]

    def _step(self, child: Child, key: str, digest: str, earlier: dict[str, Any], limit: float) -> bool:
        """Run one step and record it. Returns whether the child process is still usable."""
        say(f"{key} ...")
        started, kept = time.monotonic(), {"data": earlier, "partial": bool(earlier)}

        def keep(data: dict[str, Any]) -> None:
            kept.update(data=data, partial=True)
            self._file(key, {"state": PARTIAL, "inputs": digest, **kept})

        soft = started + max(0.7 * limit, limit - 60)  # before the kill, for loops that check the time
        try:
            event = child.ask(key.split("/", 1)[1], earlier, soft, limit, keep)
        except ChildEndedError as reason:
            took = time.monotonic() - started
            self._file(key, {"state": FAILED, "inputs": digest, "failed": str(reason), "seconds": took, **kept})
            return False
        result = event["result"]
        state = FAILED if result["failed"] else PARTIAL if result["partial"] else DONE
        if state == DONE and result["absent"] and not result["data"] and not result["table"]:
            state = ABSENT
        self._file(key, {"state": state, "inputs": digest, "seconds": event["seconds"], **result})
        return not result["failed"]

    def _file(self, key: str, entry: dict[str, Any]) -> None:
        """Record a step, and say how it went."""
        if entry.get("failed"):
            say(f"FAILED {key}: {entry['failed']}")
        for sentence in entry.get("absent", ()):
            say(f"NOT RUN {key}: {sentence}")
        if entry["state"] == DONE:
            say(f"{key}: done, {entry['seconds']:.1f} s")
        self.record.put(key, {"when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **entry})


if __name__ == "__main__":
    sys.exit(main())
