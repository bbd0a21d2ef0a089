"""`Request`: the caller's handle. `EngineSequence`: one sequence of it in the engine's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.engine.scheduler import ScheduledSequence
from topw_deploy.engine.waiting import read_timeout, waitable
from topw_deploy.errors import GenerationError
from topw_deploy.runtime.cache.buffers import SlotOutputs
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.results import GenerationResult, Piece
from topw_deploy.runtime.sequence import Sequence as SequenceState
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.speculate import DraftSource

Event: TypeAlias = "tuple[int, int | str | None, int] | None"
"""(index of a sequence; its next token, or new text, or None at its end; number of its tokens so far).

The number is 0 for a token that the engine's thread did not count. None instead of a tuple follows the last event.
"""


class Request:
    """A submitted request of one or several sequences. Any thread may use it.

    sequences: their states.
    cancel: called by `cancel`.
    check_caller: called with a method's name before the method waits; see `EngineWorker.check_caller`.
    session, load_seconds: of the model, for the results.
    started: time.perf_counter() at the caller's call.
    deadline: time.perf_counter() at which the request must end; None for no deadline.
    read_anyway: number of tokens at a prompt's end that are read even if they are known; None for all of the prompt.
    put_event: receives the events, in the delivering thread. The request keeps them for its iterator by default.
    on_end: called after the last event.
    error: the error with which it failed; None if it did not fail.
    """

    def __init__(
        self,
        sequences: Sequences,
        cancel: Callable[[Request], None],
        check_caller: Callable[[str], None],
        session: Session,
        load_seconds: float,
        *,
        started: float,
        deadline: float | None = None,
        read_anyway: int | None = 1,
    ) -> None:
        self.sequences, self.started, self.deadline, self.read_anyway = sequences, started, deadline, read_anyway
        self.session, self.load_seconds, self._cancel, self._check_caller = session, load_seconds, cancel, check_caller
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put_event: Callable[[Event], object] = self._events.put
        self.on_end: Callable[[], object] = lambda: None
        self.error: BaseException | None = None
        self._trace: TracebackType | None = None  # traceback of `error`
        self._new_results: dict[int, Callable[..., GenerationResult]] = {}  # of the sequences that have ended
        self._results: dict[int, GenerationResult] = {}
        self._readers: dict[int, _PieceReader] = {}
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._is_iterated = False

    @property
    def done(self) -> bool:
        """Whether all sequences have ended."""
        return self._done.is_set()

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the deadline, or None."""
        return None if self.deadline is None else waitable(self.deadline - time.perf_counter())

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the GenerationResult, or for the list of them if `generate` would return a list.

        A cancelled request, or one that ran out of `max_time`, returns what it drew until then.

        Raises TimeoutError after `timeout` seconds; the request continues. Raises the request's error if it failed.
        """
        seconds = read_timeout(timeout)
        if not self.done:
            self._check_caller("result")
        if not self._done.wait(seconds):
            raise TimeoutError(f"the request did not end within {timeout} s; wait again, or call cancel().")
        self.raise_error()
        results = self.results()
        return results[0] if self.sequences.is_single else results

    def results(self) -> list[GenerationResult]:
        """The results of the sequences that have ended, in order; with finish_reason "error" if the request failed."""
        return [self._result_of(index) for index in sorted(self._new_results)]

    def cancel(self) -> None:
        """End the request with what it drew so far (finish_reason "cancelled"). No effect once it has ended."""
        if not self.done:
            self._cancel(self)

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces of text as they are drawn, like `TopWModel.stream`. Can be done only once per request.

        Leaving the loop early, or dropping its iterator, cancels the request.
        """
        if not self.done:
            self._check_caller("iteration")
        with self._lock:
            was_iterated, self._is_iterated = self._is_iterated, True
        if was_iterated:
            raise GenerationError("the pieces of a request can be read only once; use result() for the whole text.")
        try:
            while (event := self._events.get()) is not None:
                piece = self.read_piece(event)
                if piece is not None:
                    yield piece
        finally:
            self.cancel()  # no effect if all events were read
        self.raise_error()

    def read_piece(self, event: tuple[int, int | str | None, int]) -> Piece | None:
        """The piece of an event, in the reader's thread; None for a token that completes no character."""
        index, new, counted = event
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = _PieceReader(self.sequences[index], partial(self._result_of, index))
        return reader.piece(new, counted)

    def raise_error(self) -> None:
        """Raise the request's error, if it has one, always with the same traceback."""
        if self.error is not None:
            raise self.error.with_traceback(self._trace)

    def fail(self, error: BaseException) -> None:
        """Fail the request. Called by the engine's thread; the first error is kept."""
        if self.error is None:
            self.error, self._trace = error, error.__traceback__

    def end_streamer(self) -> None:
        """Call the streamer's `end`. An error in it fails the request."""
        if self.sequences.streamer is not None:
            try:
                self.sequences.streamer.end()
            except BaseException as error:  # noqa: BLE001  # the caller's code
                self.fail(error)

    def end_sequence(self, sequence: SequenceState, new_result: Callable[..., GenerationResult]) -> None:
        """Record the end of a sequence. Called in the delivering thread, after the sequence's other events.

        new_result: makes its result; takes `text`, see `Sequence.result`.
        """
        self._new_results[sequence.index] = new_result
        self.put_event((sequence.index, None, sequence.steps))
        if len(self._new_results) == len(self.sequences):
            self._done.set()
            self.put_event(None)
            self.on_end()

    def end_unstarted(self, reason: str) -> None:
        """End a request that the engine's thread never saw."""
        self.end_streamer()
        for state in self.sequences:
            state.interrupt(reason)
            EngineSequence(self, state).end(TokenOutputs())

    def _result_of(self, index: int, text: str | None = None) -> GenerationResult:
        """The result of an ended sequence. text: its text if the caller has decoded it already."""
        with self._lock:
            if index not in self._results:
                self._results[index] = self._new_results[index](text=text)
            return self._results[index]


