"""The generation loop: `prefill`, then `decode_one_token` until all rows end.

Each run of the graph (decoder and Top-W) is one step. Logits and cache stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.callbacks import Criterion, Streamer, Watch
from topw_deploy.runtime.logprobs import Logits, Scores, TextOf
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.results import GenerationResult, Piece
from topw_deploy.runtime.row_inputs import Allowed, Draws, Edits, Rules
from topw_deploy.runtime.rows import Follow, Record, Row, new_text, result_of
from topw_deploy.runtime.structured.guide import Guide
from topw_deploy.sampling.parameters import PARAMETER_NAMES


class Generation:
    """A batch of B rows and the arrays bound to the graph. The caller must close it.

    logits: the graph's output, for rows with scores.
    """

    def __init__(self, session: Session, caches: Caches, rows: Sequence[Row], logits: Logits | None = None) -> None:
        if any(row.unread for row in rows) and not caches.takes_ragged_batches:
            for row in rows:
                row.read_one_by_one()
        requests = [row.request for row in rows]
        batch, prompts, budgets = len(rows), [row.given for row in rows], [r.request.budget + r.unread for r in rows]
        self.active = list(rows)
        self.going_on = list(range(batch))
        self.step = 0
        self.prefilled_at = 0.0  # time.perf_counter()
        self.last_first = max(row.skipped for row in rows)  # step of the last row's first token
        edited = [None if row.unread else row.request for row in rows]
        self.edits = Edits(edited, session.fixed_edits, session.most_edits)
        self.allowed = Allowed(batch, session.mask_words, always=session.always_masked)
        for row in rows:
            if row.request.allowed_token_ids and not row.unread:
                self.allowed.limit(row.index, row.request.allowed_token_ids)
        self.binding = session.bind()
        self.draws = Draws([r.seed for r in requests], [r.sample for r in requests], [len(p) for p in prompts])
        self.uniform = np.zeros(batch, np.float32)  # [B]
        self.binding.bind_changing("uniform", self.uniform)
        self.uniform_view = self.uniform.data
        self.temperature = self._bind_parameters(requests)  # [B]
        self.rules = Rules(batch)
        for row in rows:
            if not row.unread:
                self.rules.set(row.index, row.request.rule)
        self.rules.bind(self.binding)
        self.edits.bind(self.binding)
        self.allowed.bind(self.binding)
        self.logits = logits
        self.record = Record(session.outputs, batch, max(budgets))
        self.record.bind(self.binding)
        self.cache = caches.open(self.binding, prompts, budgets)
        self.next_ids = self.cache.input_ids.reshape(-1).data  # [B] next inputs
        for row in rows:
            self.allow(row)
            if row.unread:
                self.temperature[row.index] = 0.0  # cheapest: its draws do not count
            elif row.request.budget == 0:
                row.end("length")
                self.retire(row)

    def close(self) -> None:
        """Release the cache and bindings."""
        self.binding.close()  # waits for an interrupted run
        self.cache.close()

    def retire(self, row: Row) -> None:
        """Make an ended row greedy, without rule, edits and mask. It stays in the batch; greedy rows cost least."""
        self.active.remove(row)
        self.going_on.remove(row.index)
        self.next_ids[row.index] = row.request.pad_token_id
        self.edits.clear(row.index)
        self.allowed.clear(row.index)
        self.rules.clear(row.index)
        self.rules.refresh(self.binding)
        self.temperature[row.index] = 0.0
        self.binding.refresh("temperature")

    def begin_drawing(self, row: Row) -> None:
        """Make a row draw, with its parameters, edits and mask, from the next run on.

        Raises ParameterError for too many edits.
        """
        self.temperature[row.index] = row.request.top_w.temperature
        self.binding.refresh("temperature")
        self.rules.set(row.index, row.request.rule)
        self.rules.refresh(self.binding)
        self.edits.set(row.index, row.request)
        if row.request.allowed_token_ids:
            self.allowed.limit(row.index, row.request.allowed_token_ids)
        self.allow(row)

    def allow(self, row: Row) -> None:
        """Pass on which tokens a row's grammar allows next."""
        if row.guide is not None and not row.unread:
            self.allowed.set(row.index, row.guide.mask)

    def _bind_parameters(self, requests: Sequence[RowRequest]) -> np.ndarray:
        for name in PARAMETER_NAMES:
            values = np.array([getattr(r.top_w, name) for r in requests], np.float32)  # [B]
            self.binding.bind_array(name, values)
            if name == "temperature":
                temperature = values
        return temperature


def generate(generation: Generation) -> Iterator[list[tuple[Row, str]]]:
    """Yields for each step the rows that gained text or ended, with the new text."""
    if not generation.active:
        return
    tokens = prefill(generation)
    while True:
        changed = accept(generation, tokens)
        if generation.step <= generation.last_first + 1:
            generation.prefilled_at = time.perf_counter()
        if changed:
            yield changed
            if not generation.active:
                return
        tokens = decode_one_token(generation)


