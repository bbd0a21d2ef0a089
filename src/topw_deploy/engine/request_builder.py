"""Makes requests and their sequences from the arguments of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from topw_deploy.engine.capacity import Capacity, Reservation
from topw_deploy.engine.options import EngineOptions
from topw_deploy.engine.request import Event, Request, ResultContext
from topw_deploy.engine.seconds import read_max_time
from topw_deploy.engine.sequences import RequestSequence, Submission
from topw_deploy.engine.worker import EngineWorker
from topw_deploy.errors import ParameterError
from topw_deploy.plain_text import short_repr
from topw_deploy.runtime.callbacks import RowCallbacks, Streamer
from topw_deploy.runtime.limits import Limits
from topw_deploy.runtime.logprobs import RowScores
from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.rows import Row, new_row_text
from topw_deploy.runtime.rules import longest_pool


@dataclass(frozen=True)
class RequestDraft:
    """A request whose arguments are valid and whose grammars are not compiled yet.

    rows: one request per sequence.
    shared: the parameters that all sequences share.
    is_single: whether it has one result, not a list.
    started: time.perf_counter() at the caller's call.
    max_time: seconds from then.
    reuses_prefix: whether its prompts may start after known prefixes.
    """

    rows: Sequence[RowRequest]
    shared: Mapping[str, Any]
    is_single: bool
    started: float
    max_time: float | None
    reuses_prefix: bool

    @property
    def has_grammars(self) -> bool:
        """Whether `RequestBuilder.build` must compile grammars, which may take seconds."""
        return any(row.constraint is not None for row in self.rows)

    @property
    def streamer(self) -> Streamer | None:
        streamer: Streamer | None = self.shared["streamer"]
        return streamer


class RequestBuilder:
    """Checks a call's arguments, and makes its request. Any thread may use it. Reserves no capacity."""

    def __init__(self, model: TopWModel, options: EngineOptions, capacity: Capacity, worker: EngineWorker) -> None:
        session, _ = model._require_open()
        sampler = model.manifest.sampler
        self._model, self._session, self._capacity, self._worker = model, session, capacity, worker
        self.limits = Limits(
            model.manifest.decoder.context_length,
            sampler.vocab_size,
            options.length,
            options.rows + options.queue,
            opened_as="engine",
            longest_pool=longest_pool(session.sampler, sampler),
            rules=sampler.rules,
        )

    def draft(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> RequestDraft:
        """Check the arguments of a call.

        Raises ParameterError and PromptError, and GenerationError if the engine is closed or in another process.
        """
        started = time.perf_counter()
        self._worker.check_process("submit")
        seconds = read_max_time(max_time)
        if not isinstance(reuse_prefix, bool):
            raise ParameterError(
                f"reuse_prefix is {short_repr(reuse_prefix)}, but must be True or False.", "reuse_prefix"
            )
        self._capacity.check_open()
        rows, shared, is_single = self._model._resolve_requests(prompt, parameters, self.limits)
        return RequestDraft(rows, shared, is_single, started, seconds, reuse_prefix)

    def build(
        self,
        draft: RequestDraft,
        *,
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Submission:
        """Compile the grammars, and make the request. put, on_end: see `Request`. Raises GrammarError."""
        shared, tokenizer, guides = draft.shared, self._model.tokenizer, self._model._new_guides(draft.rows)

        def new_text_decoder(ids: Sequence[int]) -> Any:
            return tokenizer.text_decoder(ids, shared["skip_special_tokens"])

        def new_row(index: int, row: RowRequest) -> Row:
            has_callbacks = shared["streamer"] is not None or bool(shared["stopping_criteria"])
            watch = None
            if has_callbacks:
                watch = RowCallbacks(row.prompt, row.budget, shared["streamer"], shared["stopping_criteria"])
            text = new_row_text(row, new_text_decoder) if row.stop_strings else None
            scores = RowScores(row, tokenizer.text_of) if row.needs_scores else None
            return Row(index, row, text, watch, scores, guides[index] if guides else None)

        rows = [new_row(index, row) for index, row in enumerate(draft.rows)]
        worker = self._worker
        request = Request(
            rows,
            draft.is_single,
            ResultContext(self._session, new_text_decoder, self._model.load_seconds),
            cancel=partial(worker.end_early, reason="cancelled"),
            put=put,
            on_end=on_end,
            check_caller=worker.check_caller,
            deliver=worker.deliver,
            started=draft.started,
        )
        sequences = [RequestSequence(request, row, draft.reuses_prefix) for row in rows]
        deadline = None if draft.max_time is None else draft.started + draft.max_time
        return Submission(request, sequences, Reservation(len(sequences)), deadline, draft.streamer)

    async def build_async(self, draft: RequestDraft, **listeners: Any) -> Submission:
        """Like `build`, but grammars are compiled in a thread of the loop's executor.

        If the task is cancelled, the thread continues; its result is dropped and holds no engine resources.
        """
        build = partial(self.build, draft, **listeners)
        return await asyncio.to_thread(build) if draft.has_grammars else build()
