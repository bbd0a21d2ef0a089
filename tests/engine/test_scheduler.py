"""The scheduler: invariants of random schedules, and the order of chunks in small cases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.samples import examples
from topw_deploy.engine.scheduler import WAITING, ScheduledSequence, Scheduler


class Interleavings(RuleBasedStateMachine):
    """Random arrivals, ends and iterations, with a model of the cache that records what runs write to which slot."""

    @initialize(
        slots=st.integers(1, 5), chunk=st.integers(1, 4),
        decoding_only=st.booleans(), moves_slots=st.booleans(), runs_all_slots=st.booleans(),
    )  # fmt: skip
    def start(self, slots: int, chunk: int, decoding_only: bool, moves_slots: bool, runs_all_slots: bool) -> None:
        self.slots, self.chunk, self.decoding_only = slots, chunk, decoding_only
        self.runs_all_slots = runs_all_slots and not decoding_only
        self.scheduler = Scheduler(
            slots, chunk, decoding_only=decoding_only, moves_slots=moves_slots, runs_all_slots=runs_all_slots
        )
        self.submitted: list[ScheduledSequence] = []
        self.admitted: list[ScheduledSequence] = []
        self.ended: list[ScheduledSequence] = []
        self.left_waiting: list[ScheduledSequence] = []
        self.cache: list[list[object]] = [[] for _ in range(slots)]  # tokens as (sequence, position)
        self.last_chunk: tuple[ScheduledSequence, bool] | None = None  # the oldest prompt then, and whether it was read

    @rule(tokens=st.integers(1, 12), branch=st.integers(0, 12))
    def submit(self, tokens: int, branch: int) -> None:
        sequence = ScheduledSequence(tokens)
        sequence.branch_position = branch
        self.submitted.append(sequence)
        self.scheduler.submit(sequence)

    @precondition(lambda self: len(self.ended) < len(self.submitted))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a sequence. The scheduler does not distinguish cancellations, deadlines and last tokens."""
        alive = [sequence for sequence in self.submitted if sequence not in self.ended]
        sequence = data.draw(st.sampled_from(alive))
        if sequence.slot == WAITING:
            self.left_waiting.append(sequence)
        self.scheduler.end(sequence)
        self.ended.append(sequence)

    @rule()
    def iterate(self) -> None:
        scheduler = self.scheduler
        for sequence in scheduler.admit():
            self.cache[sequence.slot] = []
            self.admitted.append(sequence)
        oldest = scheduler.reading[:1]
        chunk = scheduler.next_chunk()
        if chunk is not None:
            sequence = chunk.sequence
            assert 0 < chunk.end - chunk.start <= self.chunk
            assert not chunk.start < sequence.branch_position < chunk.end
            if sequence is not oldest[0]:
                assert self.last_chunk != (oldest[0], False), "the oldest prompt gets every second chunk"
            self.last_chunk = (oldest[0], sequence is oldest[0])
            held = self.cache[sequence.slot]
            del held[chunk.start :]  # a step may have written one more slot
            held += [(sequence, position) for position in range(chunk.start, chunk.end)]
            scheduler.record_read(chunk)
        pairs = scheduler.arrange()
        assert not (self.runs_all_slots and pairs)
        for one, other in pairs:
            self.cache[one], self.cache[other] = self.cache[other], self.cache[one]
        if self.runs_all_slots:
            assert scheduler.width == (self.slots if scheduler.decoding else 0)
        for slot in range(scheduler.width):
            self.step(slot)

    def step(self, slot: int) -> None:
        owner = self.owner(slot)
        if owner is not None and owner.is_decoding:
            self.cache[slot].append((owner, len(self.cache[slot])))
        else:
            assert not self.decoding_only
            del self.cache[slot][0 if owner is None else owner.read_tokens :]
            self.cache[slot].append("arbitrary")

    def owner(self, slot: int) -> ScheduledSequence | None:
        found = [sequence for sequence in self.submitted if sequence.slot == slot and sequence not in self.ended]
        assert len(found) <= 1, "a slot serves one sequence"
        return found[0] if found else None

    @invariant()
    def slots_hold_their_sequences_tokens(self) -> None:
        for slot in range(self.slots):
            owner = self.owner(slot)
            if owner is not None:
                prompt = self.cache[slot][: owner.read_tokens]
                assert prompt == [(owner, position) for position in range(owner.read_tokens)]
                if owner.is_decoding:
                    assert self.cache[slot] == [(owner, position) for position in range(len(self.cache[slot]))]

    @invariant()
    def every_sequence_is_in_one_place(self) -> None:
        scheduler = self.scheduler
        alive = [sequence for sequence in self.submitted if sequence not in self.ended]
        assert len(scheduler.waiting) + scheduler.slots_in_use == len(alive)
        assert set(scheduler.decoding) == {sequence for sequence in alive if sequence.is_decoding}
        assert set(scheduler.reading) == {
            sequence for sequence in alive if sequence.slot != WAITING and not sequence.is_decoding
        }
        assert scheduler.is_idle == (not alive)

    @invariant()
    def slots_are_given_in_the_order_of_arrival(self) -> None:
        stayed = [sequence for sequence in self.submitted if sequence not in self.left_waiting]
        assert self.admitted == stayed[: len(self.admitted)]

    @rule()
    def nobody_waits_while_a_slot_is_free(self) -> None:
        self.iterate()
        assert not self.scheduler.waiting or self.scheduler.slots_in_use == self.slots

    @rule()
    def everything_ends(self) -> None:
        """If each sequence ends after its first step, all end within a bounded number of iterations."""
        alive = [sequence for sequence in self.submitted if sequence not in self.ended]
        most = sum(2 * -(-sequence.prompt_tokens // self.chunk) + 1 for sequence in alive)
        for _ in range(most):
            self.iterate()
            for sequence in list(self.scheduler.decoding):
                self.scheduler.end(sequence)
                self.ended.append(sequence)
        assert self.scheduler.is_idle


Interleavings.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestInterleavings = Interleavings.TestCase


def start_scheduler(
    prompts: list[int], slots: int = 4, chunk: int = 2, **settings: bool
) -> tuple[Scheduler, list[ScheduledSequence]]:
    scheduler, sequences = Scheduler(slots, chunk, **settings), [ScheduledSequence(tokens) for tokens in prompts]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.admit()
    return scheduler, sequences


def read_next_chunk(scheduler: Scheduler) -> ScheduledSequence:
    chunk = scheduler.next_chunk()
    assert chunk is not None
    scheduler.record_read(chunk)
    return chunk.sequence


def test_chunks_alternate_between_the_oldest_and_the_shortest_prompt() -> None:
    scheduler, (long, middle, short) = start_scheduler([10, 4, 2])
    assert [read_next_chunk(scheduler) for _ in range(7)] == [long, short, long, middle, long, middle, long]


@pytest.mark.parametrize(("moves_slots", "width", "pairs"), [(True, 2, [(2, 0)]), (False, 3, [])])
def test_the_last_slot_moves_to_a_free_slot_below_it(
    moves_slots: bool, width: int, pairs: list[tuple[int, int]]
) -> None:
    scheduler, sequences = start_scheduler([1, 1, 1], moves_slots=moves_slots)
    for _ in sequences:
        read_next_chunk(scheduler)
    assert scheduler.arrange() == []
    assert scheduler.width == 3
    scheduler.end(sequences[0])
    assert scheduler.arrange() == pairs
    assert scheduler.width == width


def test_decoding_slots_are_exchanged_with_prompts_if_steps_may_have_only_decoding_slots() -> None:
    scheduler, (long, short) = start_scheduler([9, 2], decoding_only=True)
    read_next_chunk(scheduler)
    assert read_next_chunk(scheduler) is short
    assert scheduler.arrange() == [(1, 0)]
    assert (short.slot, long.slot, scheduler.width) == (0, 1, 1)
    loose, (_, other) = start_scheduler([9, 2])
    read_next_chunk(loose)
    assert read_next_chunk(loose) is other
    assert (loose.arrange(), loose.width) == ([], 2)
