"""The logits of one step, recomputed for inspection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topw_deploy.engine.engine import Engine
from topw_deploy.engine.tasks import TaskFlag
from topw_deploy.errors import GenerationError, PromptError
from topw_deploy.runtime.logprobs import Logits, Scores

_ONE_TOKEN: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0, "seed": 0, "logprobs": 0}


class _FirstLogits(Scores):
    """Keeps the logits of a sequence's first token, in place of its log-probabilities."""

    logits: Logits | None = None

    def add(self, logits: np.ndarray, token: int) -> None:
        self.logits = np.array(logits, np.float32)


async def logits_after(engine: Engine, tokens: Sequence[int], max_time: float | None = None) -> Logits:
    """The logits float32 [V] after `tokens`, before edits and masks.

    Runs as a one-token request: it queues like any other and reads only uncached tokens, usually one. Cancelling the
    task cancels the request.

    max_time: seconds, including queueing.

    Raises ParameterError for an export without logits, PromptError for tokens that are unknown, none, or leave no room
    for another one, LogitsError for NaN or +infinity, QueueFullError if the queue is full, and GenerationError if the
    engine is shut down or `max_time` is over first.
    """
    ended = TaskFlag(engine._loop_waker())
    draft = engine._builder.draft(list(tokens), _ONE_TOKEN, max_time)
    submission = engine._builder.build(draft, on_end=ended.set)
    (sequence,) = submission.sequences
    kept = sequence.generation.scores = _FirstLogits(sequence.generation.request, str)
    await engine._start(submission)
    try:
        await ended.wait()
    finally:
        submission.request.cancel()
    reason = submission.request.result().finish_reason
    if kept.logits is not None:
        return kept.logits
    if reason == "length":
        raise PromptError(f"{len(tokens)} tokens fill the context, so none can follow; give fewer.", "max_length")
    raise GenerationError(f"the step's logits were not computed: the request ended as {reason!r}; send it again.")
