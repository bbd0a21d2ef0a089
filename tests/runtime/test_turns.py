"""Whoever uses a device waits for a capture, and a capture for whoever uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from topw_deploy.runtime.turns import Turns, turns_of

PAUSE = 0.05  # seconds in which a thread that may go on surely does


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(5)
    return not thread.is_alive()


def use(turns: Turns) -> None:
    with turns.using:
        pass


def open_a_session(turns: Turns) -> None:
    with turns.opening():
        pass


def capture(turns: Turns) -> None:
    with turns.capturing() as alone:
        assert alone


def test_several_threads_use_a_device_at_once() -> None:
    turns = Turns()
    with turns.using:
        assert ends(in_a_thread(lambda: use(turns)))
        assert ends(in_a_thread(lambda: open_a_session(turns)))


@pytest.mark.parametrize("other", [use, open_a_session, capture])
def test_nobody_else_begins_anything_during_a_capture(other: Callable[[Turns], None]) -> None:
    turns = Turns()
    with turns.capturing() as alone:
        assert alone
        waiting = in_a_thread(lambda: other(turns))
        time.sleep(PAUSE)
        assert waiting.is_alive()
    assert ends(waiting)


def test_a_capture_waits_for_those_who_use_the_device_and_goes_before_those_who_come_later() -> None:
    turns, order = Turns(), list[str]()
    captured = threading.Event()

    def capture() -> None:
        with turns.capturing() as alone:
            order.append(f"capture {alone}")
            captured.wait(5)

    def come_later() -> None:
        with turns.using:
            order.append("later")

    with turns.using:
        capturing = in_a_thread(capture)
        time.sleep(PAUSE)
        later = in_a_thread(come_later)
        time.sleep(PAUSE)
        assert order == []
        with turns.using:  # a thread that is using it does not wait for a capture that waits for it
            order.append("again")
    time.sleep(PAUSE)
    assert order == ["again", "capture True"]
    captured.set()
    assert ends(capturing)
    assert ends(later)
    assert order == ["again", "capture True", "later"]


def test_a_capture_is_given_up_while_a_session_is_being_opened() -> None:
    turns = Turns()
    opened = threading.Event()

    def open_slowly() -> None:
        with turns.opening():
            opened.wait(5)

    opening = in_a_thread(open_slowly)
    time.sleep(PAUSE)
    with turns.capturing() as alone:
        assert not alone
    opened.set()
    assert ends(opening)
    with turns.capturing() as alone:
        assert alone


def test_one_that_is_given_up_counts_as_a_user() -> None:
    turns = Turns()
    opened, ran = threading.Event(), threading.Event()

    def open_slowly() -> None:
        with turns.opening():
            opened.wait(5)

    def run() -> None:
        with turns.capturing():
            ran.wait(5)

    threads = [in_a_thread(open_slowly)]
    time.sleep(PAUSE)
    threads.append(in_a_thread(run))
    time.sleep(PAUSE)
    opened.set()
    ends(threads[0])
    capturing = in_a_thread(lambda: capture(turns))
    time.sleep(PAUSE)
    assert capturing.is_alive()
    ran.set()
    assert ends(capturing)


def test_a_capture_that_fails_lets_the_others_go_on() -> None:
    turns = Turns()
    with pytest.raises(RuntimeError), turns.capturing():
        raise RuntimeError
    assert ends(in_a_thread(lambda: use(turns)))
    assert ends(in_a_thread(lambda: capture(turns)))


def test_a_device_has_one_object_in_the_process() -> None:
    assert turns_of(("cuda", 7)) is turns_of(("cuda", 7))
    assert turns_of(("cuda", 7)) is not turns_of(("cuda", 8))
