"""The engine's thread: one iteration after another, each with at most one chunk and one step."""

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
from topw_deploy.engine.lifecycle import Lifecycle
from topw_deploy.engine.options import EngineOptions
from topw_deploy.engine.prefixes import NO_TOKENS
from topw_deploy.engine.request import Request
from topw_deploy.engine.reuse import Reuse
from topw_deploy.engine.scheduler import Chunk, Scheduler
from topw_deploy.engine.sequences import RequestSequence, Submission
from topw_deploy.engine.stats import Counters
from topw_deploy.errors import GenerationError, LogitsError, ParameterError, TopWError
from topw_deploy.manifest import DecoderInfo

_EXIT_SECONDS = 10.0  # seconds that the interpreter waits for a run or a callback in progress
_workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()


class EngineWorker(InboxThread):
    """The engine's thread. It runs chunks and steps until `retire`, and only this thread uses the batch.

    Other threads may call only the methods `start` to `retire`, and those of `InboxThread`.
    """

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler[RequestSequence],
        capacity: Capacity,
        decoder: DecoderInfo,
        options: EngineOptions,
    ) -> None:
        super().__init__("topw-engine")
        self.counters = Counters()
        self._batch, self._scheduler = batch, scheduler
        self._decoding = Decoding(batch, scheduler)
        self._reuse = Reuse(batch, decoder, options, self._decoding.tokens_in)
        self._delivery = Delivery(lambda error: self._post(partial(self._lifecycle.fail_all, error)))
        self._lifecycle = Lifecycle(
            batch, scheduler, capacity, self._reuse, self._decoding, self._delivery, self.counters
        )
        self._is_retiring = False
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
        """Call a function in the delivering thread, after the functions passed before. The function must not block.

        Call this only in the engine's thread.
        """
        self._delivery.add(function, *arguments)

    def wait_for_posted(self) -> None:
        """Wait until the iteration in progress and all functions posted before are done, and their events delivered."""
        done: SimpleQueue[None] = SimpleQueue()
        self._post(partial(self.deliver, done.put, None))
        if self._has_ended:  # a signal handler has shut the engine down
            self._empty_inbox()
        done.get()

    def save(self, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Call `Reuse.longest_states` between two iterations."""
        return self._call("save_session", partial(self._reuse.longest_states, tokens))

    def load(self, tokens: np.ndarray, states: Sequence[np.ndarray]) -> None:
        """Call `Reuse.load` between two iterations."""
        self._call("load_session", lambda: self._reuse.load(tokens, states, self._scheduler.free_rows))

    def retire(self) -> None:
        """Make the thread end and release the batch as soon as it has no requests."""
        self._post(self._retire)

    def _check_alive(self) -> None:
        if self._has_ended or self._lifecycle.failure:
            raise GenerationError(self._lifecycle.failure or "the engine is shut down; create a new Engine.")

    def _main(self) -> None:
        while self._lifecycle.alive or not self._inbox.empty() or not self._is_retiring:
            try:
                self._iterate()
            except BaseException as error:  # noqa: BLE001  # callers must not wait forever
                self._lifecycle.fail_all(error)
                self._delivery.send()
        self._batch.close()
        self._has_ended = True
        self._empty_inbox()
        self._delivery.close()

    def _iterate(self) -> None:
        """Run the posted functions, then one chunk and one step. Without sequences, wait for a posted function."""
        inbox = self._inbox
        if inbox.empty() and (self._scheduler.is_idle or self._lifecycle.failure):
            self._delivery.send()
            inbox.get()()  # blocks until a function is posted
        began, run_seconds, counters = time.perf_counter(), self._batch.run_seconds, self.counters
        is_undisturbed, group, chunks = inbox.empty(), self._decoding.group, counters.chunks
        if not is_undisturbed:
            self._delivery.send()  # now, because starting requests may take longer than HOLD
        while not inbox.empty():
            inbox.get()()
        if self._lifecycle.deadlines:
            self._lifecycle.expire(time.perf_counter())
        if not self._lifecycle.failure:
            self._run()
        self._delivery.send_due()
        took = time.perf_counter() - began
        counters.busy_seconds += took
        is_same_group = group is not None and group is self._decoding.group
        if is_undisturbed and is_same_group and chunks == counters.chunks:
            counters.steady_seconds += took
            counters.steady_run_seconds += self._batch.run_seconds - run_seconds

    def _run(self) -> None:
        """Run one chunk and one step, in the order that scheduler.py describes."""
        scheduler, batch = self._scheduler, self._batch
        if scheduler.waiting_count:
            self._admit()
        chunk = scheduler.next_chunk()
        if chunk is not None:
            self._delivery.send()  # now, because the next run may be long
            self._read_chunk(chunk)
            self._delivery.send()  # so that a first token does not wait for the step
        if batch.inputs.edits.is_active:
            self._write_edits()
        while pairs := scheduler.arrange():  # again after a failed exchange, which frees rows
            self._exchange_rows(pairs)
        if scheduler.decoding:
            self._step()

    def _admit(self) -> None:
        first = self._scheduler.first_waiting
        if first is not None and not self._scheduler.rows_in_use:
            self._reuse.shrink_buffers(first.prompt)
        for sequence in self._scheduler.admit(self._choose_row):
            try:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    if not sequence.generation.unread_tokens:
                        self._batch.assign(sequence.row, sequence.generation)
                    self._update_mask(sequence)
                    self._scheduler.skip_prefix(sequence, self._restore_prefix(sequence))
            except ParameterError as error:
                self._lifecycle.fail(sequence, error)
            except (TopWError, MemoryError) as error:
                self._lifecycle.fail(sequence, _copy_error(error), nonfinite=True)

    def _choose_row(self, sequence: RequestSequence, free: Sequence[int]) -> int:
        return self._reuse.choose_row(sequence.prompt, free, reuses_prefix=sequence.reuses_prefix)

    def _restore_prefix(self, sequence: RequestSequence) -> int:
        return self._reuse.restore_prefix(sequence.row, sequence.prompt, reuses_prefix=sequence.reuses_prefix)

    def _read_chunk(self, chunk: Chunk[RequestSequence]) -> None:
        sequence, row = chunk.sequence, chunk.sequence.row
        try:
            if sequence.prefill_began_at is None:
                chunk = self._begin_prefill(sequence)
            self._batch.wants_logits = sequence.generation.needs_logits
            token = self._batch.read(row, sequence.generation, chunk.start, chunk.end)
        except (TopWError, MemoryError) as error:
            self._lifecycle.fail(sequence, _copy_error(error), nonfinite=True)
            return
        self.counters.chunks += 1
        self.counters.prompt_tokens += chunk.end - chunk.start
        self._reuse.record_read(row, sequence.prompt[: chunk.end], is_finite=token is None or token >= 0)
        self._scheduler.record_read(chunk)
        if token is None:
            return
        self._decoding.regroup()
        sequence.first_outputs = self._batch.first_outputs()
        sequence.spans = [(row, self._batch.steps)]
        self._add_token(sequence, token, partial(self._batch.begin, row))

    def _begin_prefill(self, sequence: RequestSequence) -> Chunk[RequestSequence]:
        """Begin to read a prompt. Restores its prefix again: rows may hold more of it now than when it got its row.

        Returns the sequence's first chunk.
        """
        sequence.prefill_began_at = time.perf_counter()
        sequence.cached_tokens = self._restore_prefix(sequence)
        if sequence.reuses_prefix:
            sequence.branch_position = self._reuse.branch_position(sequence.prompt, sequence.cached_tokens)
        self.counters.cached_tokens += sequence.cached_tokens
        return self._scheduler.skip_prefix(sequence, sequence.cached_tokens)

    def _write_edits(self) -> None:
        for sequence in list(self._scheduler.decoding):
            try:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    self._batch.inputs.edits.write_bans(sequence.row)
            except ParameterError as error:
                self._lifecycle.fail(sequence, error)

    def _exchange_rows(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._decoding.regroup()
        for pair in pairs:
            try:
                saves = self._scheduler.sequence_in(pair[0]) is not None or self._reuse.has_tokens(pair[1])
                self._batch.exchange(*pair, saves)
            except (TopWError, MemoryError) as error:
                self._clear_exchanged(pair, _copy_error(error))
            self._reuse.exchange(*pair)
        for sequence in list(self._scheduler.decoding):
            if sequence.spans[-1][0] != sequence.row:
                sequence.spans.append((sequence.row, self._batch.steps))

    def _clear_exchanged(self, rows: tuple[int, int], error: BaseException) -> None:
        """Clear two rows after an exchange that failed midway, and fail their requests."""
        for row in rows:
            sequence = self._scheduler.sequence_in(row)
            if sequence is not None:
                self._lifecycle.fail(sequence, error, nonfinite=True)
            else:
                self._batch.clear(row, nonfinite=True)
                self._reuse.release_row(row, NO_TOKENS)

    def _step(self) -> None:
        batch, width, group = self._batch, self._scheduler.width, self._decoding.next_group()
        sequences = group.sequences
        try:
            batch.wants_logits = group.has_scores and any(sequence.generation.needs_logits for sequence in sequences)
            tokens = batch.step(width)
        except GenerationError as error:
            for sequence in sequences:
                if not sequence.has_ended:  # it may have ended with another sequence of its request
                    self._lifecycle.fail(sequence, GenerationError(str(error)), nonfinite=True)
            return
        self.counters.steps += 1
        if group.can_pass:
            if not batch.inputs.edits.is_active and group.passes(tokens[:width]):
                batch.accept_all(width)
                self._deliver(zip(sequences, tokens, strict=False), width)
                return
            self._decoding.regroup()
        passed: list[tuple[RequestSequence, int]] = []
        for sequence in sequences:
            if sequence.has_ended:  # it may have ended with another sequence of its request
                continue
            token = tokens[sequence.row]
            if not sequence.generation.try_lengthen(token):
                passed = self._deliver(passed, len(passed))
                self._add_token(sequence, token, partial(batch.accept, sequence.row))
                continue
            passed.append((sequence, token))
            try:
                batch.accept(sequence.row, token)
            except ParameterError as error:
                passed = self._deliver(passed, len(passed))
                self._lifecycle.fail(sequence, error)
        self._deliver(passed, len(passed))

    def _deliver(self, passed: Iterable[tuple[RequestSequence, int]], count: int) -> list[tuple[RequestSequence, int]]:
        """Deliver `count` tokens, which only lengthened their sequences.

        If several rows are in use, the tokens may be delivered together with those of the next short steps.

        Returns an empty list, to collect the next tokens in.
        """
        self.counters.new_tokens += count
        if count:
            add = self._delivery.add_delayable if self._scheduler.rows_in_use > 1 else self._delivery.add
            add(_put_tokens, passed)
        return []

    def _add_token(self, sequence: RequestSequence, token: int, feed: Callable[[int], None]) -> None:
        """Add the token that a run drew to a sequence. Unless that ends the sequence, `feed` its next input token.

        While a prompt is read token by token, the drawn token is discarded, and the next input is the prompt's.
        """
        generation = sequence.generation
        is_drawn = not generation.unread_tokens
        if not generation.steps:
            sequence.first_token_at = time.perf_counter()
        if is_drawn and token < 0:
            error = generation.invalid_draw_error(f"sequence {generation.index} of the request")
            self._lifecycle.fail(sequence, error, nonfinite=True)
            return
        logits = self._batch.logits(sequence.row) if generation.needs_logits else None
        text = ""
        try:
            if is_drawn:
                text = generation.add_token(token, logits)
            else:
                token = generation.read_prompt_token(logits)
        except BaseException as error:  # noqa: BLE001  # of the caller's code, or of the logits
            self._lifecycle.fail(sequence, error, nonfinite=isinstance(error, LogitsError))
            return
        if is_drawn:
            self.counters.new_tokens += 1
            _deliver_token(sequence, token, text)
        else:
            self.counters.prompt_tokens += 1
        if generation.finish_reason is not None:
            self._lifecycle.end(sequence)
            return
        try:
            feed(token)
            if not is_drawn and not generation.unread_tokens:
                self._batch.assign(sequence.row, generation)
            self._update_mask(sequence)
        except ParameterError as error:
            self._lifecycle.fail(sequence, error)

    def _update_mask(self, sequence: RequestSequence) -> None:
        """Update the mask of the tokens that a sequence's grammar allows next."""
        generation = sequence.generation
        if generation.guide is not None and not generation.unread_tokens:
            self._batch.inputs.masks.set(sequence.row, generation.guide.mask)

    def _retire(self) -> None:
        self._is_retiring = True


def _copy_error(error: BaseException) -> BaseException:
    """The error of a request for which states could not be copied."""
    if isinstance(error, MemoryError):
        return GenerationError(
            "there is no memory for a copy of the request's states; end requests, or use fewer rows."
        )
    return error


def _deliver_token(sequence: RequestSequence, token: int, text: str) -> None:
    """Deliver a drawn token, or the text that the engine's thread decoded from it. A stop token has no event."""
    generation = sequence.generation
    if generation.text is not None:
        if text:
            sequence.request.deliver_event((generation.index, text, generation.steps))
    elif not isinstance(generation.stop, int):
        sequence.request.deliver_event((generation.index, token, generation.steps))


def _put_tokens(drawn: Iterable[tuple[RequestSequence, int]]) -> None:
    """Put the events of tokens that only lengthened their sequences. Runs in the delivering thread."""
    for sequence, token in drawn:
        # 0: not counted, because only log-probabilities need the number, and these sequences have none.
        sequence.request.put_event((sequence.generation.index, token, 0))


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
