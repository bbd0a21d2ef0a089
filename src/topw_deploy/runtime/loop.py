"""The generation loop: `prefill`, then `decode_one_token` until all rows end.

Each run of the graph (decoder and sampler) is one step. The logits and the cache stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.callbacks import Criterion, RowCallbacks, Streamer
from topw_deploy.runtime.logprobs import LogitsBuffer, RowScores, TextOf
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.results import GenerationResult, Piece
from topw_deploy.runtime.row_inputs import Draws, SamplerInputs
from topw_deploy.runtime.rows import Row, StepRecord, TextDecoderFactory, new_row_text, row_result
from topw_deploy.runtime.structured.guide import Guide


class Generation:
    """A batch of B rows, and the arrays and the cache that are bound to the graph. The caller must close it.

    active, active_indices: the rows that have not ended.
    step: number of steps so far.
    prefilled_at: when all rows had their first token, by time.perf_counter(); 0 before.
    last_first_step: the step that draws the last row's first token.
    next_ids: the tokens that the next step reads, int64 [B].
    logits: where the graph's logits are copied, for rows with scores; or None.
    """

    def __init__(
        self, session: Session, caches: Caches, rows: Sequence[Row], logits: LogitsBuffer | None = None
    ) -> None:
        if any(row.unread_tokens for row in rows) and not caches.takes_ragged_batches:
            for row in rows:
                row.read_one_by_one()
        requests = [row.request for row in rows]
        prompts, budgets = [row.fed_prompt for row in rows], [r.request.budget + r.unread_tokens for r in rows]
        self.active = list(rows)
        self.active_indices = [row.index for row in rows]
        self.step = 0
        self.prefilled_at = 0.0
        self.last_first_step = max(row.discarded_draws for row in rows)
        self.draws = Draws([r.seed for r in requests], [r.sample for r in requests], [len(p) for p in prompts])
        self.inputs = SamplerInputs(session, len(rows))
        self.uniform_view = self.inputs.uniform.data
        for row in rows:
            if not row.unread_tokens:
                self.inputs.set(row.index, row.request)
        self.binding = session.bind()
        self.bound_inputs = self.inputs.bind(self.binding)
        self.logits = logits
        self.record = StepRecord(session.outputs, len(rows), max(budgets))
        self.record.bind(self.binding)
        self.cache = caches.open(self.binding, prompts, budgets)
        self.next_ids = self.cache.input_ids.reshape(-1).data
        for row in rows:
            self.update_mask(row)
            if not row.unread_tokens and row.request.budget == 0:
                row.end("length")
                self.retire(row)

    def close(self) -> None:
        """Release the cache and bindings."""
        self.binding.close()  # waits for an interrupted run
        self.cache.close()

    def retire(self, row: Row) -> None:
        """Make an ended row greedy, without rule, edits and mask. It stays in the batch; greedy rows cost least."""
        self.active.remove(row)
        self.active_indices.remove(row.index)
        self.next_ids[row.index] = row.request.pad_token_id
        self.inputs.clear(row.index)

    def begin_drawing(self, row: Row) -> None:
        """Make a row draw, with its parameters, edits and mask, from the next run on.

        Raises ParameterError for too many edits.
        """
        self.inputs.set(row.index, row.request)
        self.update_mask(row)

    def update_mask(self, row: Row) -> None:
        """Mask the tokens that a row's grammar does not allow next."""
        if row.guide is not None and not row.unread_tokens:
            self.inputs.masks.set(row.index, row.guide.mask)


def generate(generation: Generation) -> Iterator[list[tuple[Row, str]]]:
    """Yield for each step the rows that gained text or ended, with the new text."""
    if not generation.active:
        return
    tokens = prefill(generation)
    while True:
        changed = accept_tokens(generation, tokens)
        if generation.step <= generation.last_first_step + 1:
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
    g.cache.advance(g.active_indices)
    if g.logits is not None and g.logits.columns != 1:
        g.logits.bind(g.binding)
    return run_step(g)


