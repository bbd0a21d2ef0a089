"""Prompts that begin like the sequence of another row, or of a snapshot, draw what they draw alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.conftest import A_ROW, HOT, SYSTEM, Gate, NewEngine, ask
from tests.support.samples import examples
from tests.support.toy_model import Toy, byte_ids
from topw_deploy.engine import Engine, Request
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import LogitsError
from topw_deploy.runtime import GenerationResult, TopWModel


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine copy no rows, as on a device."""
    monkeypatch.setattr(Batch, "copies_slots", False)


def turns(engine: Engine, prompt: list[int], count: int) -> Iterator[tuple[list[int], GenerationResult]]:
    """A chat. Each prompt is the previous prompt, its answer and three new tokens."""
    for turn in range(count):
        result = ask(engine, prompt)
        yield prompt, result
        prompt = [*prompt, *result.token_ids, 50 + turn, 51, 52]


def test_a_chat_turn_reads_its_new_tokens_only(model: TopWModel, engine_of: NewEngine) -> None:
    """It also reads the last token of the answer, which was drawn but not read."""
    engine = engine_of(model, max_batch=3)
    cached = []
    for prompt, result in turns(engine, SYSTEM, 4):
        assert result == ask(model, prompt)
        cached.append(result.cached_tokens)
    assert cached == [0, 34, 42, 50]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (30 + 3 * 4, sum(cached))


def test_samples_of_a_prompt_read_it_once(model: TopWModel, engine_of: NewEngine, chunks: list) -> None:
    engine = engine_of(model, max_batch=4, prefill_budget=16)
    found = engine.submit(SYSTEM, n=4, max_new_tokens=9, seed=3, **HOT).result(60)
    assert found == ask(model, SYSTEM, 9, n=4)
    assert [result.cached_tokens for result in found] == [0, 28, 28, 28]
    assert chunks == [(0, 16), (16, 30), (28, 30), (28, 30), (28, 30)]


def test_a_request_can_read_its_prompt_whole(any_model: TopWModel, engine_of: NewEngine, chunks: list) -> None:
    engine = engine_of(any_model, max_batch=3, prefix_bytes=10**6)
    whole, usual = ask(any_model, SYSTEM), ask(engine, SYSTEM)
    chunks.clear()
    found = engine.submit(SYSTEM, n=2, max_new_tokens=5, seed=3, reuse_prefix=False, **HOT).result(60)
    assert chunks == [(0, 30), (0, 30)]
    assert [result.cached_tokens for result in found] == [0, 0]
    assert found == ask(any_model, SYSTEM, n=2)
    assert usual == whole
    again = ask(engine, [*SYSTEM, 77, 78])
    assert (again.cached_tokens, again) == (30, ask(any_model, [*SYSTEM, 77, 78])), "later prompts reuse it"


def test_a_prompt_that_is_read_whole_takes_the_row_that_was_free_longest(
    model: TopWModel, engine_of: NewEngine
) -> None:
    """The row that holds its beginning stays free, because a later prompt may need it."""
    engine = engine_of(model, max_batch=2)
    ask(engine, [90, 91, 92] * 10)
    ask(engine, SYSTEM)
    ask(engine, [*SYSTEM[:20], 7], reuse_prefix=False)
    assert ask(engine, [*SYSTEM, 77, 78]).cached_tokens == 30


def test_a_prompt_shares_that_of_a_running_sequence_and_what_it_drew(
    any_model: TopWModel, engine_of: NewEngine, gate: Gate
) -> None:
    gate.after = 8
    engine = engine_of(any_model, max_batch=3, prefill_budget=16)
    running = gate.hold(engine, SYSTEM, max_new_tokens=60, seed=3, **HOT)
    drawn = ask(any_model, SYSTEM, 60).token_ids
    prompts = [[*SYSTEM, 77, 78], [*SYSTEM, *drawn[:5], 77, 78]]
    requests = [engine.submit(prompt, max_new_tokens=5, seed=3, **HOT) for prompt in prompts]
    gate.opened.set()
    found = [request.result(60) for request in requests]
    assert found == [ask(any_model, prompt) for prompt in prompts]
    assert [result.cached_tokens for result in found] == [30, 35]
    assert running.result(60) == ask(any_model, SYSTEM, 60)


