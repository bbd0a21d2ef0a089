"""A request from the caller's side: results, pieces and cancellation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

from topw_deploy.engine.seconds import read_timeout
from topw_deploy.errors import GenerationError
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.results import GenerationResult, Piece, TokenLogprob
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.tokenizer import RowText

Event: TypeAlias = "tuple[int, int | str | None, int] | None"
"""(index of a sequence; its next token, or new text, or None at its end; number of its tokens so far).

The number is 0 for a token that the engine's thread did not count. None instead of a tuple follows the last event.
"""


@dataclass(frozen=True)
class EndedSequence:
    """An ended sequence.

    outputs: function from the name of a sampler's output to its values, one per token.
    prefill_began_at: time.perf_counter() before the first chunk of its prompt; None if it ended before.
    first_token_at: time.perf_counter() at its first token.
    cached_tokens: see GenerationResult.
    """

    sequence: GeneratedSequence
    outputs: Callable[[str], list[Any]]
    prefill_began_at: float | None
    first_token_at: float
    cached_tokens: int


class Request:
    """A submitted request of one or several sequences. Any thread may use it.

    sequences: their states.
    error: the error with which it failed; None if it did not fail.
    """

    def __init__(
        self,
        sequences: Sequences,
        session: Session,
        load_seconds: float,
        cancel: Callable[[Request], None],
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
        check_caller: Callable[[str], None] = lambda method: None,
        deliver: Callable[..., None] = lambda function, *arguments: function(*arguments),
        started: float | None = None,
    ) -> None:
        """`Engine.submit` creates requests.

        session, load_seconds: of the model, for the results.
        put: receives the events; None to let the request keep them for its iterator.
        on_end: called after the last event.
        check_caller: called with a method's name before the method waits; see `InboxThread.check_caller`.
        deliver: calls `put` on behalf of the engine's thread; see `EngineWorker.deliver`.
        started: time.perf_counter() at the caller's call; None for now.
        """
        self.started = time.perf_counter() if started is None else started
        self.error: BaseException | None = None
        self.sequences, self._cancel = sequences, cancel
        self._session, self._load_seconds = session, load_seconds
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put_event: Callable[[Event], None] = put or self._events.put  # in the delivering thread
        self.deliver_event: Callable[[Event], None] = partial(deliver, self.put_event)  # in the engine's thread
        self._on_end, self._check_caller = on_end, check_caller
        self._trace: TracebackType | None = None  # traceback of `error`
        self._ended: dict[int, EndedSequence] = {}
        self._results: dict[int, GenerationResult] = {}
        self._done = LockFreeEvent()
        self._lock = threading.Lock()
        self._is_iterated = False

    @property
    def done(self) -> bool:
        """Whether all sequences have ended."""
        return self._done.is_set()

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
        return [self.result_of(index) for index in sorted(self._ended)]

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
        reader = PieceReader(self)
        try:
            while (event := self._events.get()) is not None:
                piece = reader.piece(event)
                if piece is not None:
                    yield piece
        finally:
            self.cancel()  # no effect if all events were read
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the request's error, if it has one, always with the same traceback."""
        if self.error is not None:
            raise self.error.with_traceback(self._trace)

    def result_of(self, index: int, text: str | None = None) -> GenerationResult:
        """The result of an ended sequence. text: its text if the caller has decoded it already."""
        with self._lock:
            if index not in self._results:
                self._results[index] = self._new_result(self._ended[index], text)
            return self._results[index]

    def new_text(self, index: int) -> RowText | None:
        """A decoder of a sequence's tokens, or None if the engine's thread decodes them."""
        sequence = self.sequences[index]
        return None if sequence.text is not None else sequence.new_text()

    def next_scores(self, index: int, drawn: int) -> list[TokenLogprob] | None:
        """The log-probabilities of a sequence's first `drawn` tokens that no piece has had yet, if requested."""
        scores = self.sequences[index].scores
        return None if scores is None else scores.take_new_entries(drawn)

    def next_tokens(self, index: int, drawn: int) -> tuple[int, ...]:
        """Those of the first `drawn` tokens of a sequence that no piece has had yet. Only for sequences whose text the
        engine's thread decodes.
        """
        return self.sequences[index].take_new_tokens(drawn)

    def fail(self, error: BaseException) -> None:
        """Fail the request. Called by the engine's thread; the first error is kept."""
        if self.error is None:
            self.error, self._trace = error, error.__traceback__

    def end_sequence(self, index: int, ended: EndedSequence) -> None:
        """Record the end of a sequence. Called in the delivering thread, after the sequence's other events."""
        self._ended[index] = ended
        self.put_event((index, None, ended.sequence.steps))
        if len(self._ended) == len(self.sequences):
            self._done.set()
            self.put_event(None)
            self._on_end()

    def _new_result(self, ended: EndedSequence, text: str | None) -> GenerationResult:
        began_at = ended.sequence.finished_at if ended.prefill_began_at is None else ended.prefill_began_at
        return ended.sequence.result(
            ended.outputs,
            self._session,
            load_seconds=self._load_seconds,
            started=self.started,
            prefilled=ended.first_token_at,
            queued=max(0.0, began_at - self.started),
            cached_tokens=ended.cached_tokens,
            text=text,
        )


