"""The engine's thread, which runs chunks and steps. Only this thread uses the batch."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.capacity import Capacity
from topw_deploy.engine.decoding import Decoding
from topw_deploy.engine.delivery import Delivery
from topw_deploy.engine.inbox import InboxThread
from topw_deploy.engine.job import Counts, Job, Submission
from topw_deploy.engine.lifecycle import Lifecycle
from topw_deploy.engine.options import Options
from topw_deploy.engine.prefixes import NOTHING
from topw_deploy.engine.request import Request
from topw_deploy.engine.reuse import Reuse
from topw_deploy.engine.scheduler import Chunk, Scheduler
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, TopWError
from topw_deploy.manifest import DecoderInfo

_AT_EXIT = 10.0  # seconds that the interpreter waits for a run or a callback in progress
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker(InboxThread):
    """Runs until `retire`. Other threads may call only the methods `start` to `retire` and those of `InboxThread`."""

    def __init__(
        self, batch: Batch, scheduler: Scheduler[Job], capacity: Capacity, decoder: DecoderInfo, options: Options
    ) -> None:
        super().__init__("topw-engine")
        self.counts = Counts()
        self._batch, self._scheduler = batch, scheduler
        self._decoding = Decoding(batch, scheduler)
        self._reuse = Reuse(batch, decoder, options, self._decoding.tokens)
        self._delivery = Delivery(lambda error: self._post(partial(self._lifecycle.fail_all, error)))
        self._lifecycle = Lifecycle(
            batch, scheduler, capacity, self._reuse, self._decoding, self._delivery, self.counts
        )
        self._retiring = False
        self._thread.start()
        _workers.add(self)

    def start(self, submission: Submission) -> None:
        """Queue a request whose reservation was granted."""
        self._post(partial(self._lifecycle.start, submission))

    def withdraw(self, submission: Submission) -> None:
        """End a request that its caller will never receive. `start` may have been called for it."""
        self._post(partial(self._lifecycle.withdraw, submission))

    def end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all, before the next run."""
        self._post(partial(self._lifecycle.end_early, request, reason))

    def deliver(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the delivering thread, after those given before. It must not block.

        Call this only in the engine's thread.
        """
        self._delivery.add(function, *arguments)

    def pass_by(self) -> None:
        """Wait until everything posted before, and the iteration in progress, is done and delivered."""
        passed: SimpleQueue[None] = SimpleQueue()
        self._post(partial(self.deliver, passed.put, None))
        if self._ended:  # by a signal handler
            self._empty_inbox()
        passed.get()

    def save(self, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """`Reuse.saved`, between two iterations."""
        return self._call("save_session", partial(self._reuse.saved, tokens))

    def load(self, tokens: np.ndarray, states: Sequence[np.ndarray]) -> None:
        """`Reuse.load`, between two iterations."""
        self._call("load_session", lambda: self._reuse.load(tokens, states, self._scheduler.free))

    def retire(self) -> None:
        """Make the thread end and release the batch as soon as it has no requests."""
        self._post(self._retire)

    def _check_alive(self) -> None:
        if self._ended or self._lifecycle.broken:
            raise GenerationError(self._lifecycle.broken or "the engine is shut down; create a new Engine.")

    def _main(self) -> None:
        while self._lifecycle.alive or not self._inbox.empty() or not self._retiring:
            try:
                self._iterate()
            except BaseException as error:  # noqa: BLE001  # callers must not wait forever
                self._lifecycle.fail_all(error)
                self._delivery.send()
        self._batch.close()
        self._ended = True
        self._empty_inbox()
        self._delivery.close()

    def _iterate(self) -> None:
        inbox = self._inbox
        if inbox.empty() and (self._scheduler.idle or self._lifecycle.broken):
            self._delivery.send()
            inbox.get()()  # waits
        began, ran, counts = time.perf_counter(), self._batch.run_seconds, self.counts
        quiet, group, chunks = inbox.empty(), self._decoding.group, counts.chunks
        if not quiet:
            self._delivery.send()  # starting requests may take longer than tokens may be held
        while not inbox.empty():
            inbox.get()()
        if self._lifecycle.deadlines:
            self._lifecycle.expire(time.perf_counter())
        if not self._lifecycle.broken:
            self._run()
        self._delivery.send_due()
        took = time.perf_counter() - began
        counts.busy_seconds += took
        if quiet and group is not None and group is self._decoding.group and chunks == counts.chunks:
            counts.steady_seconds += took
            counts.steady_run_seconds += self._batch.run_seconds - ran

    def _run(self) -> None:
        """One iteration, as scheduler.py describes it."""
        scheduler, batch = self._scheduler, self._batch
        if scheduler.waiting:
            self._admit()
        chunk = scheduler.next_chunk()
        if chunk is not None:
            self._delivery.send()  # before a run that may be long
            self._read(chunk)
            self._delivery.send()  # a first token, before the step
        if batch.edits.active:
            self._write_edits()
        pairs = scheduler.arrange()
        if pairs:
            self._exchange(pairs)
        if scheduler.decoding:
            self._step()

    def _admit(self) -> None:
        first = self._scheduler.first
        if first is not None and not self._scheduler.used:
            self._reuse.rest(first.prompt)
        for job in self._scheduler.admit(lambda job, free: self._reuse.choose(job.prompt, free, reuses=job.reuses)):
            try:
                if not job.ended:  # with another sequence of its request
                    self._batch.set(job.row, job.reads)
                    self._allow(job)
                    self._scheduler.skip(job, self._reuse.start(job.row, job.prompt, reuses=job.reuses))
            except ParameterError as error:
                self._lifecycle.fail(job, error)
            except (TopWError, MemoryError) as error:
                self._lifecycle.fail(job, _no_copy(error), spoilt=True)

    def _read(self, chunk: Chunk[Job]) -> None:
        job, row = chunk.task, chunk.task.row
        try:
            if job.begun_at is None:  # rows may hold more of its prompt now than when it got its own
                job.begun_at = time.perf_counter()
                job.cached = self._reuse.start(row, job.prompt, reuses=job.reuses)
                job.branch = self._reuse.branch(job.prompt, job.cached) if job.reuses else 0
                self.counts.cached_tokens += job.cached
                chunk = self._scheduler.skip(job, job.cached)
            self._batch.wants_logits = job.generated.wants_logits
            token = self._batch.read(row, job.reads, chunk.start, chunk.end)
        except (TopWError, MemoryError) as error:
            self._lifecycle.fail(job, _no_copy(error), spoilt=True)
            return
        self.counts.chunks += 1
        self.counts.prompt_tokens += chunk.end - chunk.start
        self._reuse.read(row, job.prompt[: chunk.end], sound=token is None or token >= 0)
        self._scheduler.read(chunk)
        if token is None:
            return
        self._decoding.regroup()
        job.first = self._batch.first()
        job.spans = [(row, self._batch.steps)]
        self._take(job, token, partial(self._batch.begin, row))

    def _write_edits(self) -> None:
        for job in list(self._scheduler.decoding):
            try:
                if not job.ended:  # with another sequence of its request
                    self._batch.edits.write(job.row)
            except ParameterError as error:
                self._lifecycle.fail(job, error)

    def _exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._decoding.regroup()
        for pair in pairs:
            try:
                saves = self._scheduler.at(pair[0]) is not None or self._reuse.holds(pair[1])
                self._batch.exchange(*pair, saves)
            except (TopWError, MemoryError) as error:
                self._lose(pair, _no_copy(error))
            self._reuse.exchange(*pair)
        for job in list(self._scheduler.decoding):
            if job.spans[-1][0] != job.row:
                job.spans.append((job.row, self._batch.steps))

    def _lose(self, rows: tuple[int, int], error: BaseException) -> None:
        """Clear two rows after an exchange that failed midway, and fail their requests."""
        for row in rows:
            job = self._scheduler.at(row)
            if job is not None:
                self._lifecycle.fail(job, error, spoilt=True)
            else:
                self._batch.clear(row, spoilt=True)
                self._reuse.release(row, NOTHING)

    def _step(self) -> None:
        batch, width, group = self._batch, self._scheduler.width, self._decoding.next_group()
        jobs = group.jobs
        try:
            batch.wants_logits = group.scored and any(job.generated.wants_logits for job in jobs)
            tokens = batch.step(width)
        except GenerationError as error:
            for job in jobs:
                if not job.ended:  # with another sequence of its request
                    self._lifecycle.fail(job, GenerationError(str(error)), spoilt=True)
            return
        self.counts.steps += 1
        if group.together:
            if not batch.edits.active and group.passes(tokens[:width]):
                batch.accept_all(width)
                self._deliver(zip(jobs, tokens, strict=False), width)
                return
            self._decoding.regroup()
        passed: list[tuple[Job, int]] = []
        for job in jobs:
            if job.ended:  # with another sequence of its request
                continue
            token = tokens[job.row]
            if not job.generated.passes(token):
                passed = self._deliver(passed, len(passed))
                self._take(job, token, partial(batch.accept, job.row))
                continue
            passed.append((job, token))
            try:
                batch.accept(job.row, token)
            except ParameterError as error:
                passed = self._deliver(passed, len(passed))
                self._lifecycle.fail(job, error)
        self._deliver(passed, len(passed))

    def _deliver(self, passed: Iterable[tuple[Job, int]], count: int) -> list[tuple[Job, int]]:
        """Deliver tokens of `Row.passes`; if several rows are in use, together with those of the next short steps.

        Returns an empty list.
        """
        self.counts.new_tokens += count
        if count:
            add = self._delivery.add_soon if self._scheduler.used > 1 else self._delivery.add
            add(_hand_over, passed)
        return []

    def _take(self, job: Job, token: int, feed: Callable[[int], None]) -> None:
        """Add the token that a run drew to a sequence. Unless that ends it, `feed` its next token to the next run."""
        row = job.generated
        drawn = not row.unread
        if not row.steps:
            job.first_at = time.perf_counter()
        if drawn and token < 0:
            self._lifecycle.fail(job, row.invalid(f"sequence {row.index} of the request"), spoilt=True)
            return
        logits = self._batch.logits(job.row) if row.wants_logits else None
        try:
            if drawn:
                gained = row.take(token, logits)
            else:
                token = row.read(logits)
        except BaseException as error:  # noqa: BLE001  # of the caller's code, or of the logits
            self._lifecycle.fail(job, error, spoilt=isinstance(error, LogitsError))
            return
        if not drawn:
            self.counts.prompt_tokens += 1
        elif row.text is None:
            if not isinstance(row.stop, int):
                job.request.put((row.index, token, row.steps))
        elif gained:
            job.request.put((row.index, gained, row.steps))
        self.counts.new_tokens += drawn
        if row.finish_reason is not None:
            self._lifecycle.end(job)
            return
        try:
            feed(token)
            if not drawn and not row.unread:
                self._batch.set(job.row, row.request)
            self._allow(job)
        except ParameterError as error:
            self._lifecycle.fail(job, error)

    def _allow(self, job: Job) -> None:
        """Update the mask of the tokens that a sequence's grammar allows next."""
        row = job.generated
        if row.guide is not None and not row.unread:
            self._batch.allowed.set(job.row, row.guide.mask)

    def _retire(self) -> None:
        self._retiring = True


def _no_copy(error: BaseException) -> BaseException:
    """The request's error if copying states before its run fails."""
    if isinstance(error, MemoryError):
        return GenerationError(
            "there is no memory for a copy of the request's states; end requests, or use fewer rows."
        )
    return error


def _hand_over(passed: Iterable[tuple[Job, int]]) -> None:
    for job, token in passed:
        job.request.take((job.generated.index, token, 0))  # their log-probabilities are not requested


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter exits: a thread inside onnxruntime would then abort the process."""
    workers = [worker for worker in _workers if not worker.forked]
    for worker in workers:
        worker.end_early(None, "cancelled")
        worker.retire()
    end = time.perf_counter() + _AT_EXIT
    for worker in workers:
        worker.join(max(0.0, end - time.perf_counter()))
