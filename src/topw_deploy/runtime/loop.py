"""The generation loop: `prefill`, then `decode_one_token` until all rows end.

Each run of the graph (decoder and Top-W) is one step. Logits and cache stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from topw_deploy.errors import LogitsError
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.callbacks import Criterion, Streamer, Watch
from topw_deploy.runtime.draws import Draws
from topw_deploy.runtime.edits import Edits
from topw_deploy.runtime.memory import zeroed
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.results import GenerationResult, Piece, Timings
from topw_deploy.runtime.text import IncrementalDecoder, RowText
from topw_deploy.sampling.parameters import PARAMETER_NAMES

# Sorted by descending element size, for alignment.
_RECORDED: dict[str, type[Any]] = {
    "next_token": np.int64,
    "logprob": np.float32,
    "mass": np.float32,
    "kept": np.int32,
    "certified": np.bool_,
}


class Row:
    """One sequence.

    text: incremental text, or None if the text is decoded only at the end.
    watch: its callbacks, or None.
    """

    def __init__(self, index: int, request: RowRequest, text: RowText | None, watch: Watch | None = None) -> None:
        self.index, self.request, self.text, self.watch = index, request, text, watch
        self.steps = 0
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.stop: int | str | None = None
        self.finished_at = 0.0  # time.perf_counter()

    def take(self, token: int) -> str:
        """Add a drawn token. Returns new text."""
        self.steps += 1
        gained = ""
        if self.watch is not None:
            self.watch.take(token)
        if token in self.request.eos_token_ids:
            self.end("stop", token)
        elif self.text is not None:
            gained = self.text.push(token)
            if self.text.found is not None:
                self.end("stop", self.text.found)
        if self.finish_reason is None and self.watch is not None:
            criterion = self.watch.ended_by()
            if criterion is not None:
                self.end("criterion", criterion)
        if self.finish_reason is None and self.steps == self.request.budget:
            self.end("length")
        if self.text is not None:
            gained += self._last_of(self.text)
            if gained:
                self.pieces.append(gained)
        return gained

    def _last_of(self, text: RowText) -> str:
        if self.finish_reason is None:
            return ""
        gained = text.flush()  # may complete a stop string
        if self.finish_reason != "stop" and text.found is not None:
            self.end("stop", text.found)
        return gained

    def end(self, reason: str, stop: int | str | None = None) -> None:
        self.finish_reason, self.stop, self.finished_at = reason, stop, time.perf_counter()


class Record:
    """The sampler's outputs per step, each [B].

    One array and memoryviews make a step one cheap copy: numpy assignment runs more code, which each run evicts from
    the CPU cache.
    """

    def __init__(self, outputs: Collection[str], binding: Binding, batch: int, steps: int) -> None:
        self._columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED.items():
            if name in outputs:
                self._columns[name] = slice(end, end := end + batch * np.dtype(dtype).itemsize)
        latest = np.zeros(end, np.uint8)
        for name, column in self._columns.items():
            binding.bind_result(name, latest[column].view(_RECORDED[name]))
        self._size = end
        self._latest, self._tokens = latest.data, latest[self._columns["next_token"]].view(np.int64).data
        self._steps = zeroed("the record of the steps", (steps, end), np.uint8)
        self._kept = self._steps.reshape(-1).data

    def keep(self, step: int) -> list[int]:
        """Copy the last run's outputs. Returns its tokens [B]."""
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def of(self, name: str, row: int, steps: int) -> list[Any]:
        """Output `name` over the row's steps; [] if the graph lacks it."""
        if name not in self._columns:
            return []
        values = np.ascontiguousarray(self._steps[:steps, self._columns[name]]).view(_RECORDED[name])  # [steps, B]
        return list(values[:, row].tolist())


