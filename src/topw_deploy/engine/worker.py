"""The engine's thread: starts requests, runs chunks and steps, ends sequences. Only this thread uses the batch."""

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
from topw_deploy.engine.deadlines import Deadlines
from topw_deploy.engine.delivery import Delivery
from topw_deploy.engine.inbox import InboxThread
from topw_deploy.engine.job import Counts, Drawn, Group, Job, Submission
from topw_deploy.engine.options import Options
from topw_deploy.engine.prefixes import NOTHING
from topw_deploy.engine.request import Request
from topw_deploy.engine.reuse import Reuse
from topw_deploy.engine.room import Room
from topw_deploy.engine.scheduler import WAITING, Chunk, Scheduler
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, TopWError, one_line
from topw_deploy.manifest import DecoderInfo

_AT_EXIT = 10.0  # seconds that the interpreter waits for a run or a callback in progress
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker(InboxThread):
    """Runs until `retire`. Other threads may call only the methods `start` to `retire` and those of `InboxThread`."""

    def __init__(
        self, batch: Batch, scheduler: Scheduler[Job], room: Room, decoder: DecoderInfo, options: Options
    ) -> None:
        super().__init__("topw-engine")
        self.counts = Counts()
        self._reuse = Reuse(batch, decoder, options, self._running)
        self._batch, self._scheduler, self._room = batch, scheduler, room
        self._alive: dict[Request, Submission] = {}
        self._deadlines = Deadlines(self._alive)
        self._group: Group | None = None  # of the next step; None if it has changed
        self._retiring, self._broken = False, ""  # or why the engine failed
        self._delivery = Delivery(lambda error: self._post(partial(self._break, error)))
        self._thread.start()
        _workers.add(self)

    def start(self, submission: Submission) -> None:
        """Queue a request for which there is room."""
        self._post(partial(self._start, submission))

    def withdraw(self, submission: Submission) -> None:
        """End a request that its caller will never receive. `start` may have been called for it."""
        self._post(partial(self._withdraw, submission))

    def end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all, before the next run."""
        self._post(partial(self._end_early, request, reason))

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
        if self._ended or self._broken:
            raise GenerationError(self._broken or "the engine is shut down; create a new Engine.")

    def _main(self) -> None:
        while self._alive or not self._inbox.empty() or not self._retiring:
            try:
                self._iterate()
            except BaseException as error:  # noqa: BLE001  # callers must not wait forever
                self._break(error)
                self._delivery.send()
        self._batch.close()
        self._ended = True
        self._empty_inbox()
        self._delivery.close()

    def _iterate(self) -> None:
        inbox = self._inbox
        if inbox.empty() and (self._scheduler.idle or self._broken):
            self._delivery.send()
            inbox.get()()  # waits
        began, ran, counts = time.perf_counter(), self._batch.run_seconds, self.counts
        quiet, group, chunks = inbox.empty(), self._group, counts.chunks
        if not quiet:
            self._delivery.send()  # starting requests may take longer than tokens may be held
        while not inbox.empty():
            inbox.get()()
        if self._deadlines:
            self._expire(time.perf_counter())
        if not self._broken:
            self._run()
        self._delivery.send_due()
        took = time.perf_counter() - began
        counts.busy_seconds += took
        if quiet and group is not None and group is self._group and chunks == counts.chunks:
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
                self._fail(job, error)
            except (TopWError, MemoryError) as error:
                self._fail(job, _no_copy(error), spoilt=True)

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
            self._fail(job, _no_copy(error), spoilt=True)
            return
        self.counts.chunks += 1
        self.counts.prompt_tokens += chunk.end - chunk.start
        self._reuse.read(row, job.prompt[: chunk.end], sound=token is None or token >= 0)
        self._scheduler.read(chunk)
        if token is None:
            return
        self._regroup()
        job.first = self._batch.first()
        job.spans = [(row, self._batch.steps)]
        self._take(job, token, partial(self._batch.begin, row))

    def _write_edits(self) -> None:
        for job in list(self._scheduler.decoding):
            try:
                if not job.ended:  # with another sequence of its request
                    self._batch.edits.write(job.row)
            except ParameterError as error:
                self._fail(job, error)

    def _exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._regroup()
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
                self._fail(job, error, spoilt=True)
            else:
                self._batch.clear(row, spoilt=True)
                self._reuse.release(row, NOTHING)

    def _regroup(self) -> None:
        """Make a new group for the next step, because a sequence joins, leaves, moves or must process its token."""
        if self._group is not None:
            self._group.settle()
            self._group = None

    def _step(self) -> None:
        batch, width = self._batch, self._scheduler.width
        if self._group is None:
            self._group = Group(self._scheduler.decoding, width)
        group, jobs = self._group, self._group.jobs
        try:
            batch.wants_logits = group.scored and any(job.generated.wants_logits for job in jobs)
            tokens = batch.step(width)
        except GenerationError as error:
            for job in jobs:
                if not job.ended:  # with another sequence of its request
                    self._fail(job, GenerationError(str(error)), spoilt=True)
            return
        self.counts.steps += 1
        if group.together:
            if not batch.edits.active and group.passes(tokens[:width]):
                batch.accept_all(width)
                self._deliver(zip(jobs, tokens, strict=False), width)
                return
            self._regroup()
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
                self._fail(job, error)
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
            self._fail(job, row.invalid(f"sequence {row.index} of the request"), spoilt=True)
            return
        logits = self._batch.logits(job.row) if row.wants_logits else None
        try:
            if drawn:
                gained = row.take(token, logits)
            else:
                token = row.read(logits)
        except BaseException as error:  # noqa: BLE001  # of the caller's code, or of the logits
            self._fail(job, error, spoilt=isinstance(error, LogitsError))
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
            self._end(job)
            return
        try:
            feed(token)
            if not drawn and not row.unread:
                self._batch.set(job.row, row.request)
            self._allow(job)
        except ParameterError as error:
            self._fail(job, error)

    def _allow(self, job: Job) -> None:
        """Update the mask of the tokens that a sequence's grammar allows next."""
        row = job.generated
        if row.guide is not None and not row.unread:
            self._batch.allowed.set(job.row, row.guide.mask)

    def _start(self, submission: Submission) -> None:
        request = submission.request
        self._alive[request] = submission
        if submission.deadline is not None:
            self._deadlines.add(submission.deadline, request)
        if self._broken:
            self._fail(submission.jobs[0], GenerationError(self._broken))
            return
        for job in submission.jobs:
            self._scheduler.submit(job)
        for job in submission.jobs:
            row = job.generated
            try:
                if row.watch is not None and not job.ended:
                    row.watch.begin()
            except BaseException as error:  # noqa: BLE001  # of the caller's code
                self._fail(job, error)
            if not (job.ended or row.request.budget or row.unread):  # the prompt fills the context
                row.end("length")
                self._end(job)

    def _withdraw(self, submission: Submission) -> None:
        if submission.request in self._alive:
            self._end_early(submission.request, "cancelled")
        else:
            self._room.leave(submission.place)

    def _end_early(self, request: Request | None, reason: str) -> None:
        for submission in list(self._alive.values()) if request is None else [self._alive.get(request)]:
            for job in submission.jobs if submission else ():  # it may have ended
                if not job.ended:
                    self._interrupt(job, reason)

    def _expire(self, now: float) -> None:
        for request in self._deadlines.passed(now):
            self._end_early(request, "timeout")

    def _fail(self, job: Job, error: BaseException, *, spoilt: bool = False) -> None:
        """End all sequences of a request because one of them failed. spoilt: see `Batch.clear`."""
        job.request.fail(error)
        self.counts.failed += 1
        for other in self._alive[job.request].jobs:
            if not other.ended:
                self._interrupt(other, "error", spoilt=spoilt)

    def _interrupt(self, job: Job, reason: str, *, spoilt: bool = False) -> None:
        try:
            held = job.generated.interrupt(reason)
        except BaseException as error:  # noqa: BLE001  # of the tokenizer, perhaps the one that failed the request
            job.request.fail(error)
            held = ""
        if held:
            job.request.put((job.generated.index, held, job.generated.steps))
        self._end(job, spoilt=spoilt)

    def _end(self, job: Job, *, spoilt: bool = False) -> None:
        """Free the row of an ended sequence and hand over its result."""
        drawn, row = self._drawn(job), job.row
        self._regroup()
        if not self._broken:
            self._scheduler.end(job)
            if row != WAITING:
                unchecked = 0 < job.read < job.prompt_tokens
                self._batch.clear(row, spoilt=spoilt, unchecked=unchecked)
                self._reuse.release(row, self._held(job, drawn) if self._reuse.on else None)
        self.counts.ended += 1
        submission = self._alive[job.request]
        if sum(not other.ended for other in submission.jobs) == 1:
            del self._alive[job.request]
            submission.end_streamer()
        self._room.give(submission.place)
        job.ended = True
        self._delivery.add(job.end, drawn)

    def _held(self, job: Job, drawn: Drawn) -> np.ndarray | None:
        """The tokens in the row of an ended sequence; None for the part of its prompt that was read.

        The last drawn token was not read. After an error the row may have read one more token than its results show.
        """
        if job.generated.finish_reason == "error":
            return NOTHING
        return _tokens(job, drawn) if job.decoding else None

    def _running(self, row: int) -> np.ndarray | None:
        """The tokens in a decoding row."""
        job = self._scheduler.at(row)
        return None if job is None or not job.decoding else _tokens(job, self._drawn(job))

    def _drawn(self, job: Job) -> Drawn:
        """A copy of the outputs of a sequence."""
        if self._group is not None:
            self._group.settle()
        if job.first is None:
            return Drawn()
        parts = [job.first]
        ends = [start for _, start in job.spans[1:]] + [self._batch.steps]
        for (row, start), end in zip(job.spans, ends, strict=False):
            parts += self._batch.recorded(row, start, end)
        return Drawn(parts, slice(job.generated.skipped, job.generated.skipped + job.generated.steps))

    def _break(self, error: BaseException) -> None:
        """Fail all requests after an error that none of them caused."""
        why = f"the engine has failed ({type(error).__name__}: {one_line(error)})"
        self._broken = f"{why}; create a new Engine."
        self._room.close(why)
        self._scheduler.clear()
        for submission in list(self._alive.values()):
            alive = [job for job in submission.jobs if not job.ended]
            if alive:
                self._fail(alive[0], GenerationError(self._broken))

    def _retire(self) -> None:
        self._retiring = True


def _no_copy(error: BaseException) -> BaseException:
    """The request's error if copying states before its run fails."""
    if isinstance(error, MemoryError):
        return GenerationError(
            "there is no memory for a copy of the request's states; end requests, or use fewer rows."
        )
    return error


def _tokens(job: Job, drawn: Drawn) -> np.ndarray:
    """The tokens in the row of a decoding sequence: all but the last drawn one, int64 [n]."""
    given = np.array(job.generated.given, np.int64) if job.generated.skipped else job.prompt
    return np.concatenate([given, drawn.array("next_token")])[:-1]


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
