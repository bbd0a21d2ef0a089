"""The records of sequences and requests that the engine's thread keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from topw_deploy.engine.capacity import Reservation
from topw_deploy.engine.request import Ended, Request
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


@dataclass
class Submission:
    """A request and its sequences. deadline: by time.perf_counter()."""

    request: Request
    jobs: list[Job]
    reservation: Reservation
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
