"""`Sequence`: the whole state of one generated sequence: its prompt, parameters, tokens, text and end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from topw_deploy.errors import LogitsError, ParameterError
from topw_deploy.runtime.guide import Guide
from topw_deploy.runtime.parameters import criterion_name, takes_tensors
from topw_deploy.runtime.results import GenerationResult, Scores, Timings
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.structured import Constraint
from topw_deploy.runtime.tokenizer import SequenceText, Tokenizer
from topw_deploy.sampling.parameters import TopWParameters
from topw_deploy.sampling.rules import RuleParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """The parameters of one sequence, all resolved.

    rule: the sampling rule. The temperatures of every rule are in `top_w`.
    budget: maximum new tokens, >= 0.
    min_new_tokens: tokens before which EOS and stop strings have no effect.
    eos_token_ids: ids that end the sequence: EOS, unless `ignore_eos` is given, and the stop_token_ids.
    pad_token_id: what the graph reads in steps after the sequence's end.
    allowed_token_ids: the only ids that can be drawn; empty for all.
    constraint: what the text must match, or None.
    speculate: where drafts of the next tokens come from; None for none.
    logprobs, prompt_logprobs: alternatives per drawn token and per token of the prompt; None for no log-probabilities
        under the model.
    hidden_tokens: tokens that give no text.
    """

    top_w: TopWParameters
    rule: RuleParameters
    seed: int
    budget: int
    min_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    stop_strings: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    suppress_tokens: tuple[int, ...]
    allowed_token_ids: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    no_repeat_ngram_size: int
    constraint: Constraint | None
    logprobs: int | None
    prompt_logprobs: int | None
    speculate: str | None
    hidden_tokens: frozenset[int]

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities under the model are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def has_edits(self) -> bool:
        """Whether there are penalties, biases or bans."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.suppress_tokens
            or self.bad_words_ids
            or self.no_repeat_ngram_size
            or (self.min_new_tokens and self.eos_token_ids)
        )


class Streamer(Protocol):
    """Like transformers' BaseStreamer: `put` takes the prompt, int64 [1, S], then each token, int64 [1]."""

    def put(self, value: np.ndarray, /) -> object: ...
    def end(self) -> object: ...


