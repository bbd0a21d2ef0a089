"""Asyncio callers whose grammars take long to compile: the loop continues, and no capacity is reserved meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.conftest import HOT, NewEngine
from tests.support.waiting import HANG, until_async
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, GrammarError
from topw_deploy.runtime import TopWModel

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}, **HOT}
Call = Callable[..., Any]


async def generated(engine: Engine, **more: Any) -> Any:
    return await engine.generate("a", **{**CHOICE, **more})


async def streamed(engine: Engine, **more: Any) -> Any:
    return [piece async for piece in engine.stream("a", **{**CHOICE, **more})][-1].result


calls = pytest.mark.parametrize("call", [generated, streamed])


class Compiler:
    """Holds the compilation of grammars until `opened` is set. reached: set when a grammar should be compiled."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    async def until_reached(self) -> None:
        await until_async(self.reached.is_set)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    pytest.importorskip("llguidance")
    compiler, compile_grammars = Compiler(), TopWModel.compile_grammars

    def slow(model: TopWModel, sequences: Any) -> None:
        if any(sequence.params.constraint is not None for sequence in sequences):
            compiler.reached.set()
            assert compiler.opened.wait(HANG)
        compile_grammars(model, sequences)

    monkeypatch.setattr(TopWModel, "compile_grammars", slow)
    yield compiler
    compiler.opened.set()


class RecordingStreamer:
    """A streamer that records its end."""

    ended = False

    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        self.ended = True


@calls
def test_the_loop_goes_on_while_a_grammar_compiles(
    call: Call, model: TopWModel, engine_of: NewEngine, compiler: Compiler
) -> None:
    engine = engine_of(model)

    async def main() -> tuple[Any, Any]:
        task = asyncio.create_task(call(engine))
        await compiler.until_reached()
        other = await engine.generate("b", max_new_tokens=3, **HOT)
        compiler.opened.set()
        return other, await task

    other, result = asyncio.run(main())
    assert len(other.token_ids) == 3
    assert result.text in ("yes", "no")


@calls
def test_a_cancelled_caller_holds_nothing_while_its_grammar_still_compiles(
    call: Call, model: TopWModel, engine_of: NewEngine, compiler: Compiler
) -> None:
    engine, streamer = engine_of(model, max_batch=1, max_queue=0), RecordingStreamer()

    async def main() -> None:
        task = asyncio.create_task(call(engine, streamer=streamer))
        await compiler.until_reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert streamer.ended
        assert len((await engine.generate("b", max_new_tokens=3, **HOT)).token_ids) == 3
        engine.drain(HANG)
        engine.shutdown()  # neither waits for the compiler
        assert not compiler.opened.is_set()
        compiler.opened.set()

    asyncio.run(main())
    assert engine.stats().ended == 1


@calls
def test_a_deadline_or_shutdown_while_a_grammar_compiles_ends_the_request(
    call: Call, model: TopWModel, engine_of: NewEngine, compiler: Compiler
) -> None:
    engine, seconds = engine_of(model), 0.01

    async def main() -> Any:
        task = asyncio.create_task(call(engine, max_time=seconds))
        await compiler.until_reached()
        await asyncio.sleep(seconds)  # or longer
        compiler.opened.set()
        result = await task
        compiler.opened.clear()
        compiler.reached.clear()
        late = asyncio.create_task(call(engine))
        await compiler.until_reached()
        engine.shutdown()
        compiler.opened.set()
        with pytest.raises(GenerationError, match="is shut down"):
            await late
        return result

    result = asyncio.run(main())
    assert (result.finish_reason, result.token_ids) == ("timeout", [])


def test_a_stream_raises_the_errors_of_a_grammar_at_the_call_or_from_its_first_piece(
    model: TopWModel, engine_of: NewEngine
) -> None:
    """At the call in a thread without a loop, where it can wait for the compiler; else from the first piece."""
    pytest.importorskip("llguidance")
    engine, wrong = engine_of(model), {"grammar": "start: missing"}
    with pytest.raises(GrammarError, match="does not compile"):
        engine.stream("a", structured_outputs=wrong)

    async def main() -> None:
        with pytest.raises(GrammarError, match="must be a non-empty text"):
            engine.stream("a", structured_outputs={"grammar": ""})
        pieces = engine.stream("a", structured_outputs=wrong)
        with pytest.raises(GrammarError, match="does not compile"):
            await anext(pieces)
        with pytest.raises(GrammarError, match="does not compile"):
            await engine.generate("a", structured_outputs=wrong)

    asyncio.run(main())
