"""The life of requests in the engine's thread: started, then ended by their last token, an error or a cancellation."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Collection, Iterator

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.capacity import Capacity
from topw_deploy.engine.decoding import Decoding, tokens_in_cache
from topw_deploy.engine.delivery import Delivery
from topw_deploy.engine.prefixes import NO_TOKENS
from topw_deploy.engine.request import Request
from topw_deploy.engine.reuse import Reuse
from topw_deploy.engine.scheduler import WAITING, Scheduler
from topw_deploy.engine.sequences import RequestSequence, Submission, TokenOutputs
from topw_deploy.engine.stats import Counters
from topw_deploy.errors import GenerationError, one_line


class Lifecycle:
    """Starts and ends requests, and frees their rows and reservations. Used only by the engine's thread.

    alive: the requests that have not ended.
    deadlines: of these requests.
    failure: why the engine failed, as an error message; "" if it has not.
    """

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler[RequestSequence],
        capacity: Capacity,
        reuse: Reuse,
        decoding: Decoding,
        delivery: Delivery,
        counters: Counters,
    ) -> None:
        self._batch, self._scheduler, self._capacity, self._reuse = batch, scheduler, capacity, reuse
        self._decoding, self._delivery, self._counters = decoding, delivery, counters
        self.alive: dict[Request, Submission] = {}
        self.deadlines = Deadlines(self.alive)
        self.failure = ""

    def start(self, submission: Submission) -> None:
        """Queue a request whose reservation was granted."""
        request = submission.request
        self.alive[request] = submission
        if submission.deadline is not None:
            self.deadlines.add(submission.deadline, request)
        if self.failure:
            self.fail(submission.sequences[0], GenerationError(self.failure))
            return
        for sequence in submission.sequences:
            self._scheduler.submit(sequence)
        for sequence in submission.sequences:
            generation = sequence.generation
            try:
                if generation.callbacks is not None and not sequence.has_ended:
                    generation.callbacks.stream_prompt()
            except BaseException as error:  # noqa: BLE001  # of the caller's code
                self.fail(sequence, error)
            fills_context = not (generation.params.budget or generation.unread_tokens)
            if fills_context and not sequence.has_ended:
                generation.end("length")
                self.end(sequence)

    def withdraw(self, submission: Submission) -> None:
        """End a request that its caller will never receive, whether or not it was started."""
        if submission.request in self.alive:
            self.end_early(submission.request, "cancelled")
        else:
            self._capacity.release(submission.reservation)

    def end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all if None, with what it drew so far. No effect on a request that has ended."""
        for submission in list(self.alive.values()) if request is None else [self.alive.get(request)]:
            for sequence in submission.sequences if submission else ():
                if not sequence.has_ended:
                    self._interrupt(sequence, reason)

    def expire(self, now: float) -> None:
        """End the requests whose deadlines have passed. now: by time.perf_counter()."""
        for request in self.deadlines.pop_passed(now):
            self.end_early(request, "timeout")

    def fail(self, sequence: RequestSequence, error: BaseException, *, nonfinite: bool = False) -> None:
        """End all sequences of a request because one of them failed. nonfinite: see `Batch.clear`."""
        sequence.request.fail(error)
        self._counters.failed += 1
        for other in self.alive[sequence.request].sequences:
            if not other.has_ended:
                self._interrupt(other, "error", nonfinite=nonfinite)

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests, and accept no more, after an error that none of them caused."""
        why = f"the engine has failed ({type(error).__name__}: {one_line(error)})"
        self.failure = f"{why}; create a new Engine."
        self._capacity.close(why)
        self._scheduler.clear()
        for submission in list(self.alive.values()):
            alive = [sequence for sequence in submission.sequences if not sequence.has_ended]
            if alive:
                self.fail(alive[0], GenerationError(self.failure))

    def end(self, sequence: RequestSequence, *, nonfinite: bool = False) -> None:
        """Free the row of an ended sequence and hand over its result. nonfinite: see `Batch.clear`."""
        outputs, row = self._decoding.outputs_of(sequence), sequence.row
        self._decoding.regroup()
        if not self.failure:
            self._scheduler.end(sequence)
            if row != WAITING:
                unchecked = 0 < sequence.read_tokens < sequence.prompt_tokens
                self._batch.clear(row, nonfinite=nonfinite, unchecked=unchecked)
                self._reuse.release_row(row, _tokens_left(sequence, outputs) if self._reuse.is_enabled else None)
        self._counters.ended += 1
        submission = self.alive[sequence.request]
        if sum(not other.has_ended for other in submission.sequences) == 1:
            del self.alive[sequence.request]
            submission.end_streamer()
        self._capacity.release_one(submission.reservation)
        sequence.has_ended = True
        self._delivery.add(sequence.end, outputs)

    def _interrupt(self, sequence: RequestSequence, reason: str, *, nonfinite: bool = False) -> None:
        """End a sequence before its last token, with the text that was held back."""
        generation = sequence.generation
        try:
            text = generation.interrupt(reason)
        except BaseException as error:  # noqa: BLE001  # of the tokenizer, perhaps the one that failed the request
            sequence.request.fail(error)
            text = ""
        if text:
            sequence.request.deliver_event((generation.index, text, generation.steps))
        self.end(sequence, nonfinite=nonfinite)


class Deadlines:
    """Deadlines by time.perf_counter(). Drops those of ended requests.

    running: the requests that have not ended; its owner adds and removes them.
    """

    def __init__(self, running: Collection[Request]) -> None:
        self._running = running
        self._heap: list[tuple[float, int, weakref.ref[Request]]] = []
        self._numbers = itertools.count()  # so that equal deadlines do not compare requests

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request: Request) -> None:
        """Add the deadline of a running request."""
        heapq.heappush(self._heap, (deadline, next(self._numbers), weakref.ref(request)))
        if len(self._heap) > 2 * len(self._running):
            self._heap = [entry for entry in self._heap if entry[-1]() in self._running]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> Iterator[Request]:
        """Remove the requests whose deadlines are `now` or earlier, and yield them, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[-1]()
            if request is not None:
                yield request


def _tokens_left(sequence: RequestSequence, outputs: TokenOutputs) -> np.ndarray | None:
    """The tokens in the row of an ended sequence; None if only a part of its prompt was read.

    The last drawn token was not read. After an error the row may have read one more token than its results show.
    """
    if sequence.generation.finish_reason == "error":
        return NO_TOKENS
    return tokens_in_cache(sequence, outputs) if sequence.is_decoding else None
