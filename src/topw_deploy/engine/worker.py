"""The engine's thread: one iteration after another, each with at most one chunk and one step.

An iteration runs what other threads have posted, then chooses who runs (scheduler.py), runs a chunk and a step
(batch.py), and gives each sequence its token; events go to the delivering thread (waiting.py).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.prefixes import NO_TOKENS, Prefixes
from topw_deploy.engine.request import EngineSequence, Group, Request, TokenOutputs
from topw_deploy.engine.scheduler import WAITING, Chunk, Scheduler
from topw_deploy.engine.waiting import Capacity, Delivery
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, TopWError, one_line
from topw_deploy.runtime.cache.buffers import SlotOutputs
from topw_deploy.runtime.draft_model import DraftModel, new_drafts
from topw_deploy.runtime.speculate import DraftSource, FinishedTexts, RunCosts

_EXIT_SECONDS = 10.0  # seconds that the interpreter waits for a run or a callback in progress
_workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()
Result = TypeVar("Result")


@dataclass(slots=True)
class EngineStats:
    """State and totals of an engine.

    slots: slots of the cache.
    in_use: slots in use.
    queued: accepted sequences without a slot.
    steps: runs that drew a token for each decoding slot.
    chunks: runs that read a part of a prompt.
    prompt_tokens: prompt tokens that were read.
    cached_tokens: prompt tokens that were reused instead.
    new_tokens: tokens drawn.
    drafted_tokens: drafted tokens that runs have read.
    accepted_tokens: those of them that were drawn.
    ended: sequences that ended for any reason.
    failed: requests that failed.
    cache_bytes: size of the cache.
    busy_seconds: time in iterations of the engine's thread.
    run_seconds: the part of `busy_seconds` in runs of the session; the rest is overhead. A run may include a wait for
        another thread that holds Python's interpreter lock when the run ends.
    """

    slots: int = 0
    in_use: int = 0
    queued: int = 0
    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ended: int = 0
    failed: int = 0
    cache_bytes: int = 0
    busy_seconds: float = 0.0
    run_seconds: float = 0.0


class EngineWorker:
    """The engine's thread. It runs chunks and steps until `retire`, and only this thread uses the batch.

    Other threads call only the methods from `check_caller` to `retire`.

    stats: the totals so far; what belongs to an instant stays 0.
    alive: the sequences of the requests that have not ended.
    failure: why the engine failed, as an error message; "" if it has not.
    """

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler[EngineSequence],
        prefixes: Prefixes,
        capacity: Capacity,
        costs: RunCosts | None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """costs: the measured times of the session's runs; None if the graph cannot speculate."""
        self.stats = EngineStats()
        self.alive: dict[Request, list[EngineSequence]] = {}
        self.failure = ""
        self._batch, self._scheduler, self._prefixes, self._capacity = batch, scheduler, prefixes, capacity
        self._costs, self._draft_model, self._finished = costs, draft_model, FinishedTexts()
        prefixes.decoding_tokens = self._tokens_in
        # Unlike threading's locks, its `put` may run in a garbage collection during another `put`.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.delivery = Delivery(lambda error: self._post(partial(self._fail_all, error)))
        self._group: Group | None = None  # of the next step; None if a sequence has joined, left or moved
        self._first_deadline = math.inf  # no request in `alive` has an earlier one
        self._is_retiring = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name="topw-engine", daemon=True)
        self._thread.start()
        _workers.add(self)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's process, and so lacks the engine's thread."""
        return os.getpid() != self._process

    def check_caller(self, method: str, *, waits: bool = True) -> None:
        """Raises GenerationError in a fork, and if a method that waits was called in this thread."""
        if self.is_forked:
            raise GenerationError(
                f"{method}() was called in process {os.getpid()}, a fork of process {self._process}, which has the "
                "engine's thread; create the Engine in the process that uses it, or start processes with 'spawn'."
            )
        if waits and threading.current_thread() is self._thread:
            raise GenerationError(f"a callback called {method}(), which would wait for itself; call it elsewhere.")

    def start(self, request: Request) -> None:
        """Queue a request for which there is room."""
        sequences = [EngineSequence(request, state) for state in request.sequences]
        self._post(partial(self._start, request, sequences))

    def end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all, before the next run."""
        self._post(partial(self._end_early, request, reason))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function between two iterations. Its future has a GenerationError if the engine has failed."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                if self.failure:
                    raise GenerationError(self.failure)
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # the caller's
                future.set_exception(error)

        self._post(run)
        return future

    def wait_for_posted(self) -> None:
        """Wait until the iteration in progress and all functions posted before are done, and their events delivered."""
        done = threading.Event()
        self._post(partial(self.delivery.add, done.set))
        done.wait()

    def retire(self) -> None:
        """Make the thread end and release the batch as soon as it has no requests."""
        self._post(partial(setattr, self, "_is_retiring", True))

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _post(self, function: Callable[[], None]) -> None:
        """Let the thread run a function. Does not wait."""
        self._inbox.put(function)

    def _main(self) -> None:
        while self.alive or not self._inbox.empty() or not self._is_retiring:
            try:
                self._iterate()
            except BaseException as error:  # noqa: BLE001  # callers must not wait forever
                self._fail_all(error)
                self.delivery.send()
        self._batch.close()
        self.delivery.close()

    def _iterate(self) -> None:
        """Run the posted functions, then one chunk and one step. Without sequences, wait for a posted function."""
        inbox = self._inbox
        if inbox.empty() and (self._scheduler.is_idle or self.failure):
            self.delivery.send()
            inbox.get()()  # blocks until a function is posted
        began = time.perf_counter()
        if not inbox.empty():
            self.delivery.send()  # now, because starting requests may take longer than HOLD
        while not inbox.empty():
            inbox.get()()
        if self._first_deadline <= (now := time.perf_counter()):
            self._expire(now)
        if not self.failure:
            self._run()
        self.delivery.send_due()
        self.stats.busy_seconds += time.perf_counter() - began

    def _run(self) -> None:
        """Run one chunk and one step, in the order that scheduler.py describes."""
        scheduler, batch = self._scheduler, self._batch
        if scheduler.waiting:
            self._admit()
        chunk = scheduler.next_chunk()
        if chunk is not None:
            self.delivery.send()  # now, because the next run may be long
            self._read_chunk(chunk)
            self.delivery.send()  # so that a first token does not wait for the step
        if batch.inputs.edits.is_active:
            self._write_edits()
        while pairs := scheduler.arrange():  # again after a failed exchange, which frees slots
            self._exchange_slots(pairs)
        if scheduler.decoding:
            self._step()

    def _admit(self) -> None:
        if not self._scheduler.slots_in_use:
            self._prefixes.shrink_buffers(self._scheduler.waiting[0].reusable)
        for sequence in self._scheduler.admit(lambda each, free: self._prefixes.choose_slot(each.reusable, free)):
            try:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    if not sequence.state.unread_tokens:
                        self._batch.inputs.set(sequence.slot, sequence.state)
                    self._update_mask(sequence)
                    restored = self._prefixes.restore_prefix(sequence.slot, sequence.reusable)
                    self._scheduler.skip_prefix(sequence, restored)
            except ParameterError as error:
                self._fail(sequence, error)
            except (TopWError, MemoryError) as error:
                self._fail(sequence, _copy_error(error), nonfinite=True)

    def _read_chunk(self, chunk: Chunk[EngineSequence]) -> None:
        sequence, slot = chunk.sequence, chunk.sequence.slot
        try:
            if sequence.prefill_began_at is None:
                sequence.prefill_began_at = time.perf_counter()
                # Again: slots may hold more of the prompt now than when it got its slot.
                cached = sequence.cached_tokens = self._prefixes.restore_prefix(slot, sequence.reusable)
                sequence.branch_position = self._prefixes.branch_position(sequence.reusable, cached)
                self.stats.cached_tokens += cached
                chunk = self._scheduler.skip_prefix(sequence, cached)
            self._batch.wants_logits = sequence.state.needs_logits
            token = self._batch.read(slot, sequence.state, chunk.start, chunk.end)
        except (TopWError, MemoryError) as error:
            self._fail(sequence, _copy_error(error), nonfinite=True)
            return
        self.stats.chunks += 1
        self.stats.prompt_tokens += chunk.end - chunk.start
        self._prefixes.record_read(slot, sequence.prompt[: chunk.end], is_finite=token is None or token >= 0)
        self._scheduler.record_read(chunk)
        if token is None:
            return
        self._regroup()
        sequence.first_outputs = self._batch.first_outputs()
        sequence.spans = [(slot, self._batch.steps)]
        if self._costs is not None and sequence.state.speculates:
            text = [*sequence.state.prompt, token]
            sequence.drafts = new_drafts(sequence.state, text, self._draft_model, self._finished)
        self._add_token(sequence, token, partial(self._batch.begin, slot))

    def _write_edits(self) -> None:
        for sequence in list(self._scheduler.decoding):
            try:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    self._batch.inputs.edits.write_bans(sequence.slot)
            except ParameterError as error:
                self._fail(sequence, error)

    def _exchange_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._regroup()
        for pair in pairs:
            try:
                saves = self._scheduler.sequence_in(pair[0]) is not None or self._prefixes.has_tokens(pair[1])
                self._batch.exchange(*pair, saves)
            except (TopWError, MemoryError) as error:
                for slot in pair:  # the exchange failed midway
                    sequence = self._scheduler.sequence_in(slot)
                    if sequence is not None:
                        self._fail(sequence, _copy_error(error), nonfinite=True)
                    else:
                        self._batch.clear(slot, nonfinite=True)
                        self._prefixes.release_slot(slot, NO_TOKENS)
            self._prefixes.exchange(*pair)
        for sequence in list(self._scheduler.decoding):
            if sequence.spans[-1][0] != sequence.slot:
                sequence.spans.append((sequence.slot, self._batch.steps))

    def _step(self) -> None:
        batch, width = self._batch, self._scheduler.width
        group = self._group = self._group or Group(self._scheduler.decoding, width)
        sequences = group.sequences
        began = time.perf_counter()
        drafts = sequences[0].drafts if width == 1 else None
        if drafts is not None and self._costs is not None:
            columns = self._costs.choose(drafts, batch.columns_left)
            if columns > 1:
                self._step_with_drafts(sequences[0], drafts, columns, self._costs)
                return
        try:
            batch.wants_logits = group.has_scores and any(sequence.state.needs_logits for sequence in sequences)
            tokens = batch.step(width)
        except GenerationError as error:
            for sequence in sequences:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    self._fail(sequence, GenerationError(str(error)), nonfinite=True)
            return
        self.stats.steps += 1
        if drafts is not None and self._costs is not None:
            self._costs.add(1, time.perf_counter() - began)
        for sequence in group.drafting:
            if sequence.drafts is not None:
                sequence.drafts.add(tokens[sequence.slot])
        if group.can_pass:
            if not batch.inputs.edits.is_active and group.passes(tokens[:width]):
                batch.accept_all(width)
                self._deliver(zip(sequences, tokens, strict=False), width)
                return
            self._regroup()
        passed: list[tuple[EngineSequence, int]] = []
        for sequence in sequences:
            if sequence.has_ended:  # it may have ended with another sequence of its request
                continue
            token = tokens[sequence.slot]
            if not sequence.state.try_lengthen(token):
                passed = self._deliver(passed, len(passed))
                self._add_token(sequence, token, partial(batch.accept, sequence.slot))
                continue
            passed.append((sequence, token))
            try:
                batch.accept(sequence.slot, token)
            except ParameterError as error:
                passed = self._deliver(passed, len(passed))
                self._fail(sequence, error)
        self._deliver(passed, len(passed))

    def _step_with_drafts(self, sequence: EngineSequence, drafts: DraftSource, columns: int, costs: RunCosts) -> None:
        """Run a step of slot 0 that reads drafts too, and give its sequence the tokens that follow from accepted ones.

        Other slots are not decoding. Attention takes several tokens of one row only (`DecoderInfo.ragged_chunks`).
        """
        batch, state, began = self._batch, sequence.state, time.perf_counter()
        self._regroup()
        try:
            drafted = drafts.draft(columns - 1)
            drafting, began = time.perf_counter() - began, time.perf_counter()
            tokens, outputs = batch.step_with_drafts(state, drafted)
        except GenerationError as error:
            self._fail(sequence, error, nonfinite=True)
            return
        costs.add(columns, time.perf_counter() - began, len(tokens), drafting)
        self.stats.steps += 1
        self.stats.drafted_tokens += columns - 1
        sequence.drafted_outputs += [*self._outputs_since(sequence), outputs]
        sequence.spans = [(sequence.slot, batch.steps)]
        for index, token in enumerate(tokens):
            state.accepted += index > 0
            self.stats.accepted_tokens += index > 0
            drafts.add(token)
            if state.try_lengthen(token):
                self._deliver([(sequence, token)], 1)
                batch.accept(sequence.slot, token)
                continue
            self._add_token(sequence, token, partial(batch.accept, sequence.slot))
            if state.finish_reason is not None:
                return
        batch.skip_draws(state)

    def _deliver(self, passed: Iterable[tuple[EngineSequence, int]], count: int) -> list[tuple[EngineSequence, int]]:
        """Deliver `count` tokens, which only lengthened their sequences.

        If several slots are in use, the tokens may be delivered together with those of the next short steps.

        Returns an empty list, to collect the next tokens in.
        """
        self.stats.new_tokens += count
        if count:
            add = self.delivery.add_delayable if self._scheduler.slots_in_use > 1 else self.delivery.add
            add(_put_tokens, passed)
        return []

    def _add_token(self, sequence: EngineSequence, token: int, feed: Callable[[int], None]) -> None:
        """Add the token that a run drew to a sequence. Unless that ends the sequence, `feed` its next input token.

        While a prompt is read token by token, the drawn token is discarded, and the next input is the prompt's.
        """
        state = sequence.state
        is_drawn = not state.unread_tokens
        if not state.steps:
            sequence.first_token_at = time.perf_counter()
        if is_drawn and token < 0:
            error = state.invalid_draw_error(f"sequence {state.index} of the request")
            self._fail(sequence, error, nonfinite=True)
            return
        logits = self._batch.logits(sequence.slot) if state.needs_logits else None
        text = ""
        try:
            if is_drawn:
                text = state.add_token(token, logits)
            else:
                token = state.read_prompt_token(logits)
        except BaseException as error:  # noqa: BLE001  # of the caller's code, or of the logits
            self._fail(sequence, error, nonfinite=isinstance(error, LogitsError))
            return
        if is_drawn:
            self.stats.new_tokens += 1
            self._deliver_token(sequence, token, text)
        else:
            self.stats.prompt_tokens += 1
        if state.finish_reason is not None:
            self._end(sequence)
            return
        try:
            feed(token)
            if not is_drawn and not state.unread_tokens:
                self._batch.inputs.set(sequence.slot, state)
            self._update_mask(sequence)
        except ParameterError as error:
            self._fail(sequence, error)

    def _deliver_token(self, sequence: EngineSequence, token: int, text: str) -> None:
        """Deliver a drawn token, or the text that this thread decoded from it. A stop token has no event."""
        state = sequence.state
        new: int | str = token if state.text is None else text
        if new if isinstance(new, str) else not isinstance(state.stop, int):
            self.delivery.add(sequence.request.put_event, (state.index, new, state.steps))

    def _update_mask(self, sequence: EngineSequence) -> None:
        """Update the mask of the tokens that a sequence's grammar allows next."""
        state = sequence.state
        if state.guide is not None and not state.unread_tokens:
            self._batch.inputs.masks.set(sequence.slot, state.guide.mask)

    def _start(self, request: Request, sequences: list[EngineSequence]) -> None:
        self.alive[request] = sequences
        if request.deadline is not None:
            self._first_deadline = min(self._first_deadline, request.deadline)
        if self.failure:
            self._fail(sequences[0], GenerationError(self.failure))
            return
        for sequence in sequences:
            self._scheduler.submit(sequence)
        for sequence in sequences:
            state = sequence.state
            try:
                if state.callbacks is not None and not sequence.has_ended:
                    state.callbacks.stream_prompt()
            except BaseException as error:  # noqa: BLE001  # of the caller's code
                self._fail(sequence, error)
            fills_context = not (state.params.budget or state.unread_tokens)
            if fills_context and not sequence.has_ended:
                state.end("length")
                self._end(sequence)

    def _end_early(self, request: Request | None, reason: str) -> None:
        """End a request, or all if None, with what it drew so far. No effect on a request that has ended."""
        for sequences in list(self.alive.values()) if request is None else [self.alive.get(request, [])]:
            for sequence in sequences:
                if not sequence.has_ended:
                    self._interrupt(sequence, reason)

    def _expire(self, now: float) -> None:
        """End the requests whose deadlines have passed. now: by time.perf_counter()."""
        for request in list(self.alive):
            if request.deadline is not None and request.deadline <= now:
                self._end_early(request, "timeout")
        deadlines = (request.deadline for request in self.alive if request.deadline is not None)
        self._first_deadline = min(deadlines, default=math.inf)

    def _fail(self, sequence: EngineSequence, error: BaseException, *, nonfinite: bool = False) -> None:
        """End all sequences of a request because one of them failed. nonfinite: see `Batch.clear`."""
        sequence.request.fail(error)
        self.stats.failed += 1
        for other in self.alive[sequence.request]:
            if not other.has_ended:
                self._interrupt(other, "error", nonfinite=nonfinite)

    def _fail_all(self, error: BaseException) -> None:
        """Fail all requests, and accept no more, after an error that none of them caused."""
        why = f"the engine has failed ({type(error).__name__}: {one_line(error)})"
        self.failure = f"{why}; create a new Engine."
        self._capacity.close(why)
        self._scheduler.clear()
        for sequences in list(self.alive.values()):
            alive = [sequence for sequence in sequences if not sequence.has_ended]
            if alive:
                self._fail(alive[0], GenerationError(self.failure))

    def _end(self, sequence: EngineSequence, *, nonfinite: bool = False) -> None:
        """Free the slot of an ended sequence and hand over its result. nonfinite: see `Batch.clear`."""
        outputs, slot = self._outputs_of(sequence), sequence.slot
        self._regroup()
        if not self.failure:
            self._scheduler.end(sequence)
            if slot != WAITING:
                unchecked = 0 < sequence.read_tokens < sequence.prompt_tokens
                self._batch.clear(slot, nonfinite=nonfinite, unchecked=unchecked)
                # After an error the slot may have read one more token than its results show.
                is_wrong, held = sequence.state.finish_reason == "error", None
                if self._prefixes.is_enabled and sequence.is_decoding and not is_wrong:
                    held = sequence.tokens_in_cache(outputs)
                self._prefixes.release_slot(slot, NO_TOKENS if is_wrong else held)
        self.stats.ended += 1
        sequence.has_ended = True
        if sequence.drafts is not None:
            self._finished.add(sequence.drafts.tokens)
            sequence.drafts.close()
            sequence.drafts = None
        if all(other.has_ended for other in self.alive[sequence.request]):
            del self.alive[sequence.request]
            sequence.request.end_streamer()
        self._capacity.release()
        self.delivery.add(sequence.end, outputs)

    def _regroup(self) -> None:
        """Settle the group, and let the next step make a new one."""
        if self._group is not None:
            self._group.settle()
            self._group = None

    def _outputs_of(self, sequence: EngineSequence) -> TokenOutputs:
        """A copy of the sampler's outputs for a sequence's tokens."""
        if self._group is not None:
            self._group.settle()
        if sequence.first_outputs is None:
            return TokenOutputs()
        parts = [sequence.first_outputs, *sequence.drafted_outputs, *self._outputs_since(sequence)]
        skipped = sequence.state.discarded_draws
        return TokenOutputs(parts, slice(skipped, skipped + sequence.state.steps))

    def _outputs_since(self, sequence: EngineSequence) -> list[SlotOutputs]:
        """Copies of the outputs of a sequence's steps since the last run with drafts."""
        parts: list[SlotOutputs] = []
        ends = [start for _, start in sequence.spans[1:]] + [self._batch.steps]
        for (slot, start), end in zip(sequence.spans, ends, strict=False):
            parts += self._batch.recorded_outputs(slot, start, end)
        return parts

    def _tokens_in(self, slot: int) -> np.ndarray | None:
        """The tokens in a slot, int64 [n]; None if the slot is not decoding."""
        sequence = self._scheduler.sequence_in(slot)
        if sequence is None or not sequence.is_decoding:
            return None
        return sequence.tokens_in_cache(self._outputs_of(sequence))

    def _interrupt(self, sequence: EngineSequence, reason: str, *, nonfinite: bool = False) -> None:
        """End a sequence before its last token, with the text that was held back."""
        state = sequence.state
        try:
            text = state.interrupt(reason)
        except BaseException as error:  # noqa: BLE001  # of the tokenizer, perhaps the one that failed the request
            sequence.request.fail(error)
            text = ""
        if text:
            self.delivery.add(sequence.request.put_event, (state.index, text, state.steps))
        self._end(sequence, nonfinite=nonfinite)


def _copy_error(error: BaseException) -> BaseException:
    """The error of a request for which states could not be copied."""
    if isinstance(error, MemoryError):
        return GenerationError(
            "there is no memory for a copy of the request's states; end requests, or use fewer slots."
        )
    return error


def _put_tokens(drawn: Iterable[tuple[EngineSequence, int]]) -> None:
    """Put the events of tokens that only lengthened their sequences. Runs in the delivering thread."""
    for sequence, token in drawn:
        # 0: not counted, because only log-probabilities need the number, and these sequences have none.
        sequence.request.put_event((sequence.state.index, token, 0))


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter exits: a thread inside onnxruntime would then abort the process."""
    workers = [worker for worker in _workers if not worker.is_forked]
    for worker in workers:
        worker.end_early(None, "cancelled")
        worker.retire()
    end = time.perf_counter() + _EXIT_SECONDS
    for worker in workers:
        worker.join(max(0.0, end - time.perf_counter()))