class _PieceReader:
    """Turns the events of one sequence into pieces.

    result: makes the sequence's result; takes its text, or None if the engine's thread decoded it.
    """

    def __init__(self, state: SequenceState, result: Callable[[str | None], GenerationResult]) -> None:
        self._state, self._result = state, result
        self._decoder = state.new_text() if state.text is None else None
        self._texts: list[str] = []
        self._pending_tokens: list[int] = []  # tokens that no piece has had yet
        self._piece_tokens = 0  # number of tokens that pieces have had
        self._drawn = 0  # number of tokens so far

    def piece(self, new: int | str | None, counted: int) -> Piece | None:
        """The piece of an event; see `Event` and `Request.read_piece`."""
        self._drawn = self._drawn + 1 if new is not None and not counted else counted
        if isinstance(new, str):
            return self._new_piece(new, counted, self._state.take_new_tokens(counted))
        if new is not None:
            self._pending_tokens.append(new)
            text = "" if self._decoder is None else self._decoder.push(new)
            if not text:
                return None
            self._texts.append(text)
            tokens, self._pending_tokens = self._pending_tokens, []
            return self._new_piece(text, counted, tokens)
        text = "" if self._decoder is None else self._decoder.flush()
        result = self._result(None if self._decoder is None else "".join([*self._texts, text]))
        tokens = result.token_ids[self._piece_tokens :]  # includes an EOS, which has no event
        return self._new_piece(text, counted, tokens, result)

    def _new_piece(
        self, text: str, counted: int, tokens: Sequence[int], result: GenerationResult | None = None
    ) -> Piece:
        self._piece_tokens += len(tokens)
        scores = self._state.scores
        entries = None if scores is None else scores.take_new_entries(counted)
        return Piece(text, self._state.index, result, entries, self._drawn, tuple(tokens))


@dataclass(frozen=True)
class TokenOutputs:
    """The sampler's outputs for a sequence's tokens, as recorded by the batch. Joined when a result is read.

    parts: outputs of consecutive runs, in order.
    counted: which of the joined entries belong to the sequence's tokens; the others were drawn while its prompt was
        read.
    """

    parts: Sequence[SlotOutputs] = ()
    counted: slice = field(default_factory=lambda: slice(0))

    def array(self, name: str) -> np.ndarray:
        """Output `name`, [tokens]; empty if the graph lacks it."""
        arrays = [part[name] for part in self.parts if name in part]
        return np.concatenate(arrays)[self.counted] if arrays else np.zeros(0, np.int64)

    def values(self, name: str) -> list[Any]:
        """Output `name`, one value per token; [] if the graph lacks it."""
        return list(self.array(name).tolist())


