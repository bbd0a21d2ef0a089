"""The logits of a step equal the model's, and only tokens that the cache lacks are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.conftest import FORMS, HOT, SYSTEM, Gate, NewEngine
from tests.support.toy_model import CONTEXT, Toy
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, PromptError
from topw_deploy.runtime import TopWModel

Load = Callable[..., TopWModel]


@pytest.mark.parametrize("form", FORMS)
def test_step_logits_are_those_of_the_model_and_each_reads_one_token(
    form: str, toy: Toy, load: Load, engine_of: NewEngine
) -> None:
    """12 steps after 30 tokens, asked for in order and backwards, read 24 tokens. One pass without reuse reads 426."""
    engine = engine_of(load(toy, with_logits=True, **FORMS[form]), max_batch=3)
    drawn = engine.submit(SYSTEM, max_new_tokens=12, seed=3, **HOT).result(60).token_ids
    before = engine.stats().prompt_tokens
    for count in (*range(12), *reversed(range(12))):
        tokens = [*SYSTEM, *drawn[:count]]
        assert np.array_equal(asyncio.run(engine.logits_after(tokens)), toy.logits(tokens))
    assert engine.stats().prompt_tokens - before == 24
    assert sum(len(SYSTEM) + count for count in range(12)) == 426


def test_step_logits_do_not_change_a_running_request(toy: Toy, load: Load, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(load(toy, with_logits=True), max_batch=2)
    alone = engine.submit(SYSTEM, max_new_tokens=9, seed=4, **HOT).result(60)
    gate.after = 4
    running = gate.hold(engine, SYSTEM, max_new_tokens=9, seed=4, **HOT)

    async def several() -> list[np.ndarray]:
        asked = [asyncio.ensure_future(engine.logits_after(SYSTEM[: 9 + each])) for each in range(3)]
        gate.opened.set()
        return await asyncio.gather(*asked)

    for each, found in enumerate(asyncio.run(several())):
        assert np.array_equal(found, toy.logits(SYSTEM[: 9 + each]))
    assert running.result(60).token_ids == alone.token_ids


def test_a_request_without_step_logits_gets_an_error(
    toy: Toy, load: Load, engine_of: NewEngine, model: TopWModel
) -> None:
    def ask(engine: Engine, tokens: list[int], max_time: float | None = None) -> None:
        asyncio.run(engine.logits_after(tokens, max_time))

    with pytest.raises(ParameterError, match="--with-logits"):
        ask(engine_of(model, max_batch=1), [5])
    engine = engine_of(load(toy, with_logits=True), max_batch=1)
    with pytest.raises(PromptError, match=f"{CONTEXT} tokens fill the context"):
        ask(engine, [5] * CONTEXT)
    with pytest.raises(PromptError, match="token id 300"):
        ask(engine, [300])
    with pytest.raises(GenerationError, match="'timeout'"):
        ask(engine, [5], 1e-9)
    spoilt = Toy.random(1)
    spoilt.follow[7, 9] = np.nan
    with pytest.raises(LogitsError, match="NaN"):
        ask(engine_of(load(spoilt, with_logits=True), max_batch=1), [5, 7])