def run_step(generation: Generation) -> list[int]:
    """Draw uniforms, run the graph and record its outputs. Returns the tokens [B]."""
    g = generation
    g.draws.write(g.step, g.uniform_view)
    if g.inputs.edits.is_active:
        g.inputs.edits.write_bans()
    g.inputs.update(g.bound_inputs)
    g.binding.run(g.step)
    tokens = g.record.store(g.step)
    g.step += 1
    return tokens


def accept_tokens(generation: Generation, tokens: list[int]) -> list[tuple[Row, str]]:
    """Add the drawn tokens to the rows. Returns the rows that gained text or ended, with the new text.

    Raises LogitsError for invalid logits.
    """
    g = generation
    changed = []
    for row in g.active:
        logits = g.logits.row(row.index) if g.logits is not None and row.needs_logits else None
        if row.unread_tokens:
            g.next_ids[row.index] = row.read_prompt_token(logits)
            if row.finish_reason is not None:
                changed.append((row, ""))
            elif not row.unread_tokens:
                g.begin_drawing(row)
            continue
        token = tokens[row.index]
        if token < 0:
            raise row.invalid_draw_error(f"row {row.index}")
        if g.inputs.edits.is_active:
            g.inputs.edits.add_token(row.index, token)
        gained = row.add_token(token, logits)
        g.next_ids[row.index] = token
        g.update_mask(row)
        if gained or row.finish_reason is not None:
            changed.append((row, gained))
    for row, _ in changed:
        if row.finish_reason is not None:
            g.retire(row)
    return changed


class RequestRun:
    """One call of `generate` or `stream`.

    Text is decoded at every token if `streaming` or with stop strings, otherwise at the end.

    load_seconds: the time that opening the model took, for the results.
    logits, text_of: a buffer and the text of a token, for requests with log-probabilities.
    guides: one per request; empty if no request has a constraint.
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        requests: Sequence[RowRequest],
        new_text_decoder: TextDecoderFactory,
        load_seconds: float,
        *,
        streaming: bool,
        streamer: Streamer | None = None,
        criteria: Sequence[Criterion] = (),
        logits: LogitsBuffer | None = None,
        text_of: TextOf = str,
        guides: Sequence[Guide | None] = (),
    ) -> None:
        self._session, self._caches, self._new_text_decoder = session, caches, new_text_decoder
        self._load_seconds, self._logits = load_seconds, logits
        self._streaming, self._streamer = streaming, streamer
        has_callbacks = streamer is not None or bool(criteria)
        self._rows = [
            Row(
                index,
                request,
                new_row_text(request, new_text_decoder) if streaming or request.stop_strings else None,
                RowCallbacks(request.prompt, request.budget, streamer, criteria) if has_callbacks else None,
                RowScores(request, text_of) if request.needs_scores else None,
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
                yield from self._run_steps()
            finally:
                self._generation.close()
        finally:  # a thread may be waiting for the streamer
            if self._streamer is not None:
                self._streamer.end()

    def _run_steps(self) -> Iterator[Piece]:
        for row in self._rows:
            if row.callbacks is not None:
                row.callbacks.stream_prompt()
            if row.finish_reason is not None:
                yield self._new_piece(row, "")
        for changed in generate(self._generation):
            for row, text in changed:
                yield self._new_piece(row, text)

    def _new_piece(self, row: Row, text: str) -> Piece:
        result = None if row.finish_reason is None else self._new_result(row)
        entries = row.scores.take_new_entries(row.steps) if self._streaming and row.scores is not None else None
        return Piece(text, row.index, result, entries, row.steps, row.take_new_tokens(row.steps))

    def _new_result(self, row: Row) -> GenerationResult:
        record, prefilled = self._generation.record, self._generation.prefilled_at
        return row_result(
            row,
            lambda name: record.values(name, row.index, row.discarded_draws + row.steps, row.discarded_draws),
            self._session,
            self._new_text_decoder,
            load_seconds=self._load_seconds,
            started=self._started,
            prefilled=prefilled or self._started,  # no prefill if a prompt fills the context
        )
