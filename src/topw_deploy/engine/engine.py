"""`Engine`: runs requests of many callers in one session."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from topw_deploy.engine.batch import Batch, no_logits
from topw_deploy.engine.capacity import Capacity, Reservation
from topw_deploy.engine.options import check_form, check_tensorrt, read_options
from topw_deploy.engine.request import Event, PieceReader, Request
from topw_deploy.engine.scheduler import Scheduler
from topw_deploy.engine.seconds import read_max_time, read_timeout
from topw_deploy.engine.sequences import RequestSequence, Submission
from topw_deploy.engine.session_file import SessionInfo, read_session, session_form, write_session
from topw_deploy.engine.stats import EngineStats
from topw_deploy.engine.tasks import EventQueue, LoopWaker, TaskFlag
from topw_deploy.engine.worker import EngineWorker
from topw_deploy.errors import ParameterError, PromptError, QueueFullError, TopWError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.loop import LogitsBuffer, logits_output
from topw_deploy.runtime.parameters import GenerationParameters
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.results import Piece
from topw_deploy.runtime.sequence import end_on_failure
from topw_deploy.text import short_repr


class Engine:
    """Continuous batching: requests of any threads and asyncio tasks share the steps of one model.

    A request gets a row of the cache, with room for its prompt and all its new tokens, until it ends; requests join and
    leave between steps. Each iteration reads at most one chunk of one prompt and runs one step of all decoding rows.

    model: opened with `TopWModel.from_pretrained`. It stays usable.
    max_batch: number of rows, which is the number of sequences that run at once; at most 1024.
    max_length: maximum tokens of a sequence, including its prompt. None: the model's context.
    kv_bytes: maximum size of the cache; lowers `max_batch` if necessary.
    max_queue: maximum number of sequences that wait for a row.
    when_full: what `submit` does if the queue is full: "error" raises QueueFullError, "wait" waits.
    prefill_budget: maximum tokens of a chunk. While a prompt is read, each step of the others takes longer by a chunk.
    reuse_prefixes: whether a prompt starts after the longest beginning that it shares with the sequence of a row,
        running or ended, instead of reading this beginning again. If a state has a fixed size (convolutions,
        recurrences, windows), the beginning must be a whole sequence, or end where states were stored in
        `prefix_bytes`.
    prefix_bytes: maximum host memory for sequences whose rows other sequences took, for states of fixed size at the
        ends of chunks, and for loaded sessions. The least recently used is dropped first. Not used on devices.
    exact: whether a request gets the same bits whatever was reused and whatever runs beside it. If so, the engine
        reuses only whole chunks of prompts, and runs all rows in every step; see docs/guide/engine.md.

    Raises ParameterError for an invalid option, a cache of another form than `static`, or a TensorRT engine that was
    built for fewer rows, and GenerationError if there is no memory for the cache.
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
        session, _ = model._require_open()
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
        spec = logits_output(model.manifest)
        vocab_size = model.manifest.sampler.vocab_size
        new_logits = no_logits if spec is None else partial(LogitsBuffer, spec, vocab=vocab_size)
        self._batch = Batch(session, decoder, options.rows, options.length, new_logits)
        self._scheduler: Scheduler[RequestSequence] = Scheduler(
            options.rows,
            options.chunk,
            decoding_only=decoder.evicts,
            moves_rows=self._batch.copies_rows,
            runs_all_rows=options.exact,
        )
        self._session_form = session_form(model.manifest, options)
        self._capacity = Capacity(options.rows + options.queue)
        self._worker = EngineWorker(self._batch, self._scheduler, self._capacity, decoder, options)
        self.limits = replace(
            model.limits, max_length=options.length, sequences=options.rows + options.queue, opened_as="engine"
        )
        self._shutdown_lock = threading.RLock()  # reentrant: a signal handler may call shutdown during another shutdown
        self._is_stopped = False
        self._waker: LoopWaker | None = None
        self._finalizer = weakref.finalize(self, self._worker.retire)  # running requests still finish

    def submit(
        self,
        prompt: Any = None,
        *,
        max_time: float | None = None,
        reuse_prefix: bool = True,
        **parameters: Unpack[GenerationParameters],
    ) -> Request:
        """Queue a request. Its result is that of `TopWModel.generate` with the same arguments.

        prompt, parameters: those of `TopWModel.generate`. Callbacks run in the engine's thread and must be quick.
        max_time: seconds, including queueing, after which the request ends with what it drew (finish_reason "timeout").
        reuse_prefix: whether its prompts may start after tokens that the engine holds. If not, the prompts are read
            whole; later prompts may still reuse their tokens.

        Raises ParameterError and PromptError at once, QueueFullError if the queue is full, GenerationError after
        `drain` or `shutdown`.
        """
        with end_on_failure(parameters.get("streamer")):
            submission = self._new_submission(prompt, parameters, max_time, reuse_prefix)
            self._model.compile_grammars(submission.request.sequences)
            with self._release_on_error(submission):
                if not self._try_reserve(submission):
                    self._worker.check_caller("submit")
                    settled: SimpleQueue[None] = SimpleQueue()
                    self._capacity.enqueue(submission.reservation, partial(settled.put, None))
                    with contextlib.suppress(Empty):
                        settled.get(timeout=submission.seconds_left)
                    if not self._finish_waiting(submission):
                        return submission.request
                self._worker.start(submission)
        return submission.request

    async def generate(
        self,
        prompt: Any = None,
        *,
        max_time: float | None = None,
        reuse_prefix: bool = True,
        **parameters: Unpack[GenerationParameters],
    ) -> Any:
        """Like `submit(...).result()`, for asyncio. Cancelling the task cancels the request.

        A grammar is compiled in a thread of the loop's executor; everything else runs in the loop's thread.
        """
        ended = TaskFlag(self._loop_waker())
        with end_on_failure(parameters.get("streamer")):
            submission = self._new_submission(prompt, parameters, max_time, reuse_prefix, on_end=ended.set)
            await self._compile_grammars(submission)
            await self._start(submission)
        try:
            await ended.wait()
        finally:
            submission.request.cancel()
        return submission.request.result()

    def stream(
        self,
        prompt: Any = None,
        *,
        max_time: float | None = None,
        reuse_prefix: bool = True,
        **parameters: Unpack[GenerationParameters],
    ) -> AsyncIterator[Piece]:
        """Like iterating over `submit(...)`, for asyncio. Closing the iterator or cancelling the task cancels the
        request.

        Raises what `submit` raises: errors of parameters and prompts at once, others from the first piece. In a task, a
        grammar is compiled like that of `generate`, before the first piece; in a thread without a loop, at once.
        """
        events = EventQueue()
        with end_on_failure(parameters.get("streamer")):
            submission = self._new_submission(prompt, parameters, max_time, reuse_prefix, put=events.put)
            if not _is_in_loop():
                self._model.compile_grammars(submission.request.sequences)
        return self._stream_pieces(submission, events)

    def save_session(self, prompt: Any, path: str | Path, *, add_special_tokens: bool = True) -> SessionInfo:
        """Write the states after a prompt to a file, so that another process can continue from it after `load_session`.

        prompt: a text or token ids; for a chat, the last prompt and the tokens drawn after it. The longest beginning
            that the engine holds is saved.
        path: a file there is replaced atomically.
        add_special_tokens: whether to add the tokenizer's special tokens to a text.

        Requests continue: the engine's thread copies the states, and the caller's thread writes them. Returns the
        number of saved tokens and the file's size.

        Raises GenerationError if the engine holds no beginning of the prompt, or after `shutdown`, PromptError, and
        SessionFileError if the file cannot be written.
        """
        self._check_reuse()
        sequences = self._model.prepare(prompt, limits=self.limits, add_special_tokens=add_special_tokens)
        if len(sequences) > 1:
            raise PromptError(f"there are {len(sequences)} prompts, but a session has one; save them one by one.")
        tokens = np.array(sequences[0].prompt, np.int64)
        count, states = self._worker.save(tokens)
        return write_session(path, self._session_form, tokens[:count], states)

    def load_session(self, path: str | Path) -> SessionInfo:
        """Load a file written by `save_session` of the same export. Prompts that begin with its tokens then reuse them.

        The states count towards `prefix_bytes`; if they are larger, they go into a free row.

        Raises SessionFileError for a file that is damaged, from another export, longer than `max_length`, or, if this
        engine is exact, from an engine with other chunks. Raises GenerationError if there is no room, or after `drain`
        or `shutdown`.
        """
        self._check_reuse()
        self._capacity.check_open()
        self._worker.check_caller("load_session")
        tokens, states, info = read_session(path, self._session_form)
        self._worker.load(tokens, states)
        return info

    def stats(self) -> EngineStats:
        """The engine's state, and its totals so far. Any thread may call this, also after `shutdown`."""
        in_use = self._scheduler.rows_in_use
        return EngineStats(
            rows=self._options.rows,
            in_use=in_use,
            queued=max(0, self._capacity.sequences - in_use),
            cache_bytes=self._batch.bytes,
            run_seconds=self._batch.run_seconds,
            **asdict(self._worker.counters),
        )

    def drain(self, timeout: float | None = None) -> None:
        """Accept no new requests, and wait until all others have ended. Call `shutdown` afterwards to free the memory.

        Raises TimeoutError after `timeout` seconds; the requests continue.
        """
        self._worker.check_caller("drain")
        seconds = read_timeout(timeout)
        self._capacity.close("the engine accepts no more requests")
        if not self._capacity.wait_until_empty(seconds):
            raise TimeoutError(f"requests were still running after {timeout} s; wait again, or call shutdown().")
        with self._shutdown_lock:
            if not self._is_stopped:
                self._worker.wait_for_posted()

    def shutdown(self, *, cancel: bool = True) -> None:
        """Accept no new requests, end all others, and free the cache and the thread. The model stays open.

        cancel: whether to end requests with what they drew so far (finish_reason "cancelled"); otherwise wait for them.
            While one caller waits, another may cancel.

        Does nothing in a fork of the engine's process. A signal handler that interrupts `submit` and calls `shutdown`
        would deadlock; let it raise an exception or set an event instead.
        """
        if self._worker.is_forked:
            return
        self._worker.check_caller("shutdown")
        self._capacity.close("the engine is shut down")
        if cancel and not self._is_stopped:
            self._worker.end_early(None, "cancelled")
            while not self._capacity.wait_until_empty(
                0.1
            ):  # a caller may be between `_try_reserve` and `EngineWorker.start`
                self._worker.end_early(None, "cancelled")
        self._capacity.wait_until_empty(None)
        with self._shutdown_lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._worker.retire()
                self._worker.join()
                self._finalizer.detach()  # it refers to the worker and so to all that the worker holds

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all requests, or cancel them if the block failed."""
        self.shutdown(cancel=error is not None)

    def _new_submission(
        self,
        prompt: Any,
        parameters: Mapping[str, Any],
        max_time: float | None,
        reuse_prefix: bool = True,
        *,
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Submission:
        """Check the arguments of a call, and make its request. Reserves no capacity. put, on_end: see `Request`.

        Raises ParameterError and PromptError, and GenerationError if the engine is closed or in another process.
        """
        started = time.perf_counter()
        worker = self._worker
        worker.check_process("submit")
        seconds = read_max_time(max_time)
        if not isinstance(reuse_prefix, bool):
            raise ParameterError(
                f"reuse_prefix is {short_repr(reuse_prefix)}, but must be True or False.", "reuse_prefix"
            )
        self._capacity.check_open()
        prepared: Sequences = self._model.prepare(prompt, limits=self.limits, **parameters)
        request = Request(
            prepared,
            self._session,
            self._model.load_seconds,
            cancel=partial(worker.end_early, reason="cancelled"),
            put=put,
            on_end=on_end,
            check_caller=worker.check_caller,
            deliver=worker.deliver,
            started=started,
        )
        sequences = [RequestSequence(request, each, reuse_prefix) for each in prepared]
        deadline = None if seconds is None else started + seconds
        return Submission(request, sequences, Reservation(len(sequences)), deadline, prepared.streamer)

    async def _compile_grammars(self, submission: Submission) -> None:
        """Compile the grammars of a request in a thread of the loop's executor. Does nothing if they are compiled.

        If the task is cancelled, the thread continues; its result is dropped and holds no engine resources.
        """
        sequences = submission.request.sequences
        if any(each.guide is None and each.params.constraint is not None for each in sequences):
            await asyncio.to_thread(self._model.compile_grammars, sequences)

    def _check_reuse(self) -> None:
        if not self._options.reuses_prefixes:
            raise ParameterError(
                "sessions need the reuse of prefixes, but reuse_prefixes is False; create the engine with True.",
                "reuse_prefixes",
            )

    @contextlib.contextmanager
    def _release_on_error(self, submission: Submission) -> Iterator[None]:
        """Release the reservation if the block fails, also by a KeyboardInterrupt at any moment."""
        try:
            yield
        except TopWError:  # only raised before `EngineWorker.start`
            self._capacity.release(submission.reservation)
            raise
        except BaseException:
            self._worker.withdraw(submission)
            raise

    def _try_reserve(self, submission: Submission) -> bool:
        """Reserve capacity for a request. Returns False if the request must wait for capacity.

        Raises QueueFullError if the queue is full and requests do not wait.
        """
        if self._capacity.try_reserve(submission.reservation):
            return True
        if not self._options.waits_if_full:
            raise QueueFullError(
                f"the engine has {self._capacity.sequences} sequences, but room for only "
                f"{self._capacity.max_sequences}; try again later, or create it with a higher max_queue or "
                "when_full='wait'.",
                "max_queue",
                "when_full",
            )
        return False

    def _finish_waiting(self, submission: Submission) -> bool:
        """Check the result of waiting for capacity. Returns False if the deadline passed first; the request has then
        ended.

        Raises GenerationError if the engine was closed meanwhile.
        """
        if self._capacity.is_granted(submission.reservation):
            return True
        self._capacity.release(submission.reservation)
        self._capacity.check_open()
        submission.abandon("timeout")
        return False

    async def _start(self, submission: Submission) -> None:
        """Start a request, or wait until there is capacity for it, like `submit`."""
        with self._release_on_error(submission):
            if not self._try_reserve(submission):
                release = partial(self._capacity.release, submission.reservation)
                flag = TaskFlag(self._loop_waker(), on_loop_closed=release)
                self._capacity.enqueue(submission.reservation, flag.set)
                seconds_left = submission.seconds_left
                # Not wait_for, which before Python 3.12 loses a cancellation that coincides with the result.
                timer = None
                if seconds_left is not None:
                    timer = asyncio.get_running_loop().call_later(seconds_left, flag.event.set)
                try:
                    await flag.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
                if not self._finish_waiting(submission):
                    return
            self._worker.start(submission)

    async def _stream_pieces(self, submission: Submission, events: EventQueue) -> AsyncIterator[Piece]:
        """The pieces of `stream`."""
        request = submission.request
        with end_on_failure(submission.streamer):
            await self._compile_grammars(submission)
            listener = events.listen(self._loop_waker(), request.cancel)
            await self._start(submission)
        reader = PieceReader(request)
        try:
            while (event := await listener.get()) is not None:
                piece = reader.piece(event)
                if piece is not None:
                    yield piece
        finally:
            request.cancel()
        request.raise_error()

    def _loop_waker(self) -> LoopWaker:
        """The waker of the running loop, which all its tasks share."""
        waker = self._waker
        if waker is None or waker.loop is not asyncio.get_running_loop():
            waker = self._waker = LoopWaker()
        return waker


def _is_in_loop() -> bool:
    """Whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
