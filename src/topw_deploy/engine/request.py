"""A request from the caller's side: results, pieces and cancellation; and a flag that signal handlers can wait for."""

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
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.results import GenerationResult, Piece, TokenLogprob
from topw_deploy.runtime.rows import Follow, Row, new_text, result_of
from topw_deploy.runtime.text import RowText

Event: TypeAlias = "tuple[int, int | str | None, int] | None"
"""(sequence, its next shown token, or new text, or None at its end, tokens drawn until then); None after all
sequences."""


@dataclass(frozen=True)
class Ended:
    """An ended sequence.

    drawn: function from the name of a sampler's output to its values, one per token.
    begun_at: when the first chunk of its prompt was begun; None if it ended before.
    first_at: time of its first token.
    cached_tokens: see GenerationResult.
    """

    row: Row
    drawn: Callable[[str], list[Any]]
    begun_at: float | None
    first_at: float
    cached_tokens: int


@dataclass(frozen=True)
class Source:
    """The parts of the model that a request's results need. follow: see `topw_deploy.runtime.rows`."""

    session: Session
    follow: Follow
    load_seconds: float


class Request:
    """A submitted request of one or several sequences. Any thread may use it.

    error: why it failed, once it has.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        alone: bool,
        source: Source,
        cancel: Callable[[Request], None],
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
        check_caller: Callable[[str], None] = lambda what: None,
        deliver: Callable[..., None] = lambda function, *arguments: function(*arguments),
        started: float | None = None,
    ) -> None:
        """alone: whether there is one result, not a list. put: receives the events. on_end: called after the last one.

        check_caller: called with a method's name before it waits; see `Worker.check_caller`.
        deliver: calls `put` for the engine's thread; see `Worker.deliver`.
        started: when the caller asked, by time.perf_counter(); None for now.
        """
        self.started = time.perf_counter() if started is None else started
        self.error: BaseException | None = None
        self._rows, self._alone, self._source, self._cancel = rows, alone, source, cancel
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.take: Callable[[Event], None] = put or self._events.put
        self.put: Callable[[Event], None] = partial(deliver, self.take)  # by the engine's thread
        self._on_end, self._check_caller = on_end, check_caller
        self._trace: TracebackType | None = None  # the error's
        self._ended: dict[int, Ended] = {}
        self._results: dict[int, GenerationResult] = {}
        self._done = Flag()
        self._lock = threading.Lock()
        self._iterated = False

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
        return results[0] if self._alone else results

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
            again, self._iterated = self._iterated, True
        if again:
            raise GenerationError("the pieces of a request can be read only once; use result() for the whole text.")
        reader = PieceReader(self)
        try:
            while (event := self._events.get()) is not None:
                piece = reader.piece(event)
                if piece is not None:
                    yield piece
        finally:
            self.cancel()  # without effect at its end
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
        row = self._rows[index]
        return None if row.text is not None else new_text(row.request, self._source.follow)

    def next_scores(self, index: int, drawn: int) -> list[TokenLogprob] | None:
        """The log-probabilities of a sequence's first `drawn` tokens that no piece has had yet, if requested."""
        scores = self._rows[index].scores
        return None if scores is None else scores.next_piece(drawn)

    def next_tokens(self, index: int, drawn: int) -> tuple[int, ...]:
        """The first `drawn` tokens of a sequence with `Row.text` that no piece has had yet."""
        return self._rows[index].next_tokens(drawn)

    def fail(self, error: BaseException) -> None:
        """Fail the request. Called by the engine's thread; the first error is kept."""
        if self.error is None:
            self.error, self._trace = error, error.__traceback__

    def end_sequence(self, index: int, ended: Ended) -> None:
        """Called at the end of each sequence, after its events were delivered."""
        self._ended[index] = ended
        self.take((index, None, ended.row.steps))
        if len(self._ended) == len(self._rows):
            self._done.set()
            self.take(None)
            self._on_end()

    def _new_result(self, ended: Ended, text: str | None) -> GenerationResult:
        begun_at = ended.row.finished_at if ended.begun_at is None else ended.begun_at
        return result_of(
            ended.row,
            ended.drawn,
            self._source.session,
            self._source.follow,
            load_seconds=self._source.load_seconds,
            started=self.started,
            prefilled=ended.first_at,
            queued=max(0.0, begun_at - self.started),
            cached_tokens=ended.cached_tokens,
            text=text,
        )


class PieceReader:
    """Turns a request's events into pieces, in the reader's thread."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sequences: dict[int, _SequenceReader] = {}

    def piece(self, event: tuple[int, int | str | None, int]) -> Piece | None:
        """None for a token that ends no character."""
        index, new, counted = event
        sequence = self._sequences.get(index)
        if sequence is None:
            sequence = self._sequences[index] = _SequenceReader(self._request, index)
        return sequence.piece(new, counted)


class _SequenceReader:
    """One sequence's events."""

    __slots__ = ("_drawn", "_given", "_index", "_request", "_text", "_texts", "_waiting")

    def __init__(self, request: Request, index: int) -> None:
        self._request, self._index = request, index
        self._text = request.new_text(index)
        self._texts: list[str] = []  # of the pieces
        self._waiting: list[int] = []  # tokens that no piece has had yet
        self._given = 0  # tokens that pieces have had
        self._drawn = 0

    def piece(self, new: int | str | None, counted: int) -> Piece | None:
        request, index, text = self._request, self._index, self._text
        self._drawn = self._drawn + 1 if new is not None and not counted else counted  # 0: by the engine's thread
        if isinstance(new, str):
            return self._new(new, counted, request.next_tokens(index, counted))
        if new is not None:
            self._waiting.append(new)
            gained = "" if text is None else text.push(new)
            if not gained:
                return None
            self._texts.append(gained)
            tokens, self._waiting = self._waiting, []
            return self._new(gained, counted, tokens)
        last = "" if text is None else text.flush()
        result = request.result_of(index, None if text is None else "".join([*self._texts, last]))
        rest = result.token_ids[self._given :]  # with an EOS, which has no event
        return self._new(last, counted, rest, result)

    def _new(self, text: str, counted: int, tokens: Sequence[int], result: GenerationResult | None = None) -> Piece:
        self._given += len(tokens)
        scores = self._request.next_scores(self._index, counted)
        return Piece(text, self._index, result, scores, self._drawn, tuple(tokens))


class Flag:
    """Like threading.Event, but waiting takes no lock. A signal handler that interrupted the lock's holder and waited
    for the thread that calls `set`, as `Engine.shutdown` does, would deadlock.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[threading.Lock] = deque()  # each is held until `set`

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wake all threads that wait."""
        self._set = True
        with contextlib.suppress(IndexError):  # no more
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds. Returns whether it is."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        try:
            if not self._set:  # otherwise `set` may have missed it
                waiting.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            with contextlib.suppress(ValueError):  # `set` took it
                self._waiting.remove(waiting)
        return self._set
