"""`Engine`: runs requests of many callers in one session."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np

from topw_deploy.engine.batch import Batch, slot_bytes
from topw_deploy.engine.prefixes import Prefixes
from topw_deploy.engine.request import EngineSequence, Event, Request
from topw_deploy.engine.scheduler import Scheduler
from topw_deploy.engine.session_file import SessionInfo, read_session, session_form, write_session
from topw_deploy.engine.waiting import Capacity, LoopWaker, read_max_time, read_timeout
from topw_deploy.engine.worker import EngineStats, EngineWorker
from topw_deploy.errors import GenerationError, ParameterError, PromptError, QueueFullError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.cache.buffers import ALIGNMENT
from topw_deploy.runtime.loop import LogitsBuffer, logits_output
from topw_deploy.runtime.parameters import GenerationParameters, flag, integer
from topw_deploy.runtime.prepare import Sequences, check_size
from topw_deploy.runtime.results import Logits, Piece, Scores
from topw_deploy.runtime.sequence import end_on_failure
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.speculate import RunCosts, draws_several
from topw_deploy.sampling.parameters import check_choice
from topw_deploy.text import decimal_size

Result = TypeVar("Result")

MOST_SLOTS = 1024
"""Maximum slots: the engine compares each prompt with the tokens of every slot, and keeps random numbers for all."""
_REMEDIES = {
    "concat": "export it again without --kv concat, or use TopWModel.generate",
    "shared": "export the original checkpoint with topw-export, or use TopWModel.generate",
}


def sequence_length(path: Path, decoder: DecoderInfo, max_length: int | None) -> int:
    """The most tokens that a sequence may have in an engine that serves the folder `path`.

    max_length: the limit that the caller gave; None for the model's context.

    Raises ParameterError for a decoder that an engine cannot run, and for a value that the model's context cannot hold.
    """
    if decoder.kv_form != "static":
        raise ParameterError(
            f"batching needs a static cache, but that of {path} is {decoder.kv_form}; "
            f"{_REMEDIES.get(decoder.kv_form, 'use TopWModel.generate')}."
        )
    context = decoder.context_length
    return check_size("max_length", max_length, context, f"the model's context holds {context}") or context


class EngineParameters(GenerationParameters, total=False):
    """The parameters of `Engine.submit`, `generate` and `stream`.

    max_time: seconds, including queueing, after which the request ends with what it drew (finish_reason "timeout").
    reuse_prefix: whether its prompts may start after tokens that the engine holds. If not, the prompts are read whole;
        later prompts may still reuse their tokens.
    """

    max_time: float | None
    reuse_prefix: bool


class Engine:
    """Continuous batching: requests of any threads and asyncio tasks share the steps of one model.

    A request gets a slot of the cache, with room for its prompt and all its new tokens, until it ends; requests join
    and leave between steps. Each iteration reads at most one chunk of one prompt and runs one step of all decoding
    slots.

    model: opened with `TopWModel.from_pretrained`. It stays usable.
    max_batch: number of slots, which is the number of sequences that run at once; at most 1024.
    max_length: maximum tokens of a sequence, including its prompt. None: the model's context.
    kv_bytes: maximum size of the cache; lowers `max_batch` if necessary.
    max_queue: maximum number of sequences that wait for a slot.
    when_full: what `submit` does if the queue is full: "error" raises QueueFullError, "wait" waits.
    prefill_budget: maximum tokens of a chunk. While a prompt is read, each step of the others takes longer by a chunk.
    reuse_prefixes: whether a prompt starts after the longest beginning that it shares with the sequence of a slot,
        running or ended, instead of reading this beginning again. If a state has a fixed size (convolutions,
        recurrences, windows), the beginning must be a whole sequence, or end where states were stored in
        `prefix_bytes`.
    prefix_bytes: maximum host memory for sequences whose slots other sequences took, for states of fixed size at the
        ends of chunks, and for loaded sessions. The least recently used is dropped first. Not used on devices.
    exact: whether a request gets the same bits whatever was reused and whatever runs beside it. If so, the engine
        reuses only whole chunks of prompts, and runs all slots in every step; see docs/guide/engine.md.

    Raises ParameterError for an invalid option, a cache of another form than `static`, or a TensorRT engine that was
    built for fewer slots, and GenerationError if there is no memory for the cache.
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
        length = sequence_length(model.path, decoder, max_length)
        slots = _read_slots(max_batch, kv_bytes, decoder, length)
        queue, prefix_bytes = integer(0)("max_queue", max_queue), integer(0)("prefix_bytes", prefix_bytes)
        chunk = integer(1)("prefill_budget", prefill_budget)
        chunk = min(chunk, session.most_columns or chunk, decoder.most_columns or chunk)
        check_choice("when_full", when_full, ("error", "wait"))
        flag("reuse_prefixes", reuse_prefixes)
        flag("exact", exact)
        _check_tensorrt(session, decoder, slots, length)

        self._model, self._session, self._slots = model, session, slots
        self._waits_if_full = when_full == "wait"
        self._session_form = session_form(model.manifest, length, chunk if exact else 0)
        spec = logits_output(model.manifest)
        vocab_size = model.manifest.sampler.vocab_size
        new_logits = None if spec is None else partial(LogitsBuffer, spec, vocab=vocab_size)
        self._batch = Batch(session, decoder, slots, length, new_logits)
        # onnxruntime's attention rounds a run of one token differently from longer runs, so a prompt's last two tokens
        # are read in one run. States of fixed size, which must absorb each token once, allow no second reading.
        self._read_anyway = 1 if decoder.recurs or session.attends_alone else 2
        self._scheduler: Scheduler[EngineSequence] = Scheduler(
            slots,
            chunk,
            last_chunk=self._read_anyway,
            decoding_only=decoder.evicts,
            moves_slots=self._batch.copies_slots,
            runs_all_slots=exact,
        )
        self._prefixes = Prefixes(
            self._batch, decoder, slots, chunk, is_enabled=reuse_prefixes, max_bytes=prefix_bytes, exact=exact
        )
        self._capacity = Capacity(slots + queue)
        costs = None if exact or not draws_several(model.manifest) else RunCosts()
        self._worker = EngineWorker(
            self._batch, self._scheduler, self._prefixes, self._capacity, costs, model.draft_model
        )
        self.limits = replace(model.limits, max_length=length, sequences=slots + queue, opened_as="engine")
        self._shutdown_lock = threading.Lock()
        self._is_stopped = False
        self._waker: LoopWaker | None = None
        self._finalizer = weakref.finalize(self, self._worker.retire)  # running requests still finish

    def submit(self, prompt: Any = None, **parameters: Unpack[EngineParameters]) -> Request:
        """Queue a request. Its result is that of `TopWModel.generate` with the same arguments.

        prompt, parameters: those of `TopWModel.generate`, or what `TopWModel.prepare` returned with the engine's
            `limits`, without parameters. Callbacks run in the engine's thread and must be quick. For `max_time` and
            `reuse_prefix` see EngineParameters.

        Raises ParameterError and PromptError at once, QueueFullError if the queue is full, GenerationError after
        `drain` or `shutdown`.
        """
        with end_on_failure(parameters.get("streamer")):
            request = self._new_request(prompt, parameters)
            self._model.compile_grammars(request.sequences)
            place = self._reserve(request)
            if not place.done():
                try:
                    self._worker.check_caller("submit")
                    place.exception(request.seconds_left)
                except TimeoutError:
                    pass
                except BaseException:
                    self._abandon(request, place)
                    raise
            self._start(request, place)
        return request

    async def generate(self, prompt: Any = None, **parameters: Unpack[EngineParameters]) -> Any:
        """Like `submit(...).result()`, for asyncio. Cancelling the task cancels the request.

        A grammar is compiled in a thread of the loop's executor; everything else runs in the loop's thread.
        """
        with end_on_failure(parameters.get("streamer")):
            request = self._new_request(prompt, parameters)
            ended = await self._start_in_loop(request)
        return await self._result_in_loop(request, ended)

    def stream(self, prompt: Any = None, **parameters: Unpack[EngineParameters]) -> AsyncIterator[Piece]:
        """Like iterating over `submit(...)`, for asyncio. Closing the iterator or cancelling the task cancels the
        request.

        Raises what `submit` raises: errors of parameters and prompts at once, others from the first piece. In a task, a
        grammar is compiled like that of `generate`, before the first piece; in a thread without a loop, at once.
        """
        with end_on_failure(parameters.get("streamer")):
            request = self._new_request(prompt, parameters)
            try:
                asyncio.get_running_loop()
            except RuntimeError:  # there is none
                self._model.compile_grammars(request.sequences)
        return self._stream_pieces(request)

    async def logits_after(self, tokens: Sequence[int], max_time: float | None = None) -> Logits:
        """Returns the logits after `tokens`, before edits and masks: float32 [V].

        Submits a request for one token, which queues like any other and reads only tokens that the engine does not
        hold, usually one. Cancelling the task cancels the request.

        max_time: seconds, including queueing.

        Raises ParameterError for an export without logits, and LogitsError for NaN or +infinity. Raises PromptError if
        `tokens` is empty, has an unknown token, or fills the context. Raises QueueFullError if the queue is full, and
        GenerationError if the engine is shut down or `max_time` is over first.
        """
        one_token = {"max_new_tokens": 1, "temperature": 0.0, "seed": 0, "logprobs": 0, "max_time": max_time}
        request = self._new_request(list(tokens), one_token)
        request.read_anyway = 1  # as in the step
        first = request.sequences[0].scores = _FirstLogits(0, None, str)
        reason = (await self._result_in_loop(request, await self._start_in_loop(request))).finish_reason
        if first.logits is not None:
            return first.logits
        if reason == "length":
            raise PromptError(f"{len(tokens)} tokens fill the context, so none can follow; give fewer.", "max_length")
        raise GenerationError(f"the step's logits were not computed: the request ended as {reason!r}; send it again.")

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
        self._check_reuse("save_session")
        sequences = self._model.prepare(prompt, limits=self.limits, add_special_tokens=add_special_tokens)
        if len(sequences) > 1:
            raise PromptError(f"there are {len(sequences)} prompts, but a session has one; save them one by one.")
        tokens = np.array(sequences[0].prompt, np.int64)
        count, states = self._call(partial(self._prefixes.longest_states, tokens))
        return write_session(path, self._session_form, tokens[:count], states)

    def load_session(self, path: str | Path) -> SessionInfo:
        """Load a file written by `save_session` of the same export. Prompts that begin with its tokens then reuse them.

        The states count towards `prefix_bytes`; if they are larger, they go into a free slot.

        Raises SessionFileError for a file that is damaged, from another export, longer than `max_length`, or, if this
        engine is exact, from an engine with other chunks. Raises GenerationError if there is no room, or after `drain`
        or `shutdown`.
        """
        self._check_reuse("load_session")
        self._capacity.check_open()
        tokens, states, info = read_session(path, self._session_form)
        self._call(lambda: self._prefixes.load(tokens, states, self._scheduler.free_slots))
        return info

    def stats(self) -> EngineStats:
        """The engine's state, and its totals so far. Any thread may call this, also after `shutdown`."""
        in_use = self._scheduler.slots_in_use
        return replace(
            self._worker.stats,
            slots=self._slots,
            in_use=in_use,
            queued=max(0, self._capacity.sequences - in_use),
            cache_bytes=self._batch.bytes,
            run_seconds=self._batch.run_seconds,
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

        Does nothing in a fork of the engine's process. Signal handlers must not call it; let them raise an exception or
        set an event instead.
        """
        if self._worker.is_forked:
            return
        self._worker.check_caller("shutdown")
        self._capacity.close("the engine is shut down")
        if cancel and not self._is_stopped:
            self._worker.end_early(None, "cancelled")
            while not self._capacity.wait_until_empty(0.1):  # a caller may be between `_reserve` and `_start`
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

    def _new_request(self, prompt: Any, parameters: Mapping[str, Any]) -> Request:
        """Check the arguments of a call, and make its request. Reserves no capacity.

        Raises ParameterError and PromptError, and GenerationError if the engine is closed or in another process.
        """
        started = time.perf_counter()
        self._worker.check_caller("submit", waits=False)
        parameters = dict(parameters)
        seconds = read_max_time(parameters.pop("max_time", None))
        reuse_prefix = flag("reuse_prefix", parameters.pop("reuse_prefix", True))
        self._capacity.check_open()
        sequences = prompt
        if not isinstance(prompt, Sequences):
            sequences = self._model.prepare(prompt, limits=self.limits, **parameters)
        return Request(
            sequences,
            partial(self._worker.end_early, reason="cancelled"),
            self._worker.check_caller,
            self._session,
            self._model.load_seconds,
            started=started,
            deadline=None if seconds is None else started + seconds,
            read_anyway=self._read_anyway if reuse_prefix else None,
        )

    def _reserve(self, request: Request) -> Future[None]:
        """Reserve capacity for a request. The future is done when there is room.

        Raises QueueFullError if the queue is full and requests do not wait.
        """
        place = self._capacity.reserve(len(request.sequences))
        if not self._waits_if_full and self._capacity.give_up(place):
            raise QueueFullError(
                f"the engine has {self._capacity.sequences} sequences, but room for only "
                f"{self._capacity.max_sequences}; try again later, or create it with a higher max_queue or "
                "when_full='wait'.",
                "max_queue",
                "when_full",
            )
        return place

    def _start(self, request: Request, place: Future[None]) -> None:
        """Start a request after it waited for its place; end it if its time is over.

        Raises GenerationError if the engine was closed meanwhile.
        """
        if self._capacity.give_up(place):
            request.end_unstarted("timeout")
            return
        place.result()
        self._worker.start(request)

    def _abandon(self, request: Request, place: Future[None]) -> None:
        """Release the place of a request whose caller stopped waiting."""
        if not self._capacity.give_up(place) and place.exception() is None:
            self._capacity.release(len(request.sequences))

    async def _start_in_loop(self, request: Request) -> asyncio.Event:
        """Start a request like `submit`. Returns an event that is set at its end.

        Grammars that are not compiled yet are compiled in a thread. If the task is cancelled meanwhile, that thread
        continues; its result is dropped.
        """
        if any(each.guide is None and each.params.constraint is not None for each in request.sequences):
            await asyncio.to_thread(self._model.compile_grammars, request.sequences)
        ended = asyncio.Event()
        request.on_end = partial(self._loop_waker().call, ended.set)
        place = self._reserve(request)
        if not place.done():
            loop, waiting = asyncio.get_running_loop(), asyncio.wrap_future(place)
            place.add_done_callback(lambda done: self._abandon(request, done) if loop.is_closed() else None)
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs the error
            try:
                # Not wait_for, which before Python 3.12 loses a cancellation that coincides with the result.
                await asyncio.wait([waiting], timeout=request.seconds_left)
            except BaseException:
                self._abandon(request, place)
                raise
        self._start(request, place)
        return ended

    async def _result_in_loop(self, request: Request, ended: asyncio.Event) -> Any:
        """Wait for a request's result. Cancelling the task cancels the request."""
        try:
            await ended.wait()
        finally:
            request.cancel()
        return request.result()

    async def _stream_pieces(self, request: Request) -> AsyncIterator[Piece]:
        """The pieces of `stream`."""
        waker, events = self._loop_waker(), asyncio.Queue[Event]()

        def put(event: Event) -> None:
            if not waker.call(events.put_nowait, event):  # the loop was closed
                self._worker.end_early(request, "cancelled")

        request.put_event = put
        with end_on_failure(request.sequences.streamer):
            await self._start_in_loop(request)
        try:
            while (event := await events.get()) is not None:
                piece = request.read_piece(event)
                if piece is not None:
                    yield piece
        finally:
            request.cancel()
        request.raise_error()

    def _check_reuse(self, method: str) -> None:
        self._worker.check_caller(method)
        if not self._prefixes.is_enabled:
            raise ParameterError(
                "sessions need the reuse of prefixes, but reuse_prefixes is False; create the engine with True.",
                "reuse_prefixes",
            )

    def _call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the engine's thread. Raises GenerationError after `shutdown`."""
        with self._shutdown_lock:
            if self._is_stopped:
                raise GenerationError("the engine is shut down; create a new Engine.")
            called = self._worker.call(function)
        return called.result()

    def _loop_waker(self) -> LoopWaker:
        """The waker of the running loop, which all its tasks share."""
        waker = self._waker
        if waker is None or waker.loop is not asyncio.get_running_loop():
            waker = self._waker = LoopWaker(self._worker.delivery.call_last)
        return waker


class _FirstLogits(Scores):
    """Keeps the logits of a sequence's first drawn token, instead of computing log-probabilities.

    logits: float32 [V]; None until the token is drawn.
    """

    logits: Logits | None = None

    def add(self, logits: np.ndarray, token: int) -> None:
        self.logits = np.array(logits, np.float32)


def _read_slots(max_batch: int, kv_bytes: int | None, decoder: DecoderInfo, length: int) -> int:
    """Returns the number of slots. Raises ParameterError if `kv_bytes` has no room for one, or there are too many."""
    slots = max_batch = integer(1)("max_batch", max_batch)
    if kv_bytes is not None:
        bytes_per_slot = slot_bytes(decoder, max(length, decoder.buffer_least))
        kv_bytes = integer(1)("kv_bytes", kv_bytes)
        slots = min(slots, kv_bytes // max(bytes_per_slot, 1))
        if not slots:
            raise ParameterError(
                f"kv_bytes is {decimal_size(kv_bytes)}, but a slot of {length} tokens takes "
                f"{decimal_size(bytes_per_slot)}; give more, or a smaller max_length.",
                "kv_bytes",
                "max_length",
            )
    if slots > MOST_SLOTS:
        raise ParameterError(
            f"max_batch is {max_batch}, but an engine has at most {MOST_SLOTS} slots; give at most that, and a higher "
            "max_queue for sequences that wait.",
            "max_batch",
        )
    return slots


def _check_tensorrt(session: Session, decoder: DecoderInfo, slots: int, length: int) -> None:
    """Raises ParameterError for a TensorRT engine that was built for fewer slots, or that cannot bind single slots."""
    if session.most_rows is not None and slots > session.most_rows:
        raise ParameterError(
            f"max_batch is {slots}, but the TensorRT engine was built for {session.most_rows}; give at most that, or "
            "build it again with a higher --max-batch."
        )
    sizes = [state.row_bytes(max(length, decoder.buffer_least)) for state in decoder.states]
    unaligned = next((size for size in sizes if size % ALIGNMENT), None)
    if session.provider == "tensorrt" and slots > 1 and unaligned is not None:
        raise ParameterError(
            f"a slot of a state takes {unaligned} bytes, which is not a multiple of {ALIGNMENT}, so TensorRT cannot "
            "read a prompt into one of several slots; give max_batch=1, or open the model with another provider."
        )
