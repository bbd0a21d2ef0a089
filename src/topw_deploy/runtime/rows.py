"""The sequences of a generation: the tokens that each has drawn, its text, its end and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES, array_name
from topw_deploy.errors import LogitsError
from topw_deploy.runtime.cache.buffers import allocate_zeros
from topw_deploy.runtime.callbacks import RowCallbacks
from topw_deploy.runtime.logprobs import RowScores
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.runtime.results import GenerationResult, Timings
from topw_deploy.runtime.structured.guide import Guide
from topw_deploy.runtime.text import IncrementalDecoder, RowText

TextDecoderFactory: TypeAlias = "Callable[[Sequence[int]], IncrementalDecoder]"
"""A function from the ids of a prompt to a decoder of the tokens after the prompt."""

# Sorted by descending element size, for alignment.
_RECORDED_TYPES = {
    name: np.dtype(array_name(SAMPLER_OUTPUT_TYPES[name]))
    for name in ("next_token", "logprob", "mass", "kept", "certified")
}

RowOutputs: TypeAlias = dict[str, np.ndarray]
"""The outputs of a row, [steps] each, by name; without those that the graph lacks."""


class Row:
    """One sequence.

    text: incremental text, or None if the text is decoded only at the end.
    callbacks: the row's streamer and stopping criteria, or None.
    guide: the tokens that the row's grammar allows next, or None.
    scores: the log-probabilities of the row's tokens under the model, or None.
    unread_tokens: number of tokens at the end of the prompt that are still to be read one by one. Every run but the
        first reads one of them, and the run's draw is discarded.
    discarded_draws: number of runs whose draws are discarded.
    steps: number of tokens drawn.
    tokens: the tokens drawn if `text` is not None, else empty.
    is_plain: whether a token that does not end the row only adds to its length.
    """

    def __init__(
        self,
        index: int,
        request: RowRequest,
        text: RowText | None,
        callbacks: RowCallbacks | None = None,
        scores: RowScores | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.index, self.request, self.text, self.callbacks = index, request, text, callbacks
        self.scores, self.guide = scores, guide
        self.unread_tokens = self.discarded_draws = 0
        if request.prompt_logprobs is not None:
            self.read_one_by_one()
        self.steps = 0
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self._returned_tokens = 0  # by `take_new_tokens`
        self.finish_reason: str | None = None
        self.stop: int | str | None = None
        self.finished_at = 0.0  # time.perf_counter()
        self.is_plain = text is None and callbacks is None and scores is None and guide is None
        self._ends, self._budget = request.eos_token_ids, request.budget

    def try_lengthen(self, token: int) -> bool:
        """Add a drawn token and return True if the token only adds to the row's length. Otherwise return False."""
        steps = self.steps + 1
        if not self.is_plain or self.unread_tokens or token < 0 or token in self._ends or steps == self._budget:
            return False
        self.steps = steps
        return True

    @property
    def tokens_left(self) -> int:
        """The number of tokens that the row may still draw."""
        return self._budget - self.steps

    @property
    def fed_prompt(self) -> tuple[int, ...]:
        """The tokens of the prompt that the model has read, or reads in the next run."""
        prompt = self.request.prompt
        return prompt[: len(prompt) - self.unread_tokens]

    @property
    def needs_logits(self) -> bool:
        """Whether the row needs the logits of the next run."""
        wanted = self.request.prompt_logprobs if self.unread_tokens else self.request.logprobs
        return wanted is not None

    def read_one_by_one(self) -> None:
        """Let the first run read only the prompt's first token. Call this before that run."""
        self.unread_tokens = self.discarded_draws = len(self.request.prompt) - 1

    def read_prompt_token(self, logits: np.ndarray | None) -> int:
        """Return the prompt's next token, after a run whose draw is discarded.

        logits: float [V], of that run; None if `needs_logits` was False.

        Raises LogitsError if the logits give no log-probabilities.
        """
        token = self.request.prompt[-self.unread_tokens]
        if logits is not None and self.scores is not None:
            self.scores.add_prompt(logits, token)
        self.unread_tokens -= 1
        if not self.unread_tokens and self.request.budget == 0:
            self.end("length")
        return token

    def add_token(self, token: int, logits: np.ndarray | None = None) -> str:
        """Add a drawn token. Returns the new text.

        logits: float [V], of the token's run; None if `needs_logits` was False.

        Raises LogitsError if the logits give no log-probabilities.
        """
        if logits is not None and self.scores is not None:
            self.scores.add(logits, token)
        self.steps += 1
        gained = ""
        if self.text is not None:
            self.tokens.append(token)
        if self.callbacks is not None:
            self.callbacks.add_token(token)
        if token in self.request.eos_token_ids:
            self.end("stop", token)
        elif self.text is not None:
            gained = self.text.push(token)
            if self.text.stop_string is not None:
                self.end("stop", self.text.stop_string)
        if self.finish_reason is None and self.guide is not None and self.guide.take(token):
            self.end("stop")
        if self.finish_reason is None and self.callbacks is not None:
            criterion = self.callbacks.met_criterion()
            if criterion is not None:
                self.end("criterion", criterion)
        if self.finish_reason is None and self.steps == self.request.budget:
            self.end("length")
        if self.text is not None:
            gained += self._flush_text(self.text)
            if gained:
                self.pieces.append(gained)
        return gained

    def _flush_text(self, text: RowText) -> str:
        if self.finish_reason is None:
            return ""
        gained = text.flush()  # may complete a stop string
        if self.finish_reason != "stop" and text.stop_string is not None:
            self.end("stop", text.stop_string)
        return gained

    def take_new_tokens(self, end: int) -> tuple[int, ...]:
        """Return the tokens before `end` that earlier calls have not returned."""
        start, self._returned_tokens = self._returned_tokens, end
        return tuple(self.tokens[start:end])

    def interrupt(self, reason: str) -> str:
        """End the row before it has ended by itself. Returns the text that was held back."""
        self.end(reason)
        held = "" if self.text is None else self.text.flush()
        if held:
            self.pieces.append(held)
        return held

    def invalid_draw_error(self, which: str) -> LogitsError:
        """The error for a drawn token below 0. which: the row's name in the message."""
        if self.guide is not None:
            return LogitsError(
                f"{which} has no token to draw at step {self.steps}: structured_outputs allows "
                f"{self.guide.allowed_count} there, and each is banned, or has a logit that is not finite; check "
                "suppress_tokens, allowed_token_ids, bad_words_ids, no_repeat_ngram_size, logit_bias and "
                "min_new_tokens.",
                "structured_outputs",
            )
        return LogitsError(
            f"{which} is invalid at step {self.steps}: its logits contain NaN or +infinity, or none is finite "
            "after the edits and the mask; check the model with `topw verify`, and the penalties, biases and bans."
        )

    def end(self, reason: str, stop: int | str | None = None) -> None:
        """End the row now. reason, stop: the result's `finish_reason` and `stop`."""
        self.finish_reason, self.stop, self.finished_at = reason, stop, time.perf_counter()


