"""The engine thread's records of requests and their sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from topw_deploy.engine.capacity import Reservation
from topw_deploy.engine.request import EndedSequence, Request
from topw_deploy.engine.scheduler import ScheduledSequence
from topw_deploy.engine.seconds import waitable
from topw_deploy.runtime.loop import SlotOutputs
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.sequence import Streamer


@dataclass(frozen=True)
class TokenOutputs:
    """The sampler's outputs for a sequence's tokens, as recorded by the batch. Joined when a result is read.

    parts: outputs of consecutive runs, in order.
    counted: which of the joined entries belong to the sequence's tokens; the others were drawn while its prompt was
        read.
    """

    parts: Sequence[SlotOutputs] = ()
    counted: slice = field(default_factory=lambda: slice(0))

    def array(self, name: str) -> np.ndarray:
        """Output `name`, [tokens]; empty if the graph lacks it."""
        arrays = [part[name] for part in self.parts if name in part]
        return np.concatenate(arrays)[self.counted] if arrays else np.zeros(0, np.int64)

    def values(self, name: str) -> list[Any]:
        """Output `name`, one value per token; [] if the graph lacks it."""
        return list(self.array(name).tolist())


class RequestSequence(ScheduledSequence):
    """One sequence of a request.

    generation: its tokens, text, callbacks and grammar.
    prompt: int64 [n].
    reuses_prefix: whether its prompt may start after a known prefix.
    prefill_began_at: time.perf_counter() before its first chunk; None until then.
    cached_tokens: tokens of the prompt that were reused instead of read.
    first_outputs: the outputs of the run that read the prompt's last chunk; None until then.
    spans: (row, first step) for each row that it decoded in, in order.
    first_token_at: time.perf_counter() at its first token.
    has_ended: whether its result was handed over, or is about to be.
    """

    def __init__(self, request: Request, generation: GeneratedSequence, reuses_prefix: bool = True) -> None:
        super().__init__(len(generation.fed_prompt))
        self.request, self.generation, self.reuses_prefix = request, generation, reuses_prefix
        self.prompt = np.array(generation.fed_prompt, np.int64)
        self.prefill_began_at: float | None = None
        self.cached_tokens = 0
        self.first_outputs: SlotOutputs | None = None
        self.spans: list[tuple[int, int]] = []
        self.first_token_at = request.started
        self.has_ended = False

    def end(self, outputs: TokenOutputs) -> None:
        """Hand the result to the request."""
        self.has_ended = True
        ended = EndedSequence(
            self.generation, outputs.values, self.prefill_began_at, self.first_token_at, self.cached_tokens
        )
        self.request.end_sequence(self.generation.index, ended)


@dataclass
class Submission:
    """A request and its sequences.

    deadline: time.perf_counter() at which the request must end; None for no deadline.
    """

    request: Request
    sequences: list[RequestSequence]
    reservation: Reservation
    deadline: float | None = None
    streamer: Streamer | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the deadline, or None."""
        return None if self.deadline is None else waitable(self.deadline - time.perf_counter())

    def abandon(self, reason: str) -> None:
        """End a request that never started."""
        self.end_streamer()
        for sequence in self.sequences:
            sequence.generation.interrupt(reason)
            sequence.end(TokenOutputs())

    def end_streamer(self) -> None:
        """Call the streamer's `end`. An error in it fails the request."""
        if self.streamer is not None:
            try:
                self.streamer.end()
            except BaseException as error:  # noqa: BLE001  # the caller's code
                self.request.fail(error)
