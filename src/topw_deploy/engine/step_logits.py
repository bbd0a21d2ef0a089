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
    """Keeps the logits of a sequence's first drawn token, instead of computing log-probabilities.

    logits: float32 [V]; None until the token is drawn.
    """

    logits: Logits | None = None

    def add(self, logits: np.ndarray, token: int) -> None:
        self.logits = np.array(logits, np.float32)


async def logits_after(engine: Engine, tokens: Sequence[int], max_time: float | None = None) -> Logits:
    """Returns the logits after `tokens`, before edits and masks: float32 [V].

    Submits a request for one token, which queues like any other and reads only tokens that the engine does not hold,
    usually one. Cancelling the task cancels the request.

    max_time: seconds, including queueing.

    Raises ParameterError for an export without logits, and LogitsError for NaN or +infinity. Raises PromptError if
    `tokens` is empty, has an unknown token, or fills the context. Raises QueueFullError if the queue is full, and
    GenerationError if the engine is shut down or `max_time` is over first.
    """
    ended = TaskFlag(engine._loop_waker())
    submission = engine._new_submission(list(tokens), _ONE_TOKEN, max_time, on_end=ended.set)
    (sequence,) = submission.request.sequences
    first = sequence.scores = _FirstLogits(0, None, str)
    await engine._start(submission)
    try:
        await ended.wait()
    finally:
        submission.request.cancel()
    reason = submission.request.result().finish_reason
    if first.logits is not None:
        return first.logits
    if reason == "length":
        raise PromptError(f"{len(tokens)} tokens fill the context, so none can follow; give fewer.", "max_length")
    raise GenerationError(f"the step's logits were not computed: the request ended as {reason!r}; send it again.")
