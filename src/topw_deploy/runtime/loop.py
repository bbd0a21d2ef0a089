"""The generation loop: `prefill`, `decode_one_token`, and `sample`, which both of them end in.

The decoder and Top-W are one graph, so a step is one run: it takes the last tokens, each row's parameters, edits and
uniform number, and gives the next tokens. Only those cross to the host; logits and the cache never do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from topw_deploy.errors import GenerationError
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.callbacks import Watch
from topw_deploy.runtime.draws import Draws
from topw_deploy.runtime.edits import Edits
from topw_deploy.runtime.face import Session
from topw_deploy.runtime.record import Record
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.text import RowText
from topw_deploy.sampling.parameters import PARAMETER_NAMES


class Row:
    """One sequence in progress. `text` is None where nobody needs text before the end, `watch` where no code of the
    caller follows the tokens."""

    def __init__(self, index: int, request: RowRequest, text: RowText | None, watch: Watch | None = None) -> None:
        self.index, self.request, self.text, self.watch = index, request, text, watch
        self.steps = 0  # tokens drawn
        self.pieces: list[str] = []  # text gained so far
        self.finish_reason: str | None = None
        self.stop: int | str | None = None
        self.finished_at = 0.0  # time.perf_counter()

    def take(self, token: int) -> str:
        """Add a drawn token. Returns the text gained; sets `finish_reason` and `stop` when it was the last one."""
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
        """What `text` held back, once the row has ended."""
        if self.finish_reason is None:
            return ""
        gained = text.flush()  # where a stop string may come to light that was held back with half a character
        if self.finish_reason != "stop" and text.found is not None:
            self.end("stop", text.found)
        return gained

    def end(self, reason: str, stop: int | str | None = None) -> None:
        self.finish_reason, self.stop, self.finished_at = reason, stop, time.perf_counter()


class Generation:
    """The state of one batch: arrays that the graph reads and writes, bound once wherever that is possible.

    Shapes below: B rows, S tokens of the longest prompt. To be closed when it has ended or is given up.
    """

    def __init__(self, session: Session, caches: Caches, rows: Sequence[Row]) -> None:
        requests = [row.request for row in rows]
        batch, prompts, budgets = len(rows), [r.prompt for r in requests], [r.budget for r in requests]
        self.active = list(rows)
        self.going_on = list(range(batch))  # the active rows' numbers
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
        self.next_ids = self.cache.input_ids.reshape(-1).data  # [B] what the next step feeds
        for row in rows:
            if row.request.budget == 0:
                row.end("length")
                self.retire(row)

    def close(self) -> None:
        """Let go of the cache and of the bindings."""
        self.binding.close()  # which waits for a run that was interrupted
        self.caches.close(self.cache)

    def retire(self, row: Row) -> None:
        """Spend no more on the ended `row` than the graph must, which runs it with the others: greedy, no edits."""
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
    """Run `generation` to its end. Yields the rows that gained text or ended, with the text, whenever there are any."""
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
    """Run the prompts, all at once or piece by piece, and draw each row's first token. [B, S] -> [B]"""
    g = generation
    g.cache.feed_prompts()
    tokens = sample(g)
    g.cache.begin_decoding()
    return tokens


def decode_one_token(generation: Generation) -> list[int]:
    """Feed every row the token it drew last and draw the next one. [B, 1] -> [B]"""
    g = generation
    g.cache.advance(g.going_on)
    return sample(g)


def sample(generation: Generation) -> list[int]:
    """Bind what the draw of this step needs, run the graph, and keep what it gives. -> [B]"""
    g = generation
    g.draws.write(g.step, g.uniform_view)
    if g.edits.active:
        g.edits.prepare(g.binding)
    g.binding.run(g.step)
    tokens = g.record.keep(g.step)
    g.step += 1
    return tokens


def accept(generation: Generation, tokens: list[int]) -> list[tuple[Row, str]]:
    """Take the drawn tokens into their rows and end those that are done. -> rows that gained text or ended"""
    g = generation
    if g.edits.active:
        g.edits.accept(tokens)
    changed = []
    for row in g.active:
        token = tokens[row.index]
        if token < 0:
            raise GenerationError(
                f"row {row.index} is invalid at step {row.steps}: its logits hold NaN or +infinity, or none is finite "
                "after the edits; check the model with `topw verify`, and the request's penalties, biases and bans."
            )
        gained = row.take(token)
        g.next_ids[row.index] = token
        if gained or row.finish_reason is not None:
            changed.append((row, gained))
    for row, _ in changed:
        if row.finish_reason is not None:
            g.retire(row)
    return changed
