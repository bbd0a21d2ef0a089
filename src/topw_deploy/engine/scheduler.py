"""Which sequence has which slot, whose prompt is read next, and which slots a step runs. Needs no session or threads.

One iteration of the engine calls, in this order:

    admit()        sequences that get a slot now
    next_chunk()   at most one chunk of one prompt; after its run `record_read`
    arrange()      slots to exchange, so that the step is narrow
    width          slots 0 .. width - 1 take part in the step

and `end` for each sequence that ended. So a decoding slot waits for at most one chunk per step.

Slots are assigned first come, first served. Among the prompts being read, chunks alternate between the oldest prompt
and the one with the fewest tokens left. A short prompt therefore waits for about one chunk of a long one. The oldest
prompt gets at least every second chunk: a prompt of n chunks is read at most 2 n iterations after it became the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

WAITING = -1  # the slot of a sequence that has none


class ScheduledSequence:
    """A sequence that the scheduler gives a slot: first its prompt is read, then it decodes.

    prompt_tokens: length of the prompt, at least 1.
    read_tokens: number of tokens of the prompt that are in the cache.
    branch_position: a position of the prompt at which a chunk must end; 0 for none.
    slot: its slot, or WAITING.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.read_tokens = self.branch_position = 0
        self.slot = WAITING

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt was read, so that each step draws a token for it."""
        return self.read_tokens == self.prompt_tokens


AnySequence = TypeVar("AnySequence", bound=ScheduledSequence)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[AnySequence]):
    """Tokens `start` to `end`, exclusive, of a sequence's prompt."""

    sequence: AnySequence
    start: int
    end: int


class Scheduler(Generic[AnySequence]):
    """Assigns sequences to `slots` slots.

    chunk: maximum tokens of a chunk.
    last_chunk: least tokens of a prompt's last chunk, 1 or 2, if the prompt and `chunk` have so many.
    decoding_only: whether the slots of a step must all be decoding. If not, a step may include free slots and slots
        whose prompt is not read yet.
    moves_slots: whether sequences may move to other slots merely to make a step narrower. With `decoding_only` they
        move in any case.
    runs_all_slots: whether every step runs all slots, so that kernels round alike in all steps. No effect with
        `decoding_only`.

    waiting: the sequences without a slot, first come first.
    reading: the sequences that have a slot and whose prompts are not read yet, in the order in which they got it.
    decoding: the sequences whose prompts were read.
    width: number of slots of the next step; set by `arrange`.
    """

    def __init__(
        self,
        slots: int,
        chunk: int,
        *,
        last_chunk: int = 1,
        decoding_only: bool = False,
        moves_slots: bool = True,
        runs_all_slots: bool = False,
    ) -> None:
        self._chunk, self._last_chunk, self._decoding_only = chunk, last_chunk, decoding_only
        self._runs_all_slots = runs_all_slots and not decoding_only
        self._moves_slots = decoding_only or (moves_slots and not runs_all_slots)
        self.waiting: deque[AnySequence] = deque()
        self._slots: list[AnySequence | None] = [None] * slots
        self.reading: list[AnySequence] = []
        self._oldest_is_next = True
        self._is_arranged = True
        self.decoding: list[AnySequence] = []
        self.width = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self.waiting or self.reading or self.decoding)

    @property
    def slots_in_use(self) -> int:
        """Number of slots that have a sequence."""
        return len(self.reading) + len(self.decoding)

    def submit(self, sequence: AnySequence) -> None:
        """Add a sequence, which waits for a slot."""
        self.waiting.append(sequence)

    @property
    def free_slots(self) -> list[int]:
        """Slots without a sequence, in ascending order."""
        return [slot for slot, sequence in enumerate(self._slots) if sequence is None]

    def sequence_in(self, slot: int) -> AnySequence | None:
        """The sequence that has a slot."""
        return self._slots[slot]

    def admit(self, choose: Callable[[AnySequence, list[int]], int] = lambda _, free: free[0]) -> list[AnySequence]:
        """Give free slots to the sequences that have waited longest. Returns these sequences.

        choose: picks one of the free slots, which are in ascending order, for a sequence.
        """
        admitted: list[AnySequence] = []
        while self.waiting and self.slots_in_use < len(self._slots):
            sequence = self.waiting.popleft()
            sequence.slot = choose(sequence, self.free_slots)
            self._slots[sequence.slot] = sequence
            self.reading.append(sequence)
            admitted.append(sequence)
        return admitted

    def next_chunk(self) -> Chunk[AnySequence] | None:
        """The chunk to read now, or None. After its run call `record_read`, or `end` if the sequence ended."""
        if not self.reading:
            return None
        sequence = self.reading[0]
        if not self._oldest_is_next:
            sequence = min(self.reading, key=lambda sequence: sequence.prompt_tokens - sequence.read_tokens)
        self._oldest_is_next = not self._oldest_is_next
        return self._next_chunk_of(sequence)

    def skip_prefix(self, sequence: AnySequence, tokens: int) -> Chunk[AnySequence]:
        """Record that a slot already holds the first `tokens` tokens of its prompt. Returns the chunk after them."""
        sequence.read_tokens = tokens
        return self._next_chunk_of(sequence)

    def record_read(self, chunk: Chunk[AnySequence]) -> None:
        """Record that a chunk was read. After the last one the sequence decodes."""
        chunk.sequence.read_tokens = chunk.end
        if chunk.sequence.is_decoding:
            self.reading.remove(chunk.sequence)
            self.decoding.append(chunk.sequence)
            self._is_arranged = False

    def end(self, sequence: AnySequence) -> None:
        """Remove a sequence in any state."""
        if sequence.slot == WAITING:
            self.waiting.remove(sequence)
            return
        self._slots[sequence.slot] = None
        (self.decoding if sequence.is_decoding else self.reading).remove(sequence)
        self._is_arranged = False

    def clear(self) -> None:
        """Remove all sequences."""
        self.waiting.clear()
        self._slots = [None] * len(self._slots)
        self.reading, self.decoding = [], []
        self._is_arranged = False

    def _next_chunk_of(self, sequence: AnySequence) -> Chunk[AnySequence]:
        end = min(sequence.read_tokens + self._chunk, sequence.prompt_tokens)
        if 0 < sequence.prompt_tokens - end < self._last_chunk and end - sequence.read_tokens > 1:
            end -= 1
        if sequence.read_tokens < sequence.branch_position < end:
            end = sequence.branch_position
        return Chunk(sequence, sequence.read_tokens, end)

    def arrange(self) -> list[tuple[int, int]]:
        """Set `width`. Returns pairs of slots to exchange before the step; the first slot of each pair is decoding."""
        if self._is_arranged:
            return []
        self._is_arranged = True
        pairs: list[tuple[int, int]] = []
        while True:
            last = max((sequence.slot for sequence in self.decoding), default=-1)
            target = (
                next((slot for slot in range(last) if self._can_move_to(slot)), None) if self._moves_slots else None
            )
            if target is None:
                self.width = len(self._slots) if self._runs_all_slots and self.decoding else last + 1
                return pairs
            self._exchange(last, target)
            pairs.append((last, target))

    def _can_move_to(self, slot: int) -> bool:
        """Whether a decoding slot may be moved to `slot`."""
        sequence = self._slots[slot]
        return sequence is None or (self._decoding_only and not sequence.is_decoding)

    def _exchange(self, one: int, other: int) -> None:
        slots = self._slots
        slots[one], slots[other] = slots[other], slots[one]
        for slot in (one, other):
            sequence = slots[slot]
            if sequence is not None:
                sequence.slot = slot
