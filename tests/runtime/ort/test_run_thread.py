"""Calls that are made on one thread, whoever asks for them."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from topw_deploy.runtime.ort.run_thread import RunThread


def test_every_call_is_made_on_the_same_thread_in_its_turn() -> None:
    worker, seen, running = RunThread(), list[int](), list[int]()

    def work() -> None:
        seen.append(threading.get_ident())
        running.append(1)
        assert len(running) == 1
        time.sleep(0.001)
        running.pop()

    callers = [threading.Thread(target=lambda: [worker.call(work) for _ in range(5)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(seen) == 20
    assert set(seen) - {threading.get_ident()} == set(seen)
    assert len(set(seen)) == 1


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    worker, seen = RunThread(), list[str]()

    def fail() -> None:
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        worker.call(fail)
    worker.call(lambda: seen.append("next"))
    assert seen == ["next"]


def test_a_call_from_the_thread_itself_is_made_at_once() -> None:
    worker, seen = RunThread(), list[str]()
    worker.call(lambda: worker.call(lambda: seen.append("inner")))
    assert seen == ["inner"]


def test_an_interrupted_caller_waits_until_its_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ended = RunThread(), list[str]()

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
    worker.call(lambda: None)  # so that the thread is there
    monkeypatch.setattr(threading, "Lock", lambda: Interrupted(real()))

    def work() -> None:
        time.sleep(0.05)
        ended.append("work")

    with pytest.raises(KeyboardInterrupt):
        worker.call(work)
    assert ended == ["work"]


def test_the_thread_ends_with_its_owner() -> None:
    worker = RunThread()
    worker.call(lambda: None)
    thread = worker._thread
    assert thread is not None
    assert thread.is_alive()
    del worker
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
