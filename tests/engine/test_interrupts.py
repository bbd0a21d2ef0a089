"""Ctrl-C in `submit`, wherever Python runs signal handlers in the engine's code, loses no room."""

from __future__ import annotations

import asyncio
import dis
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import topw_deploy.engine
from tests.engine.conftest import HOT, NewEngine
from topw_deploy.runtime import TopWModel

FOLDER = str(Path(topw_deploy.engine.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at point number `at` of this thread in the engine's modules at which Python runs signal
    handlers: after calls and backward jumps, and where functions begin.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised = False
        self._last: dict[int, str] = {}  # by the frame's id: frames must not outlive their calls here

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER) or self.raised:
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
                raise KeyboardInterrupt
        return self._trace


def interrupt_everywhere(call: Callable[[], object], after: Callable[[], None]) -> int:
    """Interrupt `call` at every point. Returns how often."""
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


def serves_and_is_empty(engine: topw_deploy.engine.Engine) -> None:
    assert engine._room.wait_until_empty(30), f"{engine._room.used} places are lost"
    served: list[Any] = []
    other = threading.Thread(target=lambda: served.append(engine.submit("b", max_new_tokens=1).result(30)))
    other.start()
    other.join(30)
    assert served


def test_an_interrupted_submit_gives_its_room_back(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=2)
    places = interrupt_everywhere(
        lambda: engine.submit("a", n=2, max_new_tokens=2, **HOT), lambda: serves_and_is_empty(engine)
    )
    assert places > 50, "from the first call to the last"


def test_an_interrupted_caller_that_waits_gives_its_room_back(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")

    def call() -> None:
        waiting = threading.Thread(target=engine.submit, args=("c",), kwargs={"max_new_tokens": 9, **HOT})
        waiting.start()
        waiting.join()
        engine.submit("a", max_new_tokens=1, **HOT)

    assert interrupt_everywhere(call, lambda: serves_and_is_empty(engine)) > 50


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # it was interrupted before
def test_an_interrupted_task_gives_its_room_back(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0)
    places = interrupt_everywhere(
        lambda: asyncio.run(engine.generate("a", max_new_tokens=1, **HOT)), lambda: serves_and_is_empty(engine)
    )
    assert places > 50
