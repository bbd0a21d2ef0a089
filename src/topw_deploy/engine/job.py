"""The records of sequences and requests that the engine's thread keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from topw_deploy.engine.request import Ended, Request
from topw_deploy.engine.room import Place
from topw_deploy.engine.scheduler import Task
from topw_deploy.engine.seconds import waitable
from topw_deploy.runtime.callbacks import Streamer
from topw_deploy.runtime.request import reading
from topw_deploy.runtime.rows import Row, Values


@dataclass(frozen=True)
class Drawn:
    """The sampler's outputs for a sequence's tokens, as recorded; joined when the result is read.

    parts: in order.
    counted: which of them belong to the sequence's tokens.
    """

    parts: Sequence[Values] = ()
    counted: slice = field(default_factory=lambda: slice(0))

    def array(self, name: str) -> np.ndarray:
        """Output `name`, [tokens]; empty if the graph lacks it."""
        found = [part[name] for part in self.parts if name in part]
        return np.concatenate(found)[self.counted] if found else np.zeros(0, np.int64)

    def values(self, name: str) -> list[Any]:
        """Output `name`, one value per token; [] if the graph lacks it."""
        return list(self.array(name).tolist())


class Job(Task):
    """One sequence of a request.

    prompt: int64 [n].
    reuses: whether its prompt may start after a known prefix.
    begun_at: when its first chunk was begun, after `cached` tokens that were not read again; None before.
    first: the outputs of its first run; None before it.
    spans: (row, first step) for each row that it decoded in, in order.
    reads: the request to use while the prompt is read. Steps that read a prompt token by token are greedy and unedited.
    """

    def __init__(self, request: Request, generated: Row, reuses: bool = True) -> None:
        super().__init__(len(generated.given))
        self.request, self.generated = request, generated
        self.reads = reading(generated.request) if generated.unread else generated.request
        self.prompt = np.array(self.reads.prompt, np.int64)
        self.reuses = reuses
        self.begun_at: float | None = None
        self.cached = 0
        self.first: Values | None = None
        self.spans: list[tuple[int, int]] = []
        self.first_at = request.started
        self.ended = False

    def end(self, drawn: Drawn) -> None:
        """Hand the result to the request."""
        self.ended = True
        ended = Ended(self.generated, drawn.values, self.begun_at, self.first_at, self.cached)
        self.request.end_sequence(self.generated.index, ended)


class Group:
    """The decoding sequences. The worker makes a new group when one joins, leaves or moves.

    While all tokens pass, steps leave the sequences untouched, because each run evicts them from the CPU cache.

    jobs: in the order of their rows.
    scored: whether one of them has log-probabilities.
    together: whether `passes` can return True.
    """

    def __init__(self, jobs: Sequence[Job], width: int) -> None:
        """width: rows of a step."""
        self.jobs = sorted(jobs, key=lambda job: job.row)
        self._rows = [job.generated for job in self.jobs]
        self.scored = any(row.scores is not None for row in self._rows)
        self.together = len(jobs) == width and all(row.plain for row in self._rows)
        self._left = min(row.left for row in self._rows)
        self._ends = frozenset[int]().union(*(row.request.eos_token_ids for row in self._rows))
        self._passed = 0

    def passes(self, tokens: list[int]) -> bool:
        """`Row.passes` for all rows; `settle` adds their tokens.

        Returns False, and adds nothing, if a token may not pass. Make a new group then.

        tokens: of all rows of a step.
        """
        if self._left <= 1 or min(tokens) < 0 or not self._ends.isdisjoint(tokens):
            return False
        self._left -= 1
        self._passed += 1
        return True

    def settle(self) -> None:
        """Add the tokens that have passed to the sequences."""
        if self._passed:
            for row in self._rows:
                row.steps += self._passed
            self._passed = 0


@dataclass
class Submission:
    """A request and its sequences. deadline: by time.perf_counter()."""

    request: Request
    jobs: list[Job]
    place: Place
    deadline: float | None = None
    streamer: Streamer | None = None

    @property
    def left(self) -> float | None:
        """Seconds to the deadline."""
        return None if self.deadline is None else waitable(self.deadline - time.perf_counter())

    def abandon(self, reason: str) -> None:
        """End a request that never started."""
        self.end_streamer()
        for job in self.jobs:
            job.generated.interrupt(reason)
            job.end(Drawn())

    def end_streamer(self) -> None:
        if self.streamer is not None:
            try:
                self.streamer.end()
            except BaseException as error:  # noqa: BLE001  # the caller's code
                self.request.fail(error)


@dataclass
class Counts:
    """Totals of the thread's work so far."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ended: int = 0
    failed: int = 0
    busy_seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_run_seconds: float = 0.0