class StepRecord:
    """Records the sampler's outputs, [B] each, of `steps` steps of a batch.

    All outputs of a step are in one array, which a memoryview copies: an assignment of numpy runs more code, which each
    run of the graph evicts from the CPU cache.

    tokens: the tokens of the last run, int64 [B].
    """

    def __init__(self, outputs: Collection[str], batch: int, steps: int) -> None:
        columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED_TYPES.items():
            if name in outputs:
                columns[name] = slice(end, end := end + batch * dtype.itemsize)
        latest = np.zeros(end, np.uint8)
        self._outputs = {name: latest[column].view(_RECORDED_TYPES[name]) for name, column in columns.items()}
        self._size = end
        self._latest, self.tokens = latest.data, self._outputs["next_token"].data
        kept = allocate_zeros("the record of the steps", (steps, end), np.uint8)
        self._kept = kept.reshape(-1).data
        self._values = {
            name: kept[:, column].view(_RECORDED_TYPES[name]) for name, column in columns.items()
        }  # [steps, B]

    def bind(self, binding: Binding, rows: int | None = None) -> None:
        """Make runs of `binding` write the outputs of the first `rows` rows; None: of all."""
        for name, latest in self._outputs.items():
            binding.bind_result(name, latest[:rows])

    def store(self, step: int) -> list[int]:
        """Store the last run's outputs as those of `step`.

        Returns the run's tokens [B]; those of rows that were not in the run are arbitrary.
        """
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def values(self, name: str, row: int, end: int, start: int = 0) -> list[Any]:
        """The output `name` of a row in the steps `start` to `end`, exclusive; [] if the graph has no such output."""
        return list(self._values[name][start:end, row].tolist()) if name in self._values else []

    def copy_outputs(self, row: int, start: int, end: int) -> RowOutputs:
        """Copy all outputs of a row in the steps `start` to `end`, exclusive."""
        return {name: values[start:end, row].copy() for name, values in self._values.items()}


def new_row_text(request: RowRequest, new_text_decoder: TextDecoderFactory) -> RowText:
    """The text of a request's row, cut at its stop strings."""
    return RowText(new_text_decoder(request.prompt), request.stop_strings, request.min_new_tokens)


def row_result(
    row: Row,
    recorded: Callable[[str], list[Any]],
    session: Session,
    new_text_decoder: TextDecoderFactory,
    *,
    load_seconds: float,
    started: float,
    prefilled: float,
    queued: float = 0.0,
    cached_tokens: int = 0,
    text: str | None = None,
) -> GenerationResult:
    """Make the result of an ended row.

    recorded: function from the name of an output to its values, one per token; [] if the graph has no such output.
    cached_tokens: see GenerationResult.
    started, prefilled: when the request began and when it had its first token, by time.perf_counter().
    queued: seconds in the queue; see Timings.
    text: the whole text if the caller has decoded it already, else None.
    """
    tokens = recorded("next_token")
    if row.text is not None:
        text = "".join(row.pieces)
    return GenerationResult(
        text=_decode_whole_text(row, tokens, new_text_decoder) if text is None else text,
        token_ids=tokens,
        logprobs=recorded("logprob"),
        kept=recorded("kept"),
        certified=recorded("certified"),
        mass=recorded("mass") if "mass" in session.outputs else None,
        token_logprobs=None if row.scores is None else row.scores.drawn_entries(),
        prompt_logprobs=None if row.scores is None else row.scores.prompt_entries(),
        seed=row.request.seed,
        sample=row.request.sample,
        rule=row.request.rule.name,
        finish_reason=str(row.finish_reason),
        stop=row.stop,
        prompt_tokens=len(row.request.prompt),
        cached_tokens=cached_tokens,
        sampler=session.sampler,
        timings=Timings(
            load_seconds=load_seconds,
            prefill_seconds=prefilled - started,
            decode_seconds=max(0.0, row.finished_at - prefilled),
            decode_steps=max(0, row.steps - 1),
            queue_seconds=queued,
        ),
    )


def _decode_whole_text(row: Row, tokens: Sequence[int], new_text_decoder: TextDecoderFactory) -> str:
    text = new_row_text(row.request, new_text_decoder)
    shown = tokens[:-1] if isinstance(row.stop, int) else tokens  # without EOS
    return "".join([text.push(token) for token in shown]) + text.flush()
