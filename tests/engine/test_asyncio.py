"""Asyncio callers: results, cancellation, closed loops and a full queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.support.waiting import set_when, until_async
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, ParameterError, QueueFullError
from topw_deploy.runtime import TopWModel


async def until_idle(engine: Engine) -> None:
    await until_async(lambda: engine.stats().in_use == engine.stats().queued == 0)


def test_streams_of_several_tasks_give_the_text_that_each_request_draws_alone(
    model: TopWModel, engine_of: NewEngine
) -> None:
    engine = engine_of(model, max_batch=2)

    async def text(seed: int, **more: Any) -> Any:
        pieces = [piece async for piece in engine.stream("ab", seed=seed, max_new_tokens=20, **HOT, **more)]
        assert [piece.result is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return pieces[-1].result

    async def main() -> list[Any]:
        return await asyncio.gather(*(text(n, stop_strings=["e"] if n % 2 else []) for n in range(6)))

    found = asyncio.run(main())
    for seed, result in enumerate(found):
        stops = ["e"] if seed % 2 else []
        assert result == model.generate("ab", seed=seed, max_new_tokens=20, stop_strings=stops, **HOT)


@pytest.mark.parametrize("streams", [False, True])
def test_a_cancelled_task_or_stream_cancels_its_request(model: TopWModel, engine_of: NewEngine, streams: bool) -> None:
    engine, gate = engine_of(model, max_batch=1), Gate()
    given: dict[str, Any] = {"prompt": "a", "max_new_tokens": 90, **HOT}

    async def main() -> None:
        call = engine.stream if streams else engine.generate
        running: Any = call(stopping_criteria=gate, **given)
        task = asyncio.ensure_future(anext(running) if streams else running)
        await until_async(gate.reached.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        await until_idle(engine)
        async for _ in engine.stream(**given):
            break  # leaves it
        await until_idle(engine)

    asyncio.run(main())
    assert engine.stats().ended == 2
    assert engine.stats().new_tokens < 180


def test_a_request_is_cancelled_if_the_loop_of_its_reader_is_closed(model: TopWModel, engine_of: NewEngine) -> None:
    """The loop is closed without closing its generators, as after a crash of the application."""
    engine = engine_of(model, max_batch=1)
    gate, later = Gate(), Gate(after=5)
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = engine.stream("a", stopping_criteria=[gate, later], max_new_tokens=90, **HOT)
        task = asyncio.ensure_future(stream.__anext__())
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await until_async(gate.reached.is_set)
        return stream, task

    kept = loop.run_until_complete(begin())
    loop.close()
    set_when(later.opened, lambda: engine._worker._inbox.qsize() or engine.stats().ended)
    gate.opened.set()
    asyncio.run(until_idle(engine))
    assert engine.stats().failed == 0, "it was cancelled, so that no gate ran out of time"
    assert engine.stats().new_tokens <= 6
    del kept


def test_a_task_that_waits_for_a_full_queue_does_not_block_the_loop(model: TopWModel, engine_of: NewEngine) -> None:
    strict = engine_of(model, max_batch=1, max_queue=0)
    patient = engine_of(model, max_batch=1, max_queue=0, when_full="wait")

    async def main() -> None:
        gates = [Gate(), Gate()]
        tasks = []
        for engine, gate in zip((strict, patient), gates, strict=True):
            tasks.append(asyncio.create_task(engine.generate("a", max_new_tokens=2, stopping_criteria=gate)))
            await until_async(gate.reached.is_set)
        with pytest.raises(QueueFullError):
            await strict.generate("b")
        with pytest.raises(QueueFullError):
            [piece async for piece in strict.stream("b")]
        late = await patient.generate("late", max_time=0.01)
        assert late.finish_reason == "timeout"
        vanished = asyncio.create_task(patient.generate("vanished"))
        waiting = [asyncio.create_task(patient.generate("b", max_new_tokens=3, seed=n, **HOT)) for n in range(3)]
        await until_async(lambda: len(patient._capacity._waiting) == 4)
        vanished.cancel()
        for gate in gates:
            gate.opened.set()
        found = await asyncio.gather(*waiting)
        assert found == [model.generate("b", max_new_tokens=3, seed=n, **HOT) for n in range(3)]
        await asyncio.gather(*tasks)
        assert vanished.cancelled()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tasks whose loop is closed
def test_a_reservation_is_released_if_the_loop_of_its_waiting_task_closes(
    model: TopWModel, engine_of: NewEngine
) -> None:
    """Other requests get its capacity, also if it was granted after the loop closed."""
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")
    gate = Gate()
    first = engine.submit("a", stopping_criteria=gate, max_new_tokens=2, **HOT)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(engine.generate("b", **HOT)), loop.create_task(engine.stream("c", **HOT).__anext__())]
    loop.run_until_complete(until_async(lambda: len(engine._capacity._waiting) == 2))
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    gate.opened.set()
    first.result(60)
    assert engine.submit("d", max_new_tokens=1, max_time=60, **HOT).result(60).finish_reason == "length"
    del tasks


def test_a_task_gets_the_errors_of_its_request(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model)

    def fails(ids: Any) -> bool:
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ParameterError):
            await engine.generate("a", temperature=-1)
        with pytest.raises(ParameterError):
            engine.stream("a", temperature=-1)  # at once
        with pytest.raises(ZeroDivisionError):
            await engine.generate("a", stopping_criteria=fails)
        with pytest.raises(ZeroDivisionError):
            [piece async for piece in engine.stream("a", stopping_criteria=fails)]
        engine.shutdown()
        with pytest.raises(GenerationError, match="is shut down"):
            await engine.generate("a")

    asyncio.run(main())
