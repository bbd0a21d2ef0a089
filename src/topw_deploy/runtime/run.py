"""One request from its rows to its results: the loop's steps in, pieces of text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from topw_deploy.runtime import loop
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.callbacks import Criterion, Streamer, Watch
from topw_deploy.runtime.face import Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.results import GenerationResult, Piece, Timings
from topw_deploy.runtime.text import IncrementalDecoder, RowText


class Run:
    """A generation about to start. Text is followed token by token only where somebody waits for it: when
    `streaming`, and in rows with stop strings; the text of other rows is made once, at their end, in the same way.

    decode: token ids -> text. load_seconds: passed on to the results.
    streamer: is given the prompt and every token of the only row. criteria: end a row after a token; see callbacks.py.
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        requests: Sequence[RowRequest],
        decode: Callable[[Sequence[int]], str],
        load_seconds: float,
        *,
        streaming: bool,
        streamer: Streamer | None = None,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        self._session, self._caches, self._decode = session, caches, decode
        self._load_seconds = load_seconds
        self._streamer = streamer
        watched = streamer is not None or bool(criteria)
        self._rows = [
            loop.Row(
                index,
                request,
                self._text(request) if streaming or request.stop_strings else None,
                Watch(request.prompt, request.budget, streamer, criteria) if watched else None,
            )
            for index, request in enumerate(requests)
        ]

    def pieces(self) -> Iterator[Piece]:
        """Run to the end. The last piece of each row carries its result; rows without new text give no piece."""
        self._started = time.perf_counter()
        try:
            self._generation = loop.Generation(self._session, self._caches, self._rows)
            try:
                yield from self._steps()
            finally:
                self._generation.close()
        finally:  # whatever happened: a thread that reads from the streamer must not wait for ever
            if self._streamer is not None:
                self._streamer.end()

    def _steps(self) -> Iterator[Piece]:
        for row in self._rows:
            if row.watch is not None:
                row.watch.begin()
            if row.finish_reason is not None:  # its prompt fills the context
                yield Piece("", row.index, self._result(row))
        for changed in loop.generate(self._generation):
            for row, text in changed:
                yield Piece(text, row.index, None if row.finish_reason is None else self._result(row))

    def _text(self, request: RowRequest) -> RowText:
        return RowText(IncrementalDecoder(self._decode, request.prompt), request.stop_strings, request.min_new_tokens)

    def _result(self, row: loop.Row) -> GenerationResult:
        def recorded(name: str) -> list[Any]:
            return self._generation.record.of(name, row.index, row.steps)

        tokens = recorded("next_token")
        prefilled = self._generation.prefilled_at or self._started  # never, where a prompt fills the context
        return GenerationResult(
            text="".join(row.pieces) if row.text is not None else self._whole_text(row, tokens),
            token_ids=tokens,
            logprobs=recorded("logprob"),
            kept=recorded("kept"),
            certified=recorded("certified"),
            mass=recorded("mass") if "mass" in self._session.outputs else None,
            seed=row.request.seed,
            sample=row.request.sample,
            finish_reason=str(row.finish_reason),
            stop=row.stop,
            prompt_tokens=len(row.request.prompt),
            sampler=self._session.sampler,
            timings=Timings(
                load_seconds=self._load_seconds,
                prefill_seconds=prefilled - self._started,
                decode_seconds=max(0.0, row.finished_at - prefilled),
                decode_steps=max(0, row.steps - 1),
            ),
        )

    def _whole_text(self, row: loop.Row, tokens: Sequence[int]) -> str:
        text = self._text(row.request)
        shown = tokens[:-1] if isinstance(row.stop, int) else tokens  # the end of sequence is no text
        return "".join([text.push(token) for token in shown]) + text.flush()
