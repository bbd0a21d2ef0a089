"""The life of requests in the engine's thread: started, then ended by their last token, an error or a cancellation."""

from __future__ import annotations

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.capacity import Capacity
from topw_deploy.engine.deadlines import Deadlines
from topw_deploy.engine.decoding import Decoding, tokens_read
from topw_deploy.engine.delivery import Delivery
from topw_deploy.engine.job import Counts, Drawn, Job, Submission
from topw_deploy.engine.prefixes import NOTHING
from topw_deploy.engine.request import Request
from topw_deploy.engine.reuse import Reuse
from topw_deploy.engine.scheduler import WAITING, Scheduler
from topw_deploy.errors import GenerationError, one_line


class Lifecycle:
    """Starts and ends requests, and frees what they held. Used only by the engine's thread.

    alive: the requests that have not ended.
    deadlines: of these requests.
    broken: why the engine failed, as an error message; "" if it has not.
    """

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler[Job],
        capacity: Capacity,
        reuse: Reuse,
        decoding: Decoding,
        delivery: Delivery,
        counts: Counts,
    ) -> None:
        self._batch, self._scheduler, self._capacity, self._reuse = batch, scheduler, capacity, reuse
        self._decoding, self._delivery, self._counts = decoding, delivery, counts
        self.alive: dict[Request, Submission] = {}
        self.deadlines = Deadlines(self.alive)
        self.broken = ""

    def start(self, submission: Submission) -> None:
        """Queue a request whose reservation was granted."""
        request = submission.request
        self.alive[request] = submission
        if submission.deadline is not None:
            self.deadlines.add(submission.deadline, request)
        if self.broken:
            self.fail(submission.jobs[0], GenerationError(self.broken))
            return
        for job in submission.jobs:
            self._scheduler.submit(job)
        for job in submission.jobs:
            row = job.generated
            try:
                if row.watch is not None and not job.ended:
                    row.watch.begin()
            except BaseException as error:  # noqa: BLE001  # of the caller's code
                self.fail(job, error)
            if not (job.ended or row.request.budget or row.unread):  # the prompt fills the context
                row.end("length")
                self.end(job)

    def withdraw(self, submission: Submission) -> None:
        """End a request that its caller will never receive, whether or not it was started."""
        if submission.request in self.alive:
            self.end_early(submission.request, "cancelled")
        else:
            self._capacity.release(submission.reservation)

    def end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all if None, with what it drew so far. No effect on a request that has ended."""
        for submission in list(self.alive.values()) if request is None else [self.alive.get(request)]:
            for job in submission.jobs if submission else ():
                if not job.ended:
                    self._interrupt(job, reason)

    def expire(self, now: float) -> None:
        """End the requests whose deadlines have passed. now: by time.perf_counter()."""
        for request in self.deadlines.passed(now):
            self.end_early(request, "timeout")

    def fail(self, job: Job, error: BaseException, *, spoilt: bool = False) -> None:
        """End all sequences of a request because one of them failed. spoilt: see `Batch.clear`."""
        job.request.fail(error)
        self._counts.failed += 1
        for other in self.alive[job.request].jobs:
            if not other.ended:
                self._interrupt(other, "error", spoilt=spoilt)

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests, and accept no more, after an error that none of them caused."""
        why = f"the engine has failed ({type(error).__name__}: {one_line(error)})"
        self.broken = f"{why}; create a new Engine."
        self._capacity.close(why)
        self._scheduler.clear()
        for submission in list(self.alive.values()):
            alive = [job for job in submission.jobs if not job.ended]
            if alive:
                self.fail(alive[0], GenerationError(self.broken))

    def end(self, job: Job, *, spoilt: bool = False) -> None:
        """Free the row of an ended sequence and hand over its result."""
        drawn, row = self._decoding.drawn(job), job.row
        self._decoding.regroup()
        if not self.broken:
            self._scheduler.end(job)
            if row != WAITING:
                unchecked = 0 < job.read < job.prompt_tokens
                self._batch.clear(row, spoilt=spoilt, unchecked=unchecked)
                self._reuse.release(row, _held(job, drawn) if self._reuse.on else None)
        self._counts.ended += 1
        submission = self.alive[job.request]
        if sum(not other.ended for other in submission.jobs) == 1:
            del self.alive[job.request]
            submission.end_streamer()
        self._capacity.release_one(submission.reservation)
        job.ended = True
        self._delivery.add(job.end, drawn)

    def _interrupt(self, job: Job, reason: str, *, spoilt: bool = False) -> None:
        try:
            held = job.generated.interrupt(reason)
        except BaseException as error:  # noqa: BLE001  # of the tokenizer, perhaps the one that failed the request
            job.request.fail(error)
            held = ""
        if held:
            job.request.put((job.generated.index, held, job.generated.steps))
        self.end(job, spoilt=spoilt)


def _held(job: Job, drawn: Drawn) -> np.ndarray | None:
    """The tokens in the row of an ended sequence; None for the part of its prompt that was read.

    The last drawn token was not read. After an error the row may have read one more token than its results show.
    """
    if job.generated.finish_reason == "error":
        return NOTHING
    return tokens_read(job, drawn) if job.decoding else None
