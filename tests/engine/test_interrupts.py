"""Signal handlers at every point of the engine's code at which Python runs them: Ctrl-C in `submit`, and `shutdown` in
methods that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import topw_deploy.engine
from tests.engine.conftest import HOT, NewEngine
from tests.support.samples import broad
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel

FOLDER = str(Path(topw_deploy.engine.__file__).parent)


@pytest.fixture(autouse=True)
def collected() -> None:
    """Collects the engines of other tests now, because their finalizers would be interrupted too."""
    gc.collect()


def ctrl_c() -> None:
    raise KeyboardInterrupt


class Interrupt:
    """Calls `handler` at one of the points at which Python runs signal handlers: after calls and backward jumps, and at
    the beginning of functions.

    at: number of this point, counted in this thread in files whose paths begin with `within`.
    """

    def __init__(self, at: int, handler: Callable[[], object] = ctrl_c, within: str | tuple[str, ...] = FOLDER) -> None:
        self.left = at
        self.raised = False
        self._handler, self._within = handler, within
        self._last: dict[int, str] = {}  # by the frame's id: frames must not outlive their calls here

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._within) or self.raised:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            self._last[id(frame)] = "RESUME"
        elif event == "opcode":
            before = self._last[id(frame)]
            self._last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= before.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
            if self.left < 0:
                self.raised = True
                self._handler()
        return self._trace


def interrupt_at_every_point(call: Callable[[], object], after: Callable[[], None]) -> int:
    """Interrupt `call` once at every point, and call `after` each time. Returns the number of points."""
    for number in range(10**6):
        with Interrupt(number) as interrupt:
            try:
                call()
            except KeyboardInterrupt:
                assert interrupt.raised
        after()
        if not interrupt.raised:
            return number
    raise AssertionError("it never ends")


def check_serves_and_is_empty(engine: topw_deploy.engine.Engine) -> None:
    assert engine._capacity.wait_until_empty(30), f"{engine._capacity.sequences} reservations are lost"
    served: list[Any] = []
    other = threading.Thread(target=lambda: served.append(engine.submit("b", max_new_tokens=1).result(30)))
    other.start()
    other.join(30)
    assert served


def test_an_interrupted_submit_releases_its_reservation(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=2)
    places = interrupt_at_every_point(
        lambda: engine.submit("a", n=2, max_new_tokens=2, **HOT), lambda: check_serves_and_is_empty(engine)
    )
    assert places > 50, "from the first call to the last"


@pytest.mark.slow
def test_an_interrupted_caller_that_waits_releases_its_reservation(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")

    def call() -> None:
        waiting = threading.Thread(target=engine.submit, args=("c",), kwargs={"max_new_tokens": 9, **HOT})
        waiting.start()
        waiting.join()
        engine.submit("a", max_new_tokens=1, **HOT)

    assert interrupt_at_every_point(call, lambda: check_serves_and_is_empty(engine)) > 50


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # it was interrupted before
@pytest.mark.slow
def test_an_interrupted_task_releases_its_reservation(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0)
    places = interrupt_at_every_point(
        lambda: asyncio.run(engine.generate("a", max_new_tokens=1, **HOT)), lambda: check_serves_and_is_empty(engine)
    )
    assert places > 50


async def read_stream(engine: Engine) -> None:
    async for _ in engine.stream("a", max_new_tokens=9, seed=1, **HOT):
        pass


def module_paths(*names: str) -> tuple[str, ...]:
    return (*(str(Path(FOLDER) / name) for name in names), threading.__file__)


WAITING: dict[str, tuple[Callable[[Engine], object], tuple[str, ...]]] = {
    "result": (lambda e: e.submit("a", max_new_tokens=9, seed=1, **HOT).result(), module_paths("request.py")),
    "stream": (lambda e: asyncio.run(read_stream(e)), module_paths("request.py", "tasks.py")),
    "drain": (lambda e: e.drain(), module_paths("worker.py", "inbox.py")),
}


@pytest.mark.parametrize("waits", WAITING)
@pytest.mark.parametrize("part", [pytest.param(0, id="some"), *(broad(part) for part in range(1, 8))])
def test_a_signal_handler_may_shut_down_while_a_caller_waits(model: TopWModel, waits: str, part: int) -> None:
    """The threads for which `shutdown` waits must need no lock that the interrupted code holds."""
    wait, within = WAITING[waits]

    def call(number: int, interrupts: list[Interrupt]) -> None:
        engine = Engine(model, max_batch=1)
        interrupt = Interrupt(number, engine.shutdown, within)
        with interrupt, contextlib.suppress(GenerationError):  # shut down before the request
            wait(engine)
        engine.shutdown()
        interrupts.append(interrupt)

    for number in range(part, 10**6, 8):
        ended: list[Interrupt] = []
        thread = threading.Thread(target=call, args=(number, ended), daemon=True)
        thread.start()
        thread.join(60)
        assert ended, f"interrupted at point {number}, it waits forever"
        if not ended[0].raised:
            assert number > 8
            return
