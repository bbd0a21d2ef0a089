"""`Engine`: requests of many callers over one session."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.job import Job, Submission
from topw_deploy.engine.options import check_form, check_tensorrt, read_options
from topw_deploy.engine.request import Event, PieceReader, Request, Source
from topw_deploy.engine.room import Place, Room
from topw_deploy.engine.scheduler import Scheduler
from topw_deploy.engine.seconds import read_max_time, read_timeout
from topw_deploy.engine.session_file import SessionInfo, read_session, session_form, write_session
from topw_deploy.engine.tasks import Bell, Events, Signal
from topw_deploy.engine.worker import Worker
from topw_deploy.errors import ParameterError, PromptError, QueueFullError, TopWError
from topw_deploy.runtime.callbacks import Watch, ending
from topw_deploy.runtime.logprobs import new_scores
from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.request import Limits, RowRequest
from topw_deploy.runtime.results import Piece
from topw_deploy.runtime.rows import Row, new_text


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine does and did, in sequences.

    rows, in_use, queued: rows of the cache, rows in use, accepted sequences without a row.
    steps, chunks: runs that drew a token per row, and runs that read a part of a prompt.
    prompt_tokens, cached_tokens: tokens of prompts that were read, and that were reused instead.
    new_tokens: tokens drawn.
    ended, failed: sequences that ended in any way, and requests that failed.
    cache_bytes: size of the cache.
    busy_seconds, run_seconds: time in iterations, and of that in runs of the session; the rest is overhead.
    """

    rows: int
    in_use: int
    queued: int
    steps: int
    chunks: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ended: int
    failed: int
    cache_bytes: int
    busy_seconds: float
    run_seconds: float


