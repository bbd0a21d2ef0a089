"""The scheduler alone: rules of every interleaving, and its order in small cases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.samples import examples
from topw_deploy.engine.scheduler import WAITING, Scheduler, Task


class Interleavings(RuleBasedStateMachine):
    """Random arrivals, ends and iterations, on a model of rows that remembers what was written where."""

    @initialize(
        rows=st.integers(1, 5), chunk=st.integers(1, 4), dense=st.booleans(), moves=st.booleans(), steady=st.booleans(),
    )  # fmt: skip
    def start(self, rows: int, chunk: int, dense: bool, moves: bool, steady: bool) -> None:
        self.rows, self.chunk, self.dense, self.steady = rows, chunk, dense, steady and not dense
        self.scheduler = Scheduler(rows, chunk, dense=dense, moves=moves, steady=steady)
        self.submitted: list[Task] = []
        self.admitted: list[Task] = []
        self.ended: list[Task] = []
        self.left_waiting: list[Task] = []
        self.cache: list[list[object]] = [[] for _ in range(rows)]  # tokens as (task, position)
        self.last_chunk: tuple[Task, bool] | None = None  # the oldest prompt then, and whether it was read

    @rule(tokens=st.integers(1, 12), branch=st.integers(0, 12))
    def submit(self, tokens: int, branch: int) -> None:
        task = Task(tokens)
        task.branch = branch
        self.submitted.append(task)
        self.scheduler.submit(task)

    @precondition(lambda self: len(self.ended) < len(self.submitted))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Cancellations, deadlines and ordinary ends are the same to the scheduler."""
        alive = [task for task in self.submitted if task not in self.ended]
        task = data.draw(st.sampled_from(alive))
        if task.row == WAITING:
            self.left_waiting.append(task)
        self.scheduler.end(task)
        self.ended.append(task)

    @rule()
    def iterate(self) -> None:
        scheduler = self.scheduler
        for task in scheduler.admit():
            self.cache[task.row] = []
            self.admitted.append(task)
        oldest = scheduler.reading()[:1]
        chunk = scheduler.next_chunk()
        if chunk is not None:
            task = chunk.task
            assert 0 < chunk.end - chunk.start <= self.chunk
            assert not chunk.start < task.branch < chunk.end
            if task is not oldest[0]:
                assert self.last_chunk != (oldest[0], False), "the oldest prompt gets every second chunk"
            self.last_chunk = (oldest[0], task is oldest[0])
            held = self.cache[task.row]
            del held[chunk.start :]  # a step may have written one more slot
            held += [(task, position) for position in range(chunk.start, chunk.end)]
            scheduler.read(chunk)
        pairs = scheduler.arrange()
        assert not (self.steady and pairs)
        for one, other in pairs:
            self.cache[one], self.cache[other] = self.cache[other], self.cache[one]
        if self.steady:
            assert scheduler.width == (self.rows if scheduler.decoding else 0)
        for row in range(scheduler.width):
            self.step(row)

    def step(self, row: int) -> None:
        owner = self.owner(row)
        if owner is not None and owner.decoding:
            self.cache[row].append((owner, len(self.cache[row])))
        else:
            assert not self.dense
            del self.cache[row][0 if owner is None else owner.read :]
            self.cache[row].append("arbitrary")

    def owner(self, row: int) -> Task | None:
        found = [task for task in self.submitted if task.row == row and task not in self.ended]
        assert len(found) <= 1, "a row serves one sequence"
        return found[0] if found else None

    @invariant()
    def rows_hold_their_sequences_tokens(self) -> None:
        for row in range(self.rows):
            owner = self.owner(row)
            if owner is not None:
                prompt = self.cache[row][: owner.read]
                assert prompt == [(owner, position) for position in range(owner.read)]
                if owner.decoding:
                    assert self.cache[row] == [(owner, position) for position in range(len(self.cache[row]))]

    @invariant()
    def every_sequence_is_in_one_place(self) -> None:
        scheduler = self.scheduler
        alive = [task for task in self.submitted if task not in self.ended]
        assert scheduler.waiting + scheduler.used == len(alive)
        assert set(scheduler.decoding) == {task for task in alive if task.decoding}
        assert set(scheduler.reading()) == {task for task in alive if task.row != WAITING and not task.decoding}
        assert scheduler.idle == (not alive)

    @invariant()
    def rows_are_given_in_the_order_of_arrival(self) -> None:
        stayed = [task for task in self.submitted if task not in self.left_waiting]
        assert self.admitted == stayed[: len(self.admitted)]

    @rule()
    def nobody_waits_while_a_row_is_free(self) -> None:
        self.iterate()
        assert not self.scheduler.waiting or self.scheduler.used == self.rows

    @rule()
    def everything_ends(self) -> None:
        """No sequence waits for ever: if each ends after its first step, all end in bounded time."""
        alive = [task for task in self.submitted if task not in self.ended]
        most = sum(2 * -(-task.prompt_tokens // self.chunk) + 1 for task in alive)
        for _ in range(most):
            self.iterate()
            for task in list(self.scheduler.decoding):
                self.scheduler.end(task)
                self.ended.append(task)
        assert self.scheduler.idle


Interleavings.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestInterleavings = Interleavings.TestCase


def started(prompts: list[int], rows: int = 4, chunk: int = 2, **settings: bool) -> tuple[Scheduler, list[Task]]:
    scheduler, tasks = Scheduler(rows, chunk, **settings), [Task(tokens) for tokens in prompts]
    for task in tasks:
        scheduler.submit(task)
    scheduler.admit()
    return scheduler, tasks


def read_one(scheduler: Scheduler) -> Task:
    chunk = scheduler.next_chunk()
    assert chunk is not None
    scheduler.read(chunk)
    return chunk.task


def test_chunks_alternate_between_the_oldest_and_the_shortest_prompt() -> None:
    scheduler, (long, middle, short) = started([10, 4, 2])
    assert [read_one(scheduler) for _ in range(7)] == [long, short, long, middle, long, middle, long]


def test_a_short_prompt_behind_a_long_one_waits_for_at_most_one_chunk() -> None:
    scheduler, (long,) = started([100])
    for _ in range(5):
        read_one(scheduler)
        short = Task(1)
        scheduler.submit(short)
        scheduler.admit()
        assert short in (read_one(scheduler), read_one(scheduler))
        scheduler.end(short)
    assert long.read > 0


@pytest.mark.parametrize(("moves", "width", "pairs"), [(True, 2, [(2, 0)]), (False, 3, [])])
def test_the_last_row_moves_into_a_hole(moves: bool, width: int, pairs: list[tuple[int, int]]) -> None:
    scheduler, tasks = started([1, 1, 1], moves=moves)
    for _ in tasks:
        read_one(scheduler)
    assert scheduler.arrange() == []
    assert scheduler.width == 3
    scheduler.end(tasks[0])
    assert scheduler.arrange() == pairs
    assert scheduler.width == width


def test_a_step_leaves_out_rows_above_the_last_decoding_one() -> None:
    scheduler, (first, _) = started([1, 9])
    assert read_one(scheduler) is first
    scheduler.arrange()
    assert scheduler.width == 1


def test_where_a_step_may_hold_decoding_rows_only_they_change_places_with_prompts() -> None:
    scheduler, (long, short) = started([9, 2], dense=True)
    read_one(scheduler)
    assert read_one(scheduler) is short
    assert scheduler.arrange() == [(1, 0)]
    assert (short.row, long.row, scheduler.width) == (0, 1, 1)
    loose, (_, other) = started([9, 2])
    read_one(loose)
    assert read_one(loose) is other
    assert (loose.arrange(), loose.width) == ([], 2)
