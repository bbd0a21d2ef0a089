"""Generation results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import LogitsError
from topw_deploy.sampling.rules import TOP_W

_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds.

    load_seconds: opening the model.
    prefill_seconds: the batch's prompts and first tokens; from an Engine, from the call to the request's first token.
    decode_seconds: later steps, up to this row's last token.
    decode_steps: number of those steps.
    queue_seconds: from the call of an Engine until the Engine began to read this prompt, or until the request ended if
        the prompt was never read; 0 without an Engine.
    """

    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    queue_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Decode time per token; 0.0 without decode steps."""
        return self.decode_seconds / self.decode_steps if self.decode_steps else 0.0


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens.

    text: the token's own; U+FFFD for a part of a character.
    """

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a sequence under the model.

    text: the token's own; U+FFFD for a part of a character.
    logprob: -inf if its logit is.
    greedy: whether it is the most probable token; the lowest id among equals.
    top_logprobs: the most probable tokens, best first, the lowest id first among equals.
    """

    token_id: int
    text: str
    logprob: float
    greedy: bool
    top_logprobs: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult:
    """One generated sequence.

    text: new text without EOS, cut before a stop string.
    token_ids: all drawn tokens, with EOS and stop strings.
    logprobs: per token, in its kept set (renormalized, at `temperature`).
    kept: per token, the kept set's size.
    certified: per token, whether the kept set was proven without geometry (docs/contract/graph.md section 4).
    mass: per token, the kept set's share of the full softmax, or None.
    token_logprobs: with the parameter `logprobs`, per token, the log-probabilities of that token and of the most
        probable ones under the model.
    prompt_logprobs: with the parameter `prompt_logprobs`, the same per token of the prompt; None for the first token.
        If an Engine's request ended early, only the tokens that were read have entries.
    seed: reproduces the tokens, with the same prompt and parameters.
    finish_reason: "stop", "criterion" or "length" (token limit or context); from an Engine also "cancelled", "timeout"
        or "error".
    stop: EOS id, stop string or criterion's name, else None; also None at the end of a grammar.
    prompt_tokens: prompt length.
    cached_tokens: tokens of the prompt that an Engine did not read again; otherwise 0.
    drafted_tokens, accepted_tokens: with `speculate`, the tokens that were drafted, and those of them that were drawn.
    sampler: "native", "plugin" or "graph" (docs/guide/native.md).
    rule: the sampling rule (docs/contract/rules.md).
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    kept: list[int]
    certified: list[bool]
    mass: list[float] | None
    token_logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    seed: int
    rule: str = TOP_W.name
    finish_reason: str
    stop: int | str | None
    prompt_tokens: int
    cached_tokens: int = field(compare=False, default=0)
    drafted_tokens: int = field(compare=False, default=0)
    accepted_tokens: int = field(compare=False, default=0)
    sampler: str = field(compare=False)
    timings: Timings = field(compare=False)

    @property
    def certified_share(self) -> float:
        """Fraction of certified tokens; 1.0 without tokens."""
        return sum(self.certified) / len(self.certified) if self.certified else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON types, with -9999.0 for a log-probability of -inf."""
        fields = asdict(self)
        for entry in (*(fields["token_logprobs"] or ()), *(fields["prompt_logprobs"] or ())):
            for one in () if entry is None else (entry, *entry["top_logprobs"]):
                one["logprob"] = max(one["logprob"], _IMPOSSIBLE)
        return {**fields, "certified_share": self.certified_share}

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        return (
            f"GenerationResult({text!r}, {len(self.token_ids)} tokens, {self.finish_reason}, "
            f"certified {self.certified_share:.0%}, seed {self.seed})"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of streamed text.

    text: whole characters; may be empty in a row's last piece.
    row: index of the sequence in the request.
    result: the row's result, in its last piece only.
    token_logprobs: with the parameter `logprobs`, the entries of the tokens drawn since the row's last piece.
    drawn: tokens of the row drawn so far.
    token_ids: the tokens drawn since the row's last piece.
    """

    text: str
    row: int = 0
    result: GenerationResult | None = None
    token_logprobs: list[TokenLogprob] | None = None
    drawn: int = field(compare=False, default=0)
    token_ids: tuple[int, ...] = field(compare=False, default=())


_BLOCKS_PER_TOKEN = 8  # of `best`: more blocks leave fewer candidates

Logits: TypeAlias = NDArray[np.float32]
"""The logits [V] of one step."""

