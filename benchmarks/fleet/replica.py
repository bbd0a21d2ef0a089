"""A simulated engine: the iterations of `topw_deploy.engine`, with measured costs instead of runs.

An iteration reads at most one chunk of one prompt, alternating between the oldest prompt and the one with the fewest
tokens left, then draws a token for each decoding row. While nothing is read, iterations of equal width are one event.
Not modelled: the growth of a step's cost with the context, copying a reused prefix, and anything outside the engine.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from benchmarks.fleet.costs import Costs


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. Times are seconds; `read` and `left` are tokens of the prompt and of the answer."""

    arrival: float
    group: int
    shared: int
    prompt: int
    new: int
    read: int = 0
    left: int = 0
    row: int = -1
    reused: int = 0
    first: float = math.inf
    end: float = math.inf


@dataclass(eq=False, slots=True)
class Replica:
    """until: time at which `finish` must be called; infinite while idle. load: sequences that it has."""

    costs: Costs
    until: float = math.inf
    load: int = 0
    _start: float = 0.0
    _waiting: deque[Sequence] = field(default_factory=deque)
    _reading: list[Sequence] = field(default_factory=list)
    _decoding: list[Sequence] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)  # the group whose shared tokens each row has; -1 for none
    _tokens: list[int] = field(default_factory=list)  # of each row's last sequence
    _free: list[int] = field(default_factory=list)  # rows, the one that was used least recently first
    _chunk: tuple[Sequence, int] | None = None
    _steps: int = 0
    _step: float = 0.0
    _oldest_next: bool = True

    def __post_init__(self) -> None:
        rows = self.costs.rows
        self._held, self._tokens, self._free = [-1] * rows, [0] * rows, list(range(rows))

    def arrive(self, sequence: Sequence) -> None:
        """Take a request, at its arrival. It joins after the current iteration."""
        self.load += 1
        self._waiting.append(sequence)
        if self.until == math.inf:
            self._begin(sequence.arrival)
        elif self._chunk is None and self._free:
            done = max(1, math.ceil((sequence.arrival - self._start) / self._step))
            if done < self._steps:
                self._steps, self.until = done, self._start + done * self._step

    def finish(self) -> list[Sequence]:
        """End the current iterations, at `until`, and begin the next ones. Returns the sequences that ended."""
        now = self.until
        if self._chunk is not None:
            sequence, tokens = self._chunk
            sequence.read += tokens
            if sequence.group >= 0 and sequence.read >= sequence.shared:
                self._held[sequence.row] = sequence.group
            if sequence.read == sequence.prompt:
                sequence.first = self._start + self.costs.reading(tokens)
                sequence.left = sequence.new - 1
                self._reading.remove(sequence)
                if sequence.left:
                    self._decoding.append(sequence)
                else:
                    sequence.end = sequence.first
        ended = [] if self._chunk is None or self._chunk[0].end == math.inf else [self._chunk[0]]
        for sequence in self._decoding:
            sequence.left -= self._steps
            if not sequence.left:
                sequence.end = now
                ended.append(sequence)
        if ended:
            self._decoding = [sequence for sequence in self._decoding if sequence.left]
            self._free += [sequence.row for sequence in ended]
            self.load -= len(ended)
        self._begin(now)
        return ended

    def _begin(self, now: float) -> None:
        while self._waiting and self._free:
            self._admit(self._waiting.popleft())
        self._start, self._chunk, self._steps, seconds = now, None, 0, 0.0
        width = len(self._decoding)
        if self._reading:
            sequence, tokens = self._chunk = self._next_chunk()
            seconds = self.costs.reading(tokens)
            width += sequence.read + tokens == sequence.prompt and sequence.new > 1
            self._steps = int(width > 0)
        elif width:
            self._steps = min(sequence.left for sequence in self._decoding)
        self._step = self.costs.step[width - 1] if width else 0.0
        seconds += self._steps * self._step
        self.until = now + seconds if self._chunk is not None or width else math.inf

    def _admit(self, sequence: Sequence) -> None:
        """Give it a free row, by the rules of `topw_deploy.engine.prefixes`, and the shared tokens if a row holds them.

        It takes over a row whose shared tokens are at least half of what it holds; else a row that holds nothing, or
        the one that was released first.
        """
        held = self._held
        if sequence.group >= 0 and sequence.group in held:
            sequence.read = sequence.reused = sequence.shared
        same = [row for row in sorted(self._free) if held[row] == sequence.group >= 0]
        empty = [row for row in sorted(self._free) if not self._tokens[row]]
        row = next(iter(empty), self._free[0])
        if same and 2 * sequence.shared >= self._tokens[same[0]]:
            row = same[0]
        self._free.remove(row)
        sequence.row = row
        held[row] = sequence.group if sequence.reused else -1
        self._tokens[row] = sequence.prompt + sequence.new
        self._reading.append(sequence)

    def _next_chunk(self) -> tuple[Sequence, int]:
        sequence = self._reading[0]
        if not self._oldest_next:
            sequence = min(self._reading, key=lambda each: each.prompt - each.read)
        self._oldest_next = not self._oldest_next
        return sequence, min(self.costs.chunk, sequence.prompt - sequence.read)