class Generation:
    """A batch of B rows and the arrays bound to the graph. The caller must close it."""

    def __init__(self, session: Session, caches: Caches, rows: Sequence[Row]) -> None:
        requests = [row.request for row in rows]
        batch, prompts, budgets = len(rows), [r.prompt for r in requests], [r.budget for r in requests]
        self.active = list(rows)
        self.going_on = list(range(batch))
        self.step = 0
        self.prefilled_at = 0.0  # time.perf_counter()
        self.edits = Edits(requests, session.fixed_edits, session.most_edits)
        self.binding = session.bind()
        self.draws = Draws([r.seed for r in requests], [r.sample for r in requests], [len(p) for p in prompts])
        self.uniform = np.zeros(batch, np.float32)  # [B]
        self.binding.bind_changing("uniform", self.uniform)
        self.uniform_view = self.uniform.data
        self.temperature = self._bind_parameters(requests)  # [B]
        self.edits.bind(self.binding)
        self.record = Record(session.outputs, self.binding, batch, max(budgets))
        self.caches, self.cache = caches, caches.open(self.binding, prompts, budgets)
        self.next_ids = self.cache.input_ids.reshape(-1).data  # [B] next inputs
        for row in rows:
            if row.request.budget == 0:
                row.end("length")
                self.retire(row)

    def close(self) -> None:
        """Release the cache and bindings."""
        self.binding.close()  # waits for an interrupted run
        self.caches.close(self.cache)

    def retire(self, row: Row) -> None:
        """Make an ended row greedy and remove its edits: it stays in the batch, and this is cheapest."""
        self.active.remove(row)
        self.going_on.remove(row.index)
        self.next_ids[row.index] = row.request.pad_token_id
        self.edits.retire(row.index)
        self.temperature[row.index] = 0.0
        self.binding.refresh("temperature")

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
    changed = accept(generation, prefill(generation))
    generation.prefilled_at = time.perf_counter()
    while True:
        if changed:
            yield changed
            if not generation.active:
                return
        changed = accept(generation, decode_one_token(generation))


def prefill(generation: Generation) -> list[int]:
    """Run the prompts and draw each row's first token. [B, S] -> [B]"""
    g = generation
    g.cache.feed_prompts()
    tokens = run_step(g)
    g.cache.begin_decoding()
    return tokens


def decode_one_token(generation: Generation) -> list[int]:
    """Feed each row's last token and draw the next. [B, 1] -> [B]"""
    g = generation
    g.cache.advance(g.going_on)
    return run_step(g)


def run_step(generation: Generation) -> list[int]:
    """Draw uniforms, run the graph and record its outputs. Returns the tokens [B]."""
    g = generation
    g.draws.write(g.step, g.uniform_view)
    if g.edits.active:
        g.edits.prepare(g.binding)
    g.binding.run(g.step)
    tokens = g.record.keep(g.step)
    g.step += 1
    return tokens


def accept(generation: Generation, tokens: list[int]) -> list[tuple[Row, str]]:
    """Add the drawn tokens to the rows. Returns the rows that gained text or ended, with the new text.

    Raises LogitsError for invalid logits.
    """
    g = generation
    if g.edits.active:
        g.edits.accept(tokens)
    changed = []
    for row in g.active:
        token = tokens[row.index]
        if token < 0:
            raise LogitsError(
                f"row {row.index} is invalid at step {row.steps}: its logits contain NaN or +infinity, or none is "
                "finite after the edits; check the model with `topw verify`, and the penalties, biases and bans."
            )
        gained = row.take(token)
        g.next_ids[row.index] = token
        if gained or row.finish_reason is not None:
            changed.append((row, gained))
    for row, _ in changed:
        if row.finish_reason is not None:
            g.retire(row)
    return changed


class RequestRun:
    """One call of `generate` or `stream`.

    Text is decoded at every token if `streaming` or with stop strings, otherwise at the end.

    follow: function from prompt ids to a decoder of the tokens after them.
    load_seconds: for the results.
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        requests: Sequence[RowRequest],
        follow: Callable[[Sequence[int]], IncrementalDecoder],
        load_seconds: float,
        *,
        streaming: bool,
        streamer: Streamer | None = None,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        self._session, self._caches, self._follow = session, caches, follow
        self._load_seconds = load_seconds
        self._streamer = streamer
        watched = streamer is not None or bool(criteria)
        self._rows = [
            Row(
                index,
                request,
                self._text(request) if streaming or request.stop_strings else None,
                Watch(request.prompt, request.budget, streamer, criteria) if watched else None,
            )
            for index, request in enumerate(requests)
        ]

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces of new text; a row's last piece has its result."""
        self._started = time.perf_counter()
        try:
            self._generation = Generation(self._session, self._caches, self._rows)
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
                yield Piece("", row.index, self._result(row))
        for changed in generate(self._generation):
            for row, text in changed:
                yield Piece(text, row.index, None if row.finish_reason is None else self._result(row))

    def _text(self, request: RowRequest) -> RowText:
        return RowText(self._follow(request.prompt), request.stop_strings, request.min_new_tokens)

    def _result(self, row: Row) -> GenerationResult:
        def recorded(name: str) -> list[Any]:
            return self._generation.record.of(name, row.index, row.steps)

        tokens = recorded("next_token")
        prefilled = self._generation.prefilled_at or self._started  # no prefill if a prompt fills the context
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

    def _whole_text(self, row: Row, tokens: Sequence[int]) -> str:
        text = self._text(row.request)
        shown = tokens[:-1] if isinstance(row.stop, int) else tokens  # without EOS
        return "".join([text.push(token) for token in shown]) + text.flush()