TextOf: TypeAlias = Callable[[int], str]
"""A function from a token id to the text of that token alone."""


class TokenScore(NamedTuple):
    """The numbers of a TokenLogprob.

    ids: int64 [k], of top_logprobs.
    logprobs: float64 [k], of top_logprobs.
    """

    token: int
    logprob: float
    greedy: bool
    ids: np.ndarray
    logprobs: np.ndarray


def score_token(logits: np.ndarray, token: int, count: int) -> TokenScore | None:
    """The log-probabilities of `token` and of the `count` best tokens.

    logits: float [V].

    Returns None if a logit is NaN or +inf, or none is finite.
    """
    logits = logits.astype(np.float32, copy=False)
    first = int(logits.argmax())  # the first NaN, if there is one
    largest = float(logits[first])
    if not math.isfinite(largest):
        return None
    weights = np.subtract(logits, logits[first])
    np.exp(weights, out=weights)
    total = largest + math.log(float(weights.sum(dtype=np.float64)))
    ids = best_ids(logits, count)
    return TokenScore(token, float(logits[token]) - total, token == first, ids, logits[ids].astype(np.float64) - total)


def best_ids(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest logits, best first, the lowest id first among equals.

    logits: float32 [V], without NaN.
    """
    if not count:
        return np.zeros(0, np.int64)
    candidates = np.arange(len(logits))
    blocks = _BLOCKS_PER_TOKEN * count
    if blocks < len(logits):
        width = len(logits) // blocks
        maxima = logits[: blocks * width].reshape(blocks, width).max(axis=1)
        # `count` blocks have a logit of at least this.
        candidates = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]


class Scores:
    """Collects the log-probabilities of one sequence under the model.

    logprobs, prompt_logprobs: the parameters.
    """

    def __init__(self, logprobs: int | None, prompt_logprobs: int | None, text_of: TextOf) -> None:
        self._logprobs, self._prompt_logprobs, self._text_of = logprobs, prompt_logprobs, text_of
        self._prompt: list[TokenScore] = []
        self._drawn: list[TokenScore] = []
        self._returned = 0  # number of drawn tokens whose entries `take_new_entries` has returned

    def add_prompt(self, logits: np.ndarray, token: int) -> None:
        """Add the prompt's next token. logits: [V], after the token before. Raises LogitsError for NaN or +inf."""
        where = f"token {len(self._prompt) + 1} of the prompt"
        self._prompt.append(self._score_token(logits, token, self._prompt_logprobs, where))

    def add(self, logits: np.ndarray, token: int) -> None:
        """Add the next drawn token. logits: [V], from which it was drawn. Raises LogitsError for NaN or +inf."""
        self._drawn.append(self._score_token(logits, token, self._logprobs, f"step {len(self._drawn)}"))

    def prompt_entries(self) -> list[TokenLogprob | None] | None:
        """One entry per prompt token that was read, None for the first one.

        Returns None without the parameter `prompt_logprobs`.
        """
        if self._prompt_logprobs is None:
            return None
        return [None, *self._to_entries(self._prompt)]

    def drawn_entries(self, start: int = 0, end: int | None = None) -> list[TokenLogprob] | None:
        """One entry per drawn token from `start` to `end`, exclusive. None without the parameter `logprobs`."""
        return None if self._logprobs is None else self._to_entries(self._drawn[start:end])

    def take_new_entries(self, end: int) -> list[TokenLogprob] | None:
        """Return the entries of drawn tokens before `end` that earlier calls have not returned."""
        start, self._returned = self._returned, end
        return self.drawn_entries(start, end)

    def _score_token(self, logits: np.ndarray, token: int, count: int | None, where: str) -> TokenScore:
        found = score_token(logits, token, count or 0)
        if found is None:
            raise LogitsError(
                f"the logits at {where} contain NaN or +infinity, or none is finite, so there are no "
                "log-probabilities; check the model with `topw verify`, or leave logprobs out."
            )
        return found

    def _to_entries(self, scores: Sequence[TokenScore]) -> list[TokenLogprob]:
        text = cache(self._text_of)
        entries = []
        for one in scores:
            best = zip(one.ids.tolist(), one.logprobs.tolist(), strict=True)
            top = tuple(TopLogprob(token, text(token), value) for token, value in best)
            entries.append(TokenLogprob(one.token, text(one.token), one.logprob, one.greedy, top))
        return entries
