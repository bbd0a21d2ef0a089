"""Calls from several threads run on one."""

from __future__ import annotations

import gc
import queue
import threading

import pytest

from tests.support.waiting import HANG
from topw_deploy.runtime.ort import device
from topw_deploy.runtime.ort.device import RunThread


def test_an_error_is_raised_in_the_caller_and_the_thread_continues() -> None:
    runner, seen = RunThread(), list[str]()

    def fail() -> None:
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        runner.call(fail)
    runner.call(lambda: seen.append("next"))
    assert seen == ["next"]


def test_a_call_from_the_thread_itself_runs_at_once() -> None:
    runner, seen = RunThread(), list[str]()
    runner.call(lambda: runner.call(lambda: seen.append("inner")))
    assert seen == ["inner"]


def test_an_interrupted_caller_waits_until_its_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ended, waits_again = RunThread(), list[str](), threading.Event()

    class Interrupted(queue.SimpleQueue):  # type: ignore[type-arg]
        """A queue whose first wait is interrupted, as by Ctrl-C."""

        waits = 0

        def get(self) -> object:  # type: ignore[override]
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            waits_again.set()
            return super().get()

    runner.call(lambda: None)  # starts the thread
    monkeypatch.setattr(device, "SimpleQueue", Interrupted)

    def work() -> None:
        assert waits_again.wait(HANG)
        ended.append("work")

    with pytest.raises(KeyboardInterrupt):
        runner.call(work)
    assert ended == ["work"]


def test_the_thread_ends_with_its_owner() -> None:
    runner = RunThread()
    runner.call(lambda: None)
    thread = runner._thread
    assert thread is not None
    assert thread.is_alive()
    del runner
    gc.collect()
    thread.join(HANG)
    assert not thread.is_alive()