class Engine:
    """Continuous batching: requests of any threads and asyncio tasks share the steps of one model.

    A request gets a row of the cache, with room for its prompt and all its new tokens, until it ends; requests join and
    leave between steps. Each iteration reads at most one chunk of one prompt and runs one step of all decoding rows.

    model: opened with `TopWModel.from_pretrained`. It stays usable.
    max_batch: rows, that is sequences that run at once; at most 1024.
    max_length: maximum tokens of a sequence, with its prompt. None: the model's context.
    kv_bytes: maximum size of the cache; lowers `max_batch` if necessary.
    max_queue: maximum sequences that wait for a row.
    when_full: what `submit` does then: "error" raises QueueFullError, "wait" waits for its turn.
    prefill_budget: maximum tokens of a chunk. While a prompt is read, a step of the others takes longer by one chunk.
    reuse_prefixes: start a prompt behind the longest beginning that it shares with the sequence of a row, running or
        ended. Where a state has a fixed size (convolutions, recurrences, windows), behind a whole sequence, or a point
        for which `prefix_bytes` has room.
    prefix_bytes: maximum host memory for sequences whose rows were taken by others, for states of fixed size at the
        ends of chunks, and for loaded sessions; what was used longest ago goes first. Not on devices.
    exact: reuse whole chunks of prompts only, so that reuse changes no bit of a prompt's states and first token; see
        docs/guide/engine.md.

    Raises ParameterError for an invalid option or a cache of another form than `static`, EngineError for a TensorRT
    engine that is too small, GenerationError if there is no memory for the cache.
    """

    def __init__(
        self,
        model: TopWModel,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        kv_bytes: int | None = None,
        max_queue: int = 256,
        when_full: str = "error",
        prefill_budget: int = 256,
        reuse_prefixes: bool = True,
        prefix_bytes: int = 0,
        exact: bool = False,
    ) -> None:
        session, _ = model._opened()
        decoder = model.manifest.decoder
        check_form(decoder, model.path)
        options = read_options(
            decoder,
            session.most_columns,
            max_batch=max_batch,
            max_length=max_length,
            kv_bytes=kv_bytes,
            max_queue=max_queue,
            when_full=when_full,
            prefill_budget=prefill_budget,
            reuse_prefixes=reuse_prefixes,
            prefix_bytes=prefix_bytes,
            exact=exact,
        )
        check_tensorrt(session, decoder, options)
        self._model, self._session, self._options = model, session, options
        self._limits = Limits(
            decoder.context_length,
            model.manifest.sampler.vocab_size,
            options.length,
            options.rows + options.queue,
            opened="engine",
        )
        self._batch = Batch(session, decoder, options.rows, options.length, model._new_logits)
        self._scheduler: Scheduler[Job] = Scheduler(
            options.rows, options.chunk, dense=decoder.evicts, moves=self._batch.copies_rows
        )
        self._form = session_form(model.manifest, options)
        self._room = Room(options.rows + options.queue)
        self._worker = Worker(self._batch, self._scheduler, self._room, decoder, options)
        self._shutting = threading.RLock()  # a signal handler may call shutdown during another
        self._stopped = False
        self._bell: Bell | None = None
        self._forgotten = weakref.finalize(self, self._worker.retire)  # which finishes its requests

    def submit(self, prompt: Any = None, *, max_time: float | None = None, **parameters: Any) -> Request:
        """Queue a request. Its result is that of `TopWModel.generate` with the same arguments.

        prompt, parameters: those of `TopWModel.generate`. Callbacks run in the engine's thread and must be quick.
        max_time: seconds, with queueing, after which it ends with what it drew (finish_reason "timeout").

        Raises ParameterError and PromptError at once, QueueFullError if the queue is full, GenerationError after
        `drain` or `shutdown`.
        """
        with ending(parameters.get("streamer")):
            submission = self._prepare(prompt, parameters, max_time)
            with self._accepting(submission):
                if not self._takes(submission):
                    self._worker.check_caller("submit")
                    settled: SimpleQueue[None] = SimpleQueue()
                    self._room.wait(submission.place, partial(settled.put, None))
                    with contextlib.suppress(Empty):
                        settled.get(timeout=submission.left)
                    if not self._has_turn(submission):
                        return submission.request
                self._worker.start(submission)
        return submission.request

    async def generate(self, prompt: Any = None, *, max_time: float | None = None, **parameters: Any) -> Any:
        """Like `submit(...).result()`, for asyncio. Cancelling the task cancels the request.

        A grammar is compiled in a thread of the loop's executor, everything else in the loop's.
        """
        ended = Signal(self._running_bell())
        with ending(parameters.get("streamer")):
            prepare = partial(self._prepare, prompt, parameters, max_time, on_end=ended.send)
            compiles = not {"structured_outputs", "response_format"}.isdisjoint(parameters)
            submission = await asyncio.to_thread(prepare) if compiles else prepare()
            await self._start(submission)
        try:
            await ended.wait()
        finally:
            submission.request.cancel()
        return submission.request.result()

    def stream(self, prompt: Any = None, *, max_time: float | None = None, **parameters: Any) -> AsyncIterator[Piece]:
        """Like iterating over `submit(...)`, for asyncio. Closing the iterator or cancelling the task cancels the
        request. Checks parameters immediately, and compiles a grammar in the caller's thread.
        """
        with ending(parameters.get("streamer")):
            holder: list[Request] = []
            events = Events(gone=lambda: holder[0].cancel())
            submission = self._prepare(prompt, parameters, max_time, put=events.put)
            holder.append(submission.request)
        return self._pieces(submission, events)

    def save_session(self, prompt: Any, path: str | Path, *, add_special_tokens: bool = True) -> SessionInfo:
        """Write the states after a prompt to a file, so that `load_session` can go on behind it in another process.

        prompt: a text or token ids; for a chat, the last prompt and the tokens drawn after it. What the engine holds of
            its beginning is saved.
        path: a file there is replaced atomically.
        add_special_tokens: to a text.

        Requests go on; the engine's thread makes a copy of the states, and the caller's writes it. Returns the number
        of tokens saved and the file's size. Raises GenerationError if no beginning is held, or after `shutdown`,
        PromptError, and SessionFileError if the file cannot be written.
        """
        self._check_reuse()
        rows, _, _ = self._model._requests(prompt, {"add_special_tokens": add_special_tokens}, self._limits)
        if len(rows) > 1:
            raise PromptError(f"there are {len(rows)} prompts, but a session is of one; save them one by one.")
        tokens = np.array(rows[0].prompt, np.int64)
        count, states = self._worker.save(tokens)
        return write_session(path, self._form, tokens[:count], states)

    def load_session(self, path: str | Path) -> SessionInfo:
        """Read a file by `save_session` of the same export, so that prompts which begin with its tokens go on behind
        them.

        The states count towards `prefix_bytes`; if they are larger, they go into a free row.

        Raises SessionFileError for a file that is damaged, of another export, longer than `max_length`, or by an engine
        of other chunks if this one is exact; GenerationError if there is no room, or after `drain` or `shutdown`.
        """
        self._check_reuse()
        self._room.check()
        self._worker.check_caller("load_session")
        tokens, states, info = read_session(path, self._form)
        self._worker.load(tokens, states)
        return info

    def stats(self) -> EngineStats:
        used = self._scheduler.used
        return EngineStats(
            rows=self._options.rows,
            in_use=used,
            queued=max(0, self._room.used - used),
            cache_bytes=self._batch.bytes,
            run_seconds=self._batch.run_seconds,
            **asdict(self._worker.counts),
        )

    def drain(self, timeout: float | None = None) -> None:
        """Accept nothing new, and wait until all requests have ended. `shutdown` then frees the memory.

        Raises TimeoutError after `timeout` seconds; the requests go on.
        """
        self._worker.check_caller("drain")
        seconds = read_timeout(timeout)
        self._room.close("the engine accepts no more requests")
        if not self._room.wait_until_empty(seconds):
            raise TimeoutError(f"requests were still running after {timeout} s; wait again, or call shutdown().")
        with self._shutting:
            if not self._stopped:
                self._worker.pass_by()

    def shutdown(self, *, cancel: bool = True) -> None:
        """Accept nothing new, end all requests, and free the cache and the thread. The model stays open.

        cancel: end them with what they drew so far (finish_reason "cancelled"); otherwise wait for them. While one
            caller waits, another may cancel.

        Does nothing in a fork of the engine's process.
        """
        if self._worker.forked:
            return
        self._worker.check_caller("shutdown")
        self._room.close("the engine is shut down")
        if cancel and not self._stopped:
            self._worker.end_early(None, "cancelled")
            while not self._room.wait_until_empty(0.1):  # callers between `enter` and `start`
                self._worker.end_early(None, "cancelled")
        self._room.wait_until_empty(None)
        with self._shutting:
            if not self._stopped:
                self._stopped = True
                self._worker.retire()
                self._worker.join()
                self._forgotten.detach()  # it keeps the worker, and what that refers to

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all requests, or cancel them if the block failed."""
        self.shutdown(cancel=error is not None)

    def _check_reuse(self) -> None:
        if not self._options.reuses:
            raise ParameterError(
                "sessions need the reuse of prefixes, but reuse_prefixes is False; make the engine with True.",
                "reuse_prefixes",
            )

    def _prepare(
        self,
        prompt: Any,
        parameters: Mapping[str, Any],
        max_time: float | None,
        *,
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Submission:
        self._worker.check_process("submit")
        seconds = read_max_time(max_time)
        self._room.check()
        rows, whole, alone = self._model._requests(prompt, parameters, self._limits)
        tokenizer, guides = self._model.tokenizer, self._model._guides(rows)

        def follow(ids: Sequence[int]) -> Any:
            return tokenizer.follow(ids, whole["skip_special_tokens"])

        def new_row(index: int, row: RowRequest) -> Row:
            watched = whole["streamer"] is not None or bool(whole["stopping_criteria"])
            watch = Watch(row.prompt, row.budget, whole["streamer"], whole["stopping_criteria"]) if watched else None
            text = new_text(row, follow) if row.stop_strings else None
            return Row(index, row, text, watch, new_scores(row, tokenizer.text_of), guides[index])

        generated = [new_row(index, row) for index, row in enumerate(rows)]
        source = Source(self._session, follow, self._model.load_seconds)
        cancel = partial(self._worker.end_early, reason="cancelled")
        worker = self._worker
        request = Request(generated, alone, source, cancel, put, on_end, worker.check_caller, worker.deliver)
        deadline = None if seconds is None else request.started + seconds
        jobs = [Job(request, row) for row in generated]
        return Submission(request, jobs, Place(len(jobs)), deadline, whole["streamer"])

    @contextlib.contextmanager
    def _accepting(self, submission: Submission) -> Iterator[None]:
        """Give room back if the block fails, be it by KeyboardInterrupt at any moment."""
        try:
            yield
        except TopWError:  # before `start`
            self._room.leave(submission.place)
            raise
        except BaseException:
            self._worker.withdraw(submission)
            raise

    def _takes(self, submission: Submission) -> bool:
        """Take room for a request. False: wait for it."""
        if self._room.enter(submission.place):
            return True
        if not self._options.waits:
            raise QueueFullError(
                f"the engine has {self._room.used} sequences, and room for {self._room.most}; try again later, or make "
                "it with a higher max_queue or when_full='wait'.",
                "max_queue",
                "when_full",
            )
        return False

    def _has_turn(self, submission: Submission) -> bool:
        """After waiting for room. False: the deadline has passed. Raises GenerationError if closed meanwhile."""
        if self._room.holds(submission.place):
            return True
        self._room.leave(submission.place)
        self._room.check()
        submission.abandon("timeout")
        return False

    async def _start(self, submission: Submission) -> None:
        with self._accepting(submission):
            if not self._takes(submission):
                signal = Signal(self._running_bell(), gone=partial(self._room.leave, submission.place))
                self._room.wait(submission.place, signal.send)
                left = submission.left
                # Not wait_for, which before Python 3.12 loses a cancellation at the moment of the turn.
                timer = None if left is None else asyncio.get_running_loop().call_later(left, signal.event.set)
                try:
                    await signal.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
                if not self._has_turn(submission):
                    return
            self._worker.start(submission)

    async def _pieces(self, submission: Submission, events: Events) -> AsyncIterator[Piece]:
        request = submission.request
        events.listen(self._running_bell())
        with ending(submission.streamer):
            await self._start(submission)
        reader = PieceReader(request)
        try:
            while (event := await events.get()) is not None:
                piece = reader.piece(event)
                if piece is not None:
                    yield piece
        finally:
            request.cancel()
        request.raise_error()

    def _running_bell(self) -> Bell:
        """The running loop's."""
        bell = self._bell
        if bell is None or bell.loop is not asyncio.get_running_loop():
            bell = self._bell = Bell()
        return bell