class PieceReader:
    """Turns a request's events into pieces, in the reader's thread."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sequences: dict[int, _SequenceReader] = {}

    def piece(self, event: tuple[int, int | str | None, int]) -> Piece | None:
        """The piece of an event; None for a token that completes no character."""
        index, new, counted = event
        sequence = self._sequences.get(index)
        if sequence is None:
            sequence = self._sequences[index] = _SequenceReader(self._request, index)
        return sequence.piece(new, counted)


class _SequenceReader:
    """Turns the events of one sequence into pieces."""

    __slots__ = ("_drawn", "_index", "_pending_tokens", "_piece_texts", "_piece_tokens", "_request", "_text")

    def __init__(self, request: Request, index: int) -> None:
        self._request, self._index = request, index
        self._text = request.new_text(index)
        self._piece_texts: list[str] = []
        self._pending_tokens: list[int] = []  # tokens that no piece has had yet
        self._piece_tokens = 0  # number of tokens that pieces have had
        self._drawn = 0  # number of tokens so far

    def piece(self, new: int | str | None, counted: int) -> Piece | None:
        """The piece of an event; see `Event` and `PieceReader.piece`."""
        request, index, decoder = self._request, self._index, self._text
        self._drawn = self._drawn + 1 if new is not None and not counted else counted
        if isinstance(new, str):
            return self._new_piece(new, counted, request.next_tokens(index, counted))
        if new is not None:
            self._pending_tokens.append(new)
            text = "" if decoder is None else decoder.push(new)
            if not text:
                return None
            self._piece_texts.append(text)
            tokens, self._pending_tokens = self._pending_tokens, []
            return self._new_piece(text, counted, tokens)
        text = "" if decoder is None else decoder.flush()
        result = request.result_of(index, None if decoder is None else "".join([*self._piece_texts, text]))
        tokens = result.token_ids[self._piece_tokens :]  # includes an EOS, which has no event
        return self._new_piece(text, counted, tokens, result)

    def _new_piece(
        self, text: str, counted: int, tokens: Sequence[int], result: GenerationResult | None = None
    ) -> Piece:
        self._piece_tokens += len(tokens)
        scores = self._request.next_scores(self._index, counted)
        return Piece(text, self._index, result, scores, self._drawn, tuple(tokens))


class LockFreeEvent:
    """Like threading.Event, but `wait` shares no lock with `set`.

    A signal handler may interrupt `wait` and wait for the thread that calls `set`, as `Engine.shutdown` does. With a
    shared lock, both threads would wait for each other.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()  # one per waiting thread; `set` releases them

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake all threads that wait."""
        self._is_set = True
        with contextlib.suppress(IndexError):  # the deque is empty
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most `timeout` seconds. Returns whether it is set."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        try:
            if not self._is_set:  # otherwise `set` may not have seen `waiting`
                waiting.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            with contextlib.suppress(ValueError):  # `set` removed it
                self._waiting.remove(waiting)
        return self._is_set