class Callbacks:
    """Passes one sequence's tokens to its streamer and its stopping criteria.

    criteria: functions from the token ids, int64 [T] with the prompt's, to whether the sequence ends; or transformers'
        objects, which take tensors. This module imports neither torch nor transformers.
    most: maximum number of tokens, with the prompt's.
    """

    def __init__(
        self, prompt: tuple[int, ...], most: int, streamer: Streamer | None, criteria: tuple[Callable[..., object], ...]
    ) -> None:
        self._streamer = streamer
        self._criteria = [(criterion, takes_tensors(criterion)) for criterion in criteria]
        self._ids = np.empty(most, np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def stream_prompt(self) -> None:
        """Stream the prompt."""
        if self._streamer is not None:
            self._streamer.put(self._ids[None, : self._length].copy())

    def add_token(self, token: int) -> None:
        """Stream a drawn token."""
        self._ids[self._length] = token
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(np.array([token], np.int64))

    def met_criterion(self) -> str | None:
        """The name of the first criterion that ends the sequence, or None.

        Raises ParameterError for a criterion that does not return a boolean.
        """
        return next((criterion_name(each) for each, tensors in self._criteria if self._is_met(each, tensors)), None)

    def _is_met(self, criterion: Any, tensors: bool) -> bool:
        ids = self._ids[: self._length]
        if tensors:
            answer = criterion(sys.modules["torch"].from_numpy(ids[None]), None)
        else:
            ids.setflags(write=False)
            answer = criterion(ids)
        if math.prod(getattr(answer, "shape", (0,))) == 1:  # one value
            answer = answer.item()
        if not isinstance(answer, bool):
            raise ParameterError(
                f"stopping_criteria: {criterion_name(criterion)} returned a {type(answer).__name__}, but must "
                "return True or False for its one sequence."
            )
        return answer


@contextmanager
def end_on_failure(streamer: Any) -> Iterator[None]:
    """End the streamer of a call if the block fails, because its reader would wait forever.

    streamer: the value of the parameter, unchecked.
    """
    try:
        yield
    except BaseException:
        if callable(getattr(streamer, "end", None)) and not isinstance(streamer, type):
            streamer.end()
        raise


class Sequence:
    """One sequence. `TopWModel.prepare` makes them.

    index: its place in the call.
    prompt: token ids, at least one.
    text: the text as it is drawn, or None if it is decoded only at the end.
    callbacks: the streamer and stopping criteria, or None.
    scores: the log-probabilities of its tokens under the model, or None.
    guide: the tokens that its grammar allows next; None without a constraint, and until `TopWModel.compile_grammars`.
    unread_tokens: number of tokens at the end of the prompt that are still to be read one by one. Every run but the
        first reads one of them, and the run's draw is discarded.
    discarded_draws: number of runs whose draws are discarded.
    is_plain: whether a token that does not end the sequence only adds to its length.
    steps: number of tokens drawn.
    drafted, accepted: number of drafted tokens that runs have read, and of those that were drawn.
    tokens: the tokens drawn if `text` is not None, else empty.
    finish_reason, stop: see GenerationResult; None before the end.
    finished_at: time.perf_counter() at the end.
    """

    def __init__(
        self,
        index: int,
        prompt: tuple[int, ...],
        params: SequenceParams,
        tokenizer: Tokenizer,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.index, self.prompt, self.params, self.callbacks = index, prompt, params, callbacks
        self._tokenizer = tokenizer
        self.text = self.new_text() if params.stop_strings else None
        self.scores = (
            Scores(params.logprobs, params.prompt_logprobs, tokenizer.text_of) if params.needs_scores else None
        )
        self.guide: Guide | None = None
        self.is_plain = self.text is None and callbacks is None and self.scores is None
        self._ends, self._budget = params.eos_token_ids, params.budget
        self.unread_tokens = self.discarded_draws = 0
        if params.prompt_logprobs is not None:
            self.read_one_by_one()
        self.steps = self.drafted = self.accepted = 0
        self.tokens: list[int] = []
        self._texts: list[str] = []
        self._returned_tokens = 0  # by `take_new_tokens`
        self.finish_reason: str | None = None
        self.stop: int | str | None = None
        self.finished_at = 0.0

    def new_text(self) -> SequenceText:
        """A decoder of the tokens after the prompt, cut at the stop strings."""
        params, hidden = self.params, self.params.hidden_tokens
        decoder = self._tokenizer.text_decoder(self.prompt, hidden)
        if not params.stop_strings:
            return SequenceText(decoder, (), params.min_new_tokens)
        names = {token: name for token, name in self._tokenizer.special_ids.items() if token in hidden}
        return SequenceText(decoder, params.stop_strings, params.min_new_tokens, names)

    def decode_as_drawn(self) -> None:
        """Decode the text at every token. Call this before the first one."""
        if self.text is None:
            self.text, self.is_plain = self.new_text(), False

    def follow(self, guide: Guide) -> None:
        """Draw only the tokens that `guide` allows. Call this before the first one."""
        self.guide, self.is_plain = guide, False

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be drawn."""
        return self._budget - self.steps

    @property
    def speculates(self) -> bool:
        """Whether its next tokens may be drafted: the sampler's inputs are then the same for all of them."""
        params = self.params
        changes = params.has_edits or params.allowed_token_ids or params.constraint or self.scores or self.unread_tokens
        return params.speculate is not None and not changes

    @property
    def fed_prompt(self) -> tuple[int, ...]:
        """The tokens of the prompt that the model has read, or reads in the next run."""
        return self.prompt[: len(self.prompt) - self.unread_tokens]

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of the next run are needed."""
        wanted = self.params.prompt_logprobs if self.unread_tokens else self.params.logprobs
        return wanted is not None

    def read_one_by_one(self) -> None:
        """Let the first run read only the prompt's first token. Call this before that run."""
        self.unread_tokens = self.discarded_draws = len(self.prompt) - 1

    def read_prompt_token(self, logits: np.ndarray | None) -> int:
        """Return the prompt's next token, after a run whose draw is discarded.

        logits: float [V], of that run; None if `needs_logits` was False.

        Raises LogitsError if the logits give no log-probabilities.
        """
        token = self.prompt[-self.unread_tokens]
        if logits is not None and self.scores is not None:
            self.scores.add_prompt(logits, token)
        self.unread_tokens -= 1
        if not self.unread_tokens and self._budget == 0:
            self.end("length")
        return token

    def try_lengthen(self, token: int) -> bool:
        """Add a drawn token and return True if the token only adds to the length. Otherwise return False."""
        steps = self.steps + 1
        if not self.is_plain or self.unread_tokens or token < 0 or token in self._ends or steps == self._budget:
            return False
        self.steps = steps
        return True

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
        if token in self._ends:
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
        if self.finish_reason is None and self.steps == self._budget:
            self.end("length")
        if self.text is not None:
            if self.finish_reason is not None:
                gained += self.text.flush()  # may complete a stop string
                if self.finish_reason != "stop" and self.text.stop_string is not None:
                    self.end("stop", self.text.stop_string)
            if gained:
                self._texts.append(gained)
        return gained

    def take_new_tokens(self, end: int) -> tuple[int, ...]:
        """Return the tokens before `end` that earlier calls have not returned."""
        start, self._returned_tokens = self._returned_tokens, end
        return tuple(self.tokens[start:end])

    def end(self, reason: str, stop: int | str | None = None) -> None:
        """End now. reason, stop: the result's `finish_reason` and `stop`."""
        self.finish_reason, self.stop, self.finished_at = reason, stop, time.perf_counter()

    def interrupt(self, reason: str) -> str:
        """End before the sequence has ended by itself. Returns the text that was held back."""
        self.end(reason)
        held = "" if self.text is None else self.text.flush()
        if held:
            self._texts.append(held)
        return held

    def invalid_draw_error(self, which: str) -> LogitsError:
        """The error for a drawn token below 0. which: the sequence's name in the message."""
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

    def result(
        self,
        outputs: Callable[[str], list[Any]],
        session: Session,
        *,
        load_seconds: float,
        started: float,
        prefilled: float,
        queued: float = 0.0,
        cached_tokens: int = 0,
        text: str | None = None,
    ) -> GenerationResult:
        """The result of an ended sequence.

        outputs: function from the name of an output to its values, one per token; [] if the graph has no such output.
        cached_tokens: see GenerationResult.
        started, prefilled: when the call began and when its first token was drawn, by time.perf_counter().
        queued: seconds in the queue; see Timings.
        text: the whole text if the caller has decoded it already, else None.
        """
        tokens = outputs("next_token")
        if self.text is not None:
            text = "".join(self._texts)
        elif text is None:
            decoder = self.new_text()
            shown = tokens[:-1] if isinstance(self.stop, int) else tokens  # without EOS
            text = "".join([decoder.push(token) for token in shown]) + decoder.flush()
        return GenerationResult(
            text=text,
            token_ids=tokens,
            logprobs=outputs("logprob"),
            kept=outputs("kept"),
            certified=outputs("certified"),
            mass=outputs("mass") if "mass" in session.outputs else None,
            token_logprobs=None if self.scores is None else self.scores.drawn_entries(),
            prompt_logprobs=None if self.scores is None else self.scores.prompt_entries(),
            seed=self.params.seed,
            rule=self.params.rule.name,
            finish_reason=str(self.finish_reason),
            stop=self.stop,
            prompt_tokens=len(self.prompt),
            cached_tokens=cached_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            sampler=session.sampler,
            timings=Timings(
                load_seconds=load_seconds,
                prefill_seconds=prefilled - started,
                decode_seconds=max(0.0, self.finished_at - prefilled),
                decode_steps=max(0, self.steps - 1),
                queue_seconds=queued,
            ),
        )
