"""Calls from several threads run on one."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from topw_deploy.runtime.ort.device_binding import RunThread


def test_calls_run_on_one_thread_in_order() -> None:
    runner, seen, running = RunThread(), list[int](), list[int]()

    def work() -> None:
        seen.append(threading.get_ident())
        running.append(1)
        assert len(running) == 1
        time.sleep(0.001)
        running.pop()

    callers = [threading.Thread(target=lambda: [runner.call(work) for _ in range(5)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(seen) == 20
    assert set(seen) - {threading.get_ident()} == set(seen)
    assert len(set(seen)) == 1


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
    runner, ended = RunThread(), list[str]()

    class Interrupted:
        """A lock whose first wait is interrupted, as by Ctrl-C."""

        def __init__(self, real: threading.Lock) -> None:
            self.real, self.waits = real, 0
            self.release = real.release

        def acquire(self) -> None:
            self.waits += 1
            if self.waits == 2:
                raise KeyboardInterrupt
            self.real.acquire()

    real = threading.Lock
    runner.call(lambda: None)  # starts the thread
    monkeypatch.setattr(threading, "Lock", lambda: Interrupted(real()))

    def work() -> None:
        time.sleep(0.05)
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
    thread.join(5)
    assert not thread.is_alive()
