"""From a call's arguments to the sequences that the engine runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from topw_deploy.engine.capacity import Capacity, Reservation
from topw_deploy.engine.job import Job, Submission
from topw_deploy.engine.options import Options
from topw_deploy.engine.request import Event, Request, Source
from topw_deploy.engine.seconds import read_max_time
from topw_deploy.engine.worker import Worker
from topw_deploy.errors import ParameterError
from topw_deploy.runtime.callbacks import Streamer, Watch
from topw_deploy.runtime.logprobs import Scores
from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.parameters import show
from topw_deploy.runtime.request import Limits, RowRequest
from topw_deploy.runtime.rows import Row, new_text
from topw_deploy.runtime.rules import longest_pool


@dataclass(frozen=True)
class Draft:
    """A request whose arguments are valid and whose grammars are not compiled yet.

    rows: one request per sequence.
    whole: the parameters that all sequences share.
    alone: whether it has one result, not a list.
    asked: when the caller asked, by time.perf_counter().
    max_time: seconds from then.
    reuses: whether its prompts may start after known prefixes.
    """

    rows: Sequence[RowRequest]
    whole: Mapping[str, Any]
    alone: bool
    asked: float
    max_time: float | None
    reuses: bool

    @property
    def compiles(self) -> bool:
        """Whether it has grammars."""
        return any(row.constraint is not None for row in self.rows)

    @property
    def streamer(self) -> Streamer | None:
        streamer: Streamer | None = self.whole["streamer"]
        return streamer


class Intake:
    """Checks calls and prepares their sequences, in any thread. Reserves no capacity."""

    def __init__(self, model: TopWModel, options: Options, capacity: Capacity, worker: Worker) -> None:
        session, _ = model._opened()
        sampler = model.manifest.sampler
        self._model, self._session, self._capacity, self._worker = model, session, capacity, worker
        self.limits = Limits(
            model.manifest.decoder.context_length,
            sampler.vocab_size,
            options.length,
            options.rows + options.queue,
            opened="engine",
            longest_pool=longest_pool(session.sampler, sampler),
            rules=sampler.rules,
        )

    def draft(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> Draft:
        """Raises ParameterError and PromptError, and GenerationError if the engine is closed or in another process."""
        asked = time.perf_counter()
        self._worker.check_process("submit")
        seconds = read_max_time(max_time)
        if not isinstance(reuse_prefix, bool):
            raise ParameterError(f"reuse_prefix is {show(reuse_prefix)}, but must be True or False.", "reuse_prefix")
        self._capacity.check()
        rows, whole, alone = self._model._requests(prompt, parameters, self.limits)
        return Draft(rows, whole, alone, asked, seconds, reuse_prefix)

    def submission(
        self,
        draft: Draft,
        *,
        put: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Submission:
        """Compile the grammars, and make the request. put, on_end: see `Request`. Raises GrammarError."""
        whole, tokenizer, guides = draft.whole, self._model.tokenizer, self._model._guides(draft.rows)

        def follow(ids: Sequence[int]) -> Any:
            return tokenizer.follow(ids, whole["skip_special_tokens"])

        def new_row(index: int, row: RowRequest) -> Row:
            watched = whole["streamer"] is not None or bool(whole["stopping_criteria"])
            watch = Watch(row.prompt, row.budget, whole["streamer"], whole["stopping_criteria"]) if watched else None
            text = new_text(row, follow) if row.stop_strings else None
            scores = Scores(row, tokenizer.text_of) if row.scored else None
            return Row(index, row, text, watch, scores, guides[index] if guides else None)

        generated = [new_row(index, row) for index, row in enumerate(draft.rows)]
        source = Source(self._session, follow, self._model.load_seconds)
        worker = self._worker
        cancel = partial(worker.end_early, reason="cancelled")
        request = Request(
            generated, draft.alone, source, cancel, put, on_end, worker.check_caller, worker.deliver, draft.asked
        )
        jobs = [Job(request, row, draft.reuses) for row in generated]
        deadline = None if draft.max_time is None else draft.asked + draft.max_time
        return Submission(request, jobs, Reservation(len(jobs)), deadline, draft.streamer)

    async def submission_aside(self, draft: Draft, **listeners: Any) -> Submission:
        """`submission`; grammars are compiled in a thread of the loop's executor.

        If the task is cancelled, the thread continues; its result is dropped and holds no engine resources.
        """
        prepare = partial(self.submission, draft, **listeners)
        return await asyncio.to_thread(prepare) if draft.compiles else prepare()