def prefill(generation: Generation) -> list[int]:
    """Run the prompts and draw each row's first token. [B, S] -> [B]"""
    g = generation
    columns = g.cache.feed_prompts()
    if g.logits is not None:
        g.logits.bind(g.binding, columns=columns)
    tokens = run_step(g)
    g.cache.begin_decoding()
    return tokens


def decode_one_token(generation: Generation) -> list[int]:
    """Feed each row's last token and draw the next. [B, 1] -> [B]"""
    g = generation
    g.cache.advance(g.going_on)
    if g.logits is not None and g.logits.columns != 1:
        g.logits.bind(g.binding)
    return run_step(g)


def run_step(generation: Generation) -> list[int]:
    """Draw uniforms, run the graph and record its outputs. Returns the tokens [B]."""
    g = generation
    g.draws.write(g.step, g.uniform_view)
    if g.edits.active:
        g.edits.prepare(g.binding)
    g.allowed.prepare(g.binding)
    g.binding.run(g.step)
    tokens = g.record.keep(g.step)
    g.step += 1
    return tokens


def accept(generation: Generation, tokens: list[int]) -> list[tuple[Row, str]]:
    """Add the drawn tokens to the rows. Returns the rows that gained text or ended, with the new text.

    Raises LogitsError for invalid logits.
    """
    g = generation
    changed = []
    for row in g.active:
        logits = g.logits.of(row.index) if g.logits is not None and row.wants_logits else None
        if row.unread:
            g.next_ids[row.index] = row.read(logits)
            if row.finish_reason is not None:
                changed.append((row, ""))
            elif not row.unread:
                g.begin_drawing(row)
            continue
        token = tokens[row.index]
        if token < 0:
            raise row.invalid(f"row {row.index}")
        if g.edits.active:
            g.edits.add(row.index, token)
        gained = row.take(token, logits)
        g.next_ids[row.index] = token
        g.allow(row)
        if gained or row.finish_reason is not None:
            changed.append((row, gained))
    for row, _ in changed:
        if row.finish_reason is not None:
            g.retire(row)
    return changed


class RequestRun:
    """One call of `generate` or `stream`.

    Text is decoded at every token if `streaming` or with stop strings, otherwise at the end.

    load_seconds: for the results.
    logits, text_of: for requests with log-probabilities.
    guides: one per request, or none at all.
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        requests: Sequence[RowRequest],
        follow: Follow,
        load_seconds: float,
        *,
        streaming: bool,
        streamer: Streamer | None = None,
        criteria: Sequence[Criterion] = (),
        logits: Logits | None = None,
        text_of: TextOf = str,
        guides: Sequence[Guide | None] = (),
    ) -> None:
        self._session, self._caches, self._follow = session, caches, follow
        self._load_seconds, self._logits = load_seconds, logits
        self._streaming, self._streamer = streaming, streamer
        watched = streamer is not None or bool(criteria)
        self._rows = [
            Row(
                index,
                request,
                new_text(request, follow) if streaming or request.stop_strings else None,
                Watch(request.prompt, request.budget, streamer, criteria) if watched else None,
                Scores(request, text_of) if request.scored else None,
                guides[index] if guides else None,
            )
            for index, request in enumerate(requests)
        ]

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces of new text; a row's last piece has its result."""
        self._started = time.perf_counter()
        try:
            self._generation = Generation(self._session, self._caches, self._rows, self._logits)
            try:
                yield from self._steps()
            finally:
                self._generation.close()
        finally:  # a thread may be waiting for the streamer
            if self._streamer is not None:
                self._streamer.end()

    def _steps(self) -> Iterator[Piece]:
        for row in self._rows:
            if row.watch is not None:
                row.watch.begin()
            if row.finish_reason is not None:
                yield self._piece(row, "")
        for changed in generate(self._generation):
            for row, text in changed:
                yield self._piece(row, text)

    def _piece(self, row: Row, text: str) -> Piece:
        result = None if row.finish_reason is None else self._result(row)
        entries = row.scores.next_piece(row.steps) if self._streaming and row.scores is not None else None
        return Piece(text, row.index, result, entries, row.steps, row.next_tokens(row.steps))

    def _result(self, row: Row) -> GenerationResult:
        record, prefilled = self._generation.record, self._generation.prefilled_at
        return result_of(
            row,
            lambda name: record.of(name, row.index, row.skipped + row.steps, row.skipped),
            self._session,
            self._follow,
            load_seconds=self._load_seconds,
            started=self._started,
            prefilled=prefilled or self._started,  # no prefill if a prompt fills the context
        )
