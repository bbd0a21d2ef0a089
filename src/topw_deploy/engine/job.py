"""The records of sequences and requests that the engine's thread keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.engine.request import Ended, Request
from topw_deploy.engine.room import Place
from topw_deploy.engine.scheduler import Task
from topw_deploy.engine.seconds import waitable
from topw_deploy.runtime.callbacks import Streamer
from topw_deploy.runtime.request import reading
from topw_deploy.runtime.rows import Row

OUTPUTS = ("next_token", "logprob", "kept", "certified", "mass")


class Job(Task):
    """One sequence of a request.

    prompt: int64 [n].
    reuses: whether its prompt may start after a known prefix.
    begun_at: when its first chunk was begun, after `cached` tokens that were not read again; None before.
    columns: the outputs of its first token.
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
        self.columns: dict[str, list[Any]] = {}
        self.spans: list[tuple[int, int]] = []
        self.first_at = request.started
        self.ended = False

    def end(self, columns: dict[str, list[Any]]) -> None:
        """Hand the result to the request."""
        self.ended = True
        ended = Ended(self.generated, columns, self.begun_at, self.first_at, self.cached)
        self.request.end_sequence(self.generated.index, ended)


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
            job.end({name: [] for name in OUTPUTS})

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
