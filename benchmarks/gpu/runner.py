"""The parent process: chooses steps, runs them in children and records results.

It never initialises CUDA, so it cannot hang. Steps that failed before run last, because they may hang.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.children import Child, ChildEndedError
from benchmarks.gpu.job import PART_LIMIT, Job
from benchmarks.gpu.record import ABSENT, DONE, FAILED, PARTIAL, WAITING, Record

_PLAN_LIMIT = 120.0  # seconds for a child to list its steps
_GRACE = 5.0  # seconds to end a child and write the record
_SHORTEST = 20.0  # a partial step continues only with at least this many seconds left

Opened = Callable[[str, Job], Child]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    open_child: Opened = Child
    tried: set[str] = field(default_factory=set)

    def parts(self, names: Sequence[str]) -> None:
        """Run steps not tried with these inputs, then earlier failures."""
        failed_before = {key for key, entry in self.record.steps.items() if entry["state"] == FAILED}
        for name in names:
            self._part(name, lambda key: key not in failed_before or self._changed(key))
        for name in names:
            if any(key.startswith(f"{name}/") and key not in self.tried for key in failed_before):
                self._part(name, lambda key: True)

    def _part(self, name: str, chosen: Callable[[str], bool]) -> None:
        """Run steps of a part. A failed step ends its process, because CUDA errors persist."""
        part_end = min(self.end - _GRACE, time.monotonic() + PART_LIMIT)
        child: Child | None = None
        try:
            child = self.open_child(name, self.job)
            plan = child.plan(min(_PLAN_LIMIT, max(_SHORTEST, self.end - time.monotonic())))
            self._forget(name, {f"{name}/{step}" for step, *_ in plan})
            for step, expected, limit, inputs in plan:
                key, digest = f"{name}/{step}", self._digest(inputs)
                self._mark(key, digest)
                if key in self.tried or not chosen(key) or self._finished(key, digest):
                    continue
                if not self._fits(key, expected, part_end):
                    self._file(key, digest, {"state": WAITING})
                    continue
                self.tried.add(key)
                if child is None:
                    child = self.open_child(name, self.job)
                    child.plan(_PLAN_LIMIT)
                if not self._step(child, key, digest, min(limit, max(1.0, part_end - time.monotonic()))):
                    child.close()
                    child = None
        except ChildEndedError as reason:
            self._file(f"{name}/steps", "", {"state": FAILED, "failed": str(reason)})
        finally:  # without waiting for the child
            if child is not None:
                child.close(wait=sys.exception() is None)

    def _forget(self, name: str, planned: set[str]) -> None:
        """Drop failures of unplanned steps, such as a failure to list them."""
        for key in [key for key in self.record.steps if key.startswith(f"{name}/") and key not in planned]:
            if self.record.steps[key]["state"] in (FAILED, WAITING):
                self.record.drop(key)

    def _step(self, child: Child, key: str, digest: str, limit: float) -> bool:
        """Run one step and record it. Returns whether the child process is still usable."""
        say(f"{key} ...")
        before = self.record.steps.get(key, {})
        goes_on = before.get("partial") and before.get("inputs") == digest and not self.again
        earlier = before["data"] if goes_on else {}
        kept = {"data": earlier}
        started = time.monotonic()

        def keep(data: dict[str, Any]) -> None:
            kept["data"] = data
            self._file(key, digest, {"state": PARTIAL, "data": data, "partial": True})

        soft = started + max(0.7 * limit, limit - 60)  # before the kill, for loops that check the time
        try:
            event = child.ask(key.split("/", 1)[1], earlier, soft, limit, keep)
        except ChildEndedError as reason:
            lasted = time.monotonic() - started
            failed = {"state": FAILED, "failed": str(reason), "seconds": lasted}
            self._file(key, digest, {**failed, "data": kept["data"], "partial": bool(kept["data"])})
            return False
        result = event["result"]
        self._file(key, digest, {"state": _outcome_name(result), "seconds": event["seconds"], **result})
        return not result["failed"]

    def _file(self, key: str, digest: str, entry: dict[str, Any]) -> None:
        """Record a step; a waiting step keeps its earlier results."""
        if entry["state"] == WAITING:
            known = self.record.steps.get(key, {})
            entry = known if known.get("state") in (DONE, PARTIAL, FAILED) else entry
        else:
            entry = {"when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **entry}
            _announce(key, entry)
        self.record.put(key, {"inputs": digest, "base": self.base, **entry})

    def _fits(self, key: str, expected: float, part_end: float) -> bool:
        known = self.record.steps.get(key, {})
        left = part_end - time.monotonic()
        if known.get("partial"):
            return left >= _SHORTEST
        return left >= (known["seconds"] if known.get("state") == DONE and "seconds" in known else expected)

    def _finished(self, key: str, digest: str) -> bool:
        entry = self.record.steps.get(key, {})
        return not self.again and entry.get("state") == DONE and entry.get("inputs") == digest

    def _changed(self, key: str) -> bool:
        return self.record.steps[key].get("base") != self.base

    def _mark(self, key: str, digest: str) -> None:
        entry = self.record.steps.get(key)
        if entry is not None:
            entry["stale"] = entry.get("inputs") != digest

    def _digest(self, inputs: Sequence[str]) -> str:
        return hashlib.sha256("\0".join([self.base, *inputs]).encode()).hexdigest()[:16]


def _outcome_name(result: dict[str, Any]) -> str:
    if result["failed"]:
        return FAILED
    if result["partial"]:
        return PARTIAL
    return ABSENT if result["absent"] and not result["data"] and not result["table"] else DONE


def _announce(key: str, entry: dict[str, Any]) -> None:
    if entry.get("failed"):
        say(f"FAILED {key}: {entry['failed']}")
    for sentence in entry.get("absent", ()):
        say(f"NOT RUN {key}: {sentence}")
    if entry["state"] == DONE:
        say(f"{key}: done, {entry['seconds']:.1f} s")