@pytest.mark.usefixtures("no_copies")
def test_steps_write_after_the_tokens_of_free_rows(any_model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    """The ended sequence has row 0. Rows do not move, so steps of row 1 include row 0."""
    engine = engine_of(any_model, max_batch=2)
    held = gate.hold(engine, SYSTEM, max_new_tokens=5, seed=3, **HOT)
    beside = engine.submit([8, 9], max_new_tokens=60, seed=3, **HOT)
    gate.opened.set()
    answer = held.result(60).token_ids
    pieces = iter(beside)
    for _ in range(20):
        next(pieces)
    assert engine._scheduler.width == 2
    prompt = [*SYSTEM, *answer, 50]
    found = ask(engine, prompt)
    assert (found, found.cached_tokens) == (ask(any_model, prompt), 34)
    assert beside.result(60) == ask(any_model, [8, 9], 60)


@pytest.mark.usefixtures("no_copies")
def test_steps_write_after_the_prefix_of_a_prompt_that_waits_for_its_chunk(
    any_model: TopWModel, engine_of: NewEngine, gate: Gate
) -> None:
    """The prompt takes row 0 while row 1 decodes and a shorter prompt is read first."""
    engine = engine_of(any_model, max_batch=3, prefill_budget=20)
    held = gate.hold(engine, SYSTEM, max_new_tokens=5, seed=3, **HOT)
    second = Gate(after=10)
    beside = engine.submit([8, 9], max_new_tokens=60, seed=3, stopping_criteria=second, **HOT)
    gate.opened.set()
    prompt = [*SYSTEM, *held.result(60).token_ids, *range(60, 90)]
    assert second.reached.wait(60)
    requests = [engine.submit(tokens, max_new_tokens=5, seed=3, **HOT) for tokens in ([5] * 25, prompt)]
    second.opened.set()
    long, found = (request.result(60) for request in requests)
    assert (found, found.cached_tokens) == (ask(any_model, prompt), 34)
    assert long == ask(any_model, [5] * 25)
    assert beside.result(60) == ask(any_model, [8, 9], 60)


def test_tokens_that_a_taken_row_loses_are_restored_from_host_memory(
    any_model: TopWModel, engine_of: NewEngine
) -> None:
    """Two chats share one row. Between their turns, growing buffers shrink and lose all rows."""
    engine = engine_of(any_model, max_batch=1, prefix_bytes=100 * A_ROW * 2)
    chats = [turns(engine, prompt, 3) for prompt in (SYSTEM, [5] * 20)]
    for turn in range(3):
        for chat, first in zip(chats, (30, 20), strict=True):
            prompt, result = next(chat)
            assert result == ask(any_model, prompt)
            assert result.cached_tokens == (first + 8 * turn - 4 if turn else 0)


def test_the_snapshot_used_longest_ago_makes_room(model: TopWModel, engine_of: NewEngine) -> None:
    """There is room for two sequences of 34 tokens. The second and third prompt are stored. Then the second is used, so
    that the fourth replaces the third.
    """
    prompts = [[first] * 30 for first in (5, 6, 7, 8)]
    engine = engine_of(model, max_batch=1, prefix_bytes=2 * 34 * (A_ROW + 8))
    for prompt in prompts:
        assert ask(engine, prompt).cached_tokens == 0
    assert [ask(engine, prompts[place]).cached_tokens for place in (1, 2, 3)] == [28, 0, 28]


def test_a_row_whose_states_are_not_finite_is_not_reused(load: Any, engine_of: NewEngine) -> None:
    toy = Toy.random(0)
    toy.features[byte_ids("!")[0]] = np.nan
    model = load(toy, form="scatter")
    engine = engine_of(model, max_batch=1, prefill_budget=2, prefix_bytes=10**6)
    with pytest.raises(LogitsError):
        engine.submit("abcd!", max_new_tokens=9).result(60)
    found = ask(engine, byte_ids("abcdef"))
    assert (found, found.cached_tokens) == (ask(model, byte_ids("abcdef")), 0)


def test_the_part_that_a_cancelled_prompt_read_is_reused(
    model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_batch=1, prefill_budget=8)
    requests: list[Request] = []
    read = Batch.read

    def cancel_at_second_chunk(batch: Batch, row: int, request: Any, start: int, end: int) -> int | None:
        if end == 16 and requests:
            requests.pop().cancel()
        return read(batch, row, request, start, end)

    monkeypatch.setattr(Batch, "read", cancel_at_second_chunk)
    cancelled = engine.submit(SYSTEM, max_new_tokens=5, seed=3, **HOT)
    requests.append(cancelled)
    assert cancelled.result(60).token_ids == []
    found = ask(engine, SYSTEM)
    assert (found, found.cached_tokens) == (ask(model, SYSTEM), 16)


def test_reuse_can_be_switched_off(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, reuse_prefixes=False, prefix_bytes=10**6)
    assert [ask(engine, SYSTEM).cached_tokens for _ in range(2)] == [0, 0]
    assert engine.stats().cached_tokens == 0
    assert ask(model, SYSTEM).as_dict()["cached_tokens"] == 0


def test_exact_engines_reuse_whole_chunks_of_prompts(
    any_model: TopWModel, engine_of: NewEngine, chunks: list[tuple[int, int]]
) -> None:
    """They do not reuse the rest of a prompt or drawn tokens, because runs of other shapes read these."""
    engine = engine_of(any_model, max_batch=2, prefill_budget=8, exact=True)
    cached = []
    for prompt, result in turns(engine, SYSTEM, 4):
        assert result == ask(any_model, prompt)
        cached.append(result.cached_tokens)
    assert cached == [0, 24, 32, 40]
    assert all(start % 8 == 0 and (end % 8 == 0 or end in (30, 38, 46, 54)) for start, end in chunks)


BEGINNINGS = [[], SYSTEM[:9], SYSTEM, [*SYSTEM, *range(60, 80)], [5] * 12]
ONE = st.tuples(
    st.sampled_from(BEGINNINGS), st.lists(st.integers(5, 7), min_size=1, max_size=6), st.integers(1, 12),
    st.sampled_from(["wait", "go on", "cancel", "next turn"]),
)  # fmt: skip


SCHEDULE = st.lists(ONE, min_size=2, max_size=10)


@given(schedule=SCHEDULE, rows=st.integers(1, 3), store=st.booleans(), exact=st.booleans())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_of_a_random_schedule_draws_what_it_draws_alone(
    any_model: TopWModel, schedule: list[Any], rows: int, store: bool, exact: bool
) -> None:
    requests: list[tuple[list[int], int, Request]] = []
    options = {"max_batch": rows, "prefill_budget": 6, "exact": exact, "prefix_bytes": 60 * A_ROW * store}
    with Engine(any_model, **options) as engine:
        for beginning, rest, new, then in schedule:
            prompt = [*beginning, *rest]
            request = engine.submit(prompt, max_new_tokens=new, seed=3, **HOT)
            requests.append((prompt, new, request))
            if then == "cancel":
                request.cancel()
            elif then == "wait":
                request.result(60)
            elif then == "next turn":
                prompt = [*prompt, *request.result(60).token_ids, *rest]
                requests.append((prompt, new, engine.submit(prompt, max_new_tokens=new, seed=3, **HOT)))
    for prompt, new, request in requests:
        found, whole = request.result(60), ask(any_model, prompt, new)
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        assert found.logprobs == whole.logprobs[: len(found.logprobs)]
        assert found.finish_reason == "cancelled" or found == whole


def test_two_or_more_tokens_end_a_prompt(model: TopWModel, engine_of: NewEngine, chunks: list) -> None:
    """GroupQueryAttention rounds a single token differently, which 8-bit activations amplify."""
    engine = engine_of(model, max_batch=1, prefill_budget=10)
    for prompt in (SYSTEM, [*SYSTEM, 77], [9] * 21, [5]):
        assert ask(engine, prompt) == ask(model, prompt)
    assert chunks == [(0, 10), (10, 20), (20, 30), (29, 31), (0, 10), (10, 19), (19, 21), (0, 1)]
