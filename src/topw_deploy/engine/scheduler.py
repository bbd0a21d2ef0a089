"""Which sequence has which row, whose prompt is read next, and which rows a step runs. Needs no session or threads.

One iteration of the engine calls, in this order:

    admit()        sequences that get a row now
    next_chunk()   at most one chunk of one prompt; after its run `read`
    arrange()      rows to exchange, so that the step is narrow
    width          rows 0 .. width - 1 take part in the step

and `end` for each sequence that ended. So a decoding row waits for at most one chunk per step.

Rows are assigned first come, first served. Among the prompts being read, chunks alternate between the oldest prompt and
the one with the fewest tokens left. A short prompt therefore waits for about one chunk of a long one. The oldest prompt
gets at least every second chunk: a prompt of n chunks is read at most 2 n iterations after it became the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

WAITING = -1


class Task:
    """One sequence.

    prompt_tokens: length of the prompt, at least 1.
    read: number of tokens of the prompt that are in the cache.
    branch: a position of the prompt at which a chunk must end; 0 for none.
    row: its row, or WAITING.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.read = self.branch = 0
        self.row = WAITING

    @property
    def decoding(self) -> bool:
        return self.read == self.prompt_tokens


AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[AnyTask]):
    """Tokens `start` to `end`, exclusive, of a prompt. last: whether they are its last ones."""

    task: AnyTask
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.task.prompt_tokens


class Scheduler(Generic[AnyTask]):
    """Assigns sequences to `rows` rows.

    chunk: maximum tokens of a chunk.
    dense: whether the rows of a step must all be decoding. If not, a step may include free rows and rows that read
        their prompt.
    moves: whether sequences may be moved merely to make a step narrower. `dense` moves them in any case.
    steady: whether every step runs all rows, so that kernels round alike in all steps. `dense` rules it out.
    """

    def __init__(self, rows: int, chunk: int, *, dense: bool = False, moves: bool = True, steady: bool = False) -> None:
        self._chunk, self._dense = chunk, dense
        self._steady = steady and not dense
        self._moves = dense or (moves and not steady)
        self._waiting: deque[AnyTask] = deque()
        self._rows: list[AnyTask | None] = [None] * rows
        self._reading: list[AnyTask] = []  # in the order of admission
        self._oldest_next = True
        self._arranged = True
        self.decoding: list[AnyTask] = []
        self.width = 0

    @property
    def idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self._waiting or self._reading or self.decoding)

    @property
    def waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    @property
    def used(self) -> int:
        """Rows in use."""
        return len(self._reading) + len(self.decoding)

    def reading(self) -> list[AnyTask]:
        """Sequences that have a row and a part of their prompt to read."""
        return list(self._reading)

    def submit(self, task: AnyTask) -> None:
        self._waiting.append(task)

    @property
    def first(self) -> AnyTask | None:
        """The sequence that has waited longest."""
        return self._waiting[0] if self._waiting else None

    @property
    def free(self) -> list[int]:
        """Rows without a sequence, in ascending order."""
        return [row for row, task in enumerate(self._rows) if task is None]

    def at(self, row: int) -> AnyTask | None:
        """The sequence that has a row."""
        return self._rows[row]

    def admit(self, choose: Callable[[AnyTask, list[int]], int] = lambda _, free: free[0]) -> list[AnyTask]:
        """Give free rows to the sequences that have waited longest. Returns these sequences.

        choose: picks one of the free rows, which are in ascending order, for a sequence.
        """
        admitted: list[AnyTask] = []
        while self._waiting and self.used < len(self._rows):
            task = self._waiting.popleft()
            task.row = choose(task, self.free)
            self._rows[task.row] = task
            self._reading.append(task)
            admitted.append(task)
        return admitted

    def next_chunk(self) -> Chunk[AnyTask] | None:
        """The chunk to read now, or None. After its run call `read`, or `end` if the sequence ended."""
        if not self._reading:
            return None
        task = self._reading[0]
        if not self._oldest_next:
            task = min(self._reading, key=lambda task: task.prompt_tokens - task.read)
        self._oldest_next = not self._oldest_next
        return self._chunk_of(task)

    def skip(self, task: AnyTask, tokens: int) -> Chunk[AnyTask]:
        """Record that a row already holds the first `tokens` tokens of its prompt. Returns the chunk after them."""
        task.read = tokens
        return self._chunk_of(task)

    def read(self, chunk: Chunk[AnyTask]) -> None:
        """Record that a chunk was read. After the last one the sequence decodes."""
        chunk.task.read = chunk.end
        if chunk.last:
            self._reading.remove(chunk.task)
            self.decoding.append(chunk.task)
            self._arranged = False

    def end(self, task: AnyTask) -> None:
        """Remove a sequence in any state."""
        if task.row == WAITING:
            self._waiting.remove(task)
            return
        self._rows[task.row] = None
        (self.decoding if task.decoding else self._reading).remove(task)
        self._arranged = False

    def clear(self) -> None:
        """Remove all sequences."""
        self._waiting.clear()
        self._rows = [None] * len(self._rows)
        self._reading, self.decoding = [], []
        self._arranged = False

    def _chunk_of(self, task: AnyTask) -> Chunk[AnyTask]:
        end = min(task.read + self._chunk, task.prompt_tokens)
        return Chunk(task, task.read, task.branch if task.read < task.branch < end else end)

    def arrange(self) -> list[tuple[int, int]]:
        """Set `width`. Returns pairs of rows to exchange before the step; the first row of each pair is decoding."""
        if self._arranged:
            return []
        self._arranged = True
        pairs: list[tuple[int, int]] = []
        while True:
            last = max((task.row for task in self.decoding), default=-1)
            target = next((row for row in range(last) if self._may_take(row)), None) if self._moves else None
            if target is None:
                self.width = len(self._rows) if self._steady and self.decoding else last + 1
                return pairs
            self._exchange(last, target)
            pairs.append((last, target))

    def _may_take(self, row: int) -> bool:
        """Whether a decoding row may be moved to `row`."""
        task = self._rows[row]
        return task is None or (self._dense and not task.decoding)

    def _exchange(self, one: int, other: int) -> None:
        rows = self._rows
        rows[one], rows[other] = rows[other], rows[one]
        for row in (one, other):
            task = rows[row]
            if task is not None:
                task.row = row
