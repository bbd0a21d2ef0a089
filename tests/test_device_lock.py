"""Runs wait for captures, and captures for runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.support.waiting import HANG, until
from topw_deploy.device_lock import DeviceLock, device_lock


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(HANG)
    return not thread.is_alive()


def wait_for(lock: DeviceLock, *threads: threading.Thread) -> bool:
    """Whether threads come to wait for the lock, rather than ending."""
    until(lambda: len(lock._changed._waiters) == len(threads) or not all(map(threading.Thread.is_alive, threads)))
    return all(map(threading.Thread.is_alive, threads))


def use(lock: DeviceLock) -> None:
    with lock.shared_use:
        pass


def open_a_session(lock: DeviceLock) -> None:
    with lock.opening():
        pass


def capture(lock: DeviceLock) -> None:
    with lock.capturing() as alone:
        assert alone


def test_several_threads_use_a_device_at_once() -> None:
    lock = DeviceLock()
    with lock.shared_use:
        assert ends(in_a_thread(lambda: use(lock)))
        assert ends(in_a_thread(lambda: open_a_session(lock)))


@pytest.mark.parametrize("other", [use, open_a_session, capture])
def test_new_users_wait_for_a_capture(other: Callable[[DeviceLock], None]) -> None:
    lock = DeviceLock()
    with lock.capturing() as alone:
        assert alone
        waiting = in_a_thread(lambda: other(lock))
        assert wait_for(lock, waiting)
    assert ends(waiting)


def test_a_capture_waits_for_current_users_and_precedes_new_ones() -> None:
    lock, order = DeviceLock(), list[str]()
    begun, captured = threading.Event(), threading.Event()

    def capture() -> None:
        with lock.capturing() as alone:
            order.append(f"capture {alone}")
            begun.set()
            assert captured.wait(HANG)

    def come_later() -> None:
        with lock.shared_use:
            order.append("later")

    with lock.shared_use:
        capturing = in_a_thread(capture)
        assert wait_for(lock, capturing)
        later = in_a_thread(come_later)
        assert wait_for(lock, capturing, later)
        assert order == []
        with lock.shared_use:  # a current user does not wait for a waiting capture
            order.append("again")
    assert begun.wait(HANG)
    assert wait_for(lock, later)
    assert order == ["again", "capture True"]
    captured.set()
    assert ends(capturing)
    assert ends(later)
    assert order == ["again", "capture True", "later"]


def test_a_run_that_may_not_capture_counts_as_a_user() -> None:
    lock = DeviceLock()
    begun, opened, running, ran = (threading.Event() for _ in range(4))

    def open_slowly() -> None:
        with lock.opening():
            begun.set()
            assert opened.wait(HANG)

    def run() -> None:
        with lock.capturing() as alone:
            assert not alone
            running.set()
            assert ran.wait(HANG)

    opening = in_a_thread(open_slowly)
    assert begun.wait(HANG)
    in_a_thread(run)
    assert running.wait(HANG)
    opened.set()
    assert ends(opening)
    capturing = in_a_thread(lambda: capture(lock))
    assert wait_for(lock, capturing)
    ran.set()
    assert ends(capturing)


def test_a_failed_capture_releases_the_lock() -> None:
    lock = DeviceLock()
    with pytest.raises(RuntimeError), lock.capturing():
        raise RuntimeError
    assert ends(in_a_thread(lambda: use(lock)))
    assert ends(in_a_thread(lambda: capture(lock)))


def test_garbage_collection_may_use_the_device_within_the_locks_own_code() -> None:
    """It may close a session between any two operations: here it does between all of them, in three threads."""
    lock = DeviceLock()
    capturing, uses, wrong = list[int](), list[int](), list[str]()

    def collect() -> None:
        with lock.shared_use:
            uses.append(1)
            if capturing not in ([], [threading.get_ident()]):
                wrong.append("a use during another thread's capture")

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != DeviceLock.enter.__code__.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            collect()
        return trace

    def work() -> None:
        sys.settrace(trace)
        for _ in range(30):
            use(lock)
            with lock.capturing() as alone:
                if alone:
                    capturing.append(threading.get_ident())
                    time.sleep(0)
                    capturing.remove(threading.get_ident())
            open_a_session(lock)

    threads = [in_a_thread(work) for _ in range(3)]
    for thread in threads:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other, or for themselves"
    assert len(uses) > 1000
    assert not wrong


def test_a_device_has_one_lock_in_the_process() -> None:
    assert device_lock(("cuda", 7)) is device_lock(("cuda", 7))
    assert device_lock(("cuda", 7)) is not device_lock(("cuda", 8))