class EngineSequence(ScheduledSequence):
    """One sequence in the engine's thread.

    state: its tokens, text, callbacks and grammar.
    prompt: int64 [n].
    reusable: the beginning of the prompt that may be reused. The run that reads the last token draws the first new one.
    prefill_began_at: time.perf_counter() before its first chunk; None until then.
    cached_tokens: tokens of the prompt that were reused instead of read.
    first_outputs: the outputs of the run that read the prompt's last chunk; None until then.
    drafted_outputs: the outputs of its later tokens up to the last run with drafts.
    spans: (slot, first step) for each slot that it has decoded in since then, in order.
    drafts: of its next tokens; None if it does not speculate.
    first_token_at: time.perf_counter() at its first token.
    has_ended: whether its result was handed over, or is about to be.
    """

    def __init__(self, request: Request, state: SequenceState) -> None:
        super().__init__(len(state.fed_prompt))
        self.request, self.state = request, state
        self.prompt = np.array(state.fed_prompt, np.int64)
        read_anyway = request.read_anyway
        self.reusable = self.prompt[: 0 if read_anyway is None else max(0, len(self.prompt) - read_anyway)]
        self.prefill_began_at: float | None = None
        self.cached_tokens = 0
        self.first_outputs: SlotOutputs | None = None
        self.drafted_outputs: list[SlotOutputs] = []
        self.spans: list[tuple[int, int]] = []
        self.drafts: DraftSource | None = None
        self.first_token_at = request.started
        self.has_ended = False

    def tokens_in_cache(self, outputs: TokenOutputs) -> np.ndarray:
        """The tokens in its slot while it decodes: all but the last drawn one, int64 [n]."""
        prompt = np.array(self.state.fed_prompt, np.int64) if self.state.discarded_draws else self.prompt
        return np.concatenate([prompt, outputs.array("next_token")])[:-1]

    def end(self, outputs: TokenOutputs) -> None:
        """Hand the result to the request."""
        request, state = self.request, self.state
        began_at = state.finished_at if self.prefill_began_at is None else self.prefill_began_at
        new_result = partial(
            state.result,
            outputs.values,
            request.session,
            load_seconds=request.load_seconds,
            started=request.started,
            prefilled=self.first_token_at,
            queued=max(0.0, began_at - request.started),
            cached_tokens=self.cached_tokens,
        )
        request.end_sequence(state, new_result)


class Group:
    """The sequences of a step, until one joins, leaves or moves.

    While every token only lengthens its sequence, the group counts the tokens and `settle` adds them later: each run
    evicts the sequences from the CPU cache, so touching them in every step is slow.

    sequences: in the order of their slots.
    drafting: the sequences with drafts.
    has_scores: whether a sequence has log-probabilities.
    can_pass: whether `passes` can return True.
    """

    def __init__(self, sequences: Sequence[EngineSequence], width: int) -> None:
        """width: number of slots of a step."""
        self.sequences = sorted(sequences, key=lambda sequence: sequence.slot)
        self._states = [sequence.state for sequence in self.sequences]
        self.drafting = [sequence for sequence in self.sequences if sequence.drafts is not None]
        self.has_scores = any(state.scores is not None for state in self._states)
        self.can_pass = len(sequences) == width and all(state.is_plain for state in self._states)
        self._fewest_left = min(state.tokens_left for state in self._states)
        self._ends = frozenset[int]().union(*(state.params.eos_token_ids for state in self._states))
        self._passed_steps = 0

    def passes(self, tokens: list[int]) -> bool:
        """Count a step's tokens if each only lengthens its sequence, as `Sequence.try_lengthen` does for one sequence.

        Otherwise counts nothing and returns False. Make a new group then.

        tokens: of all slots of a step.
        """
        if self._fewest_left <= 1 or min(tokens) < 0 or not self._ends.isdisjoint(tokens):
            return False
        self._fewest_left -= 1
        self._passed_steps += 1
        return True

    def settle(self) -> None:
        """Add the counted tokens to the sequences."""
        if self._passed_steps:
            for state in self._states:
                state.steps += self._passed_steps
            self._passed_steps = 0
