"""Generation results."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from topw_deploy.errors import ParameterError
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
    logprobs: per token, in its crop (renormalized, at `temperature`).
    kept: per token, crop size.
    certified: per token, whether the crop was proven without geometry (docs/contract/graph.md section 4).
    mass: per token, the crop's share of the full softmax, or None.
    token_logprobs: with the parameter `logprobs`, per token, the log-probabilities of that token and of the most
        probable ones under the model.
    prompt_logprobs: with the parameter `prompt_logprobs`, the same per token of the prompt; None for the first token.
        If an Engine's request ended early, only the tokens that were read have entries.
    seed, sample: reproduce the tokens, with the same prompt and parameters.
    finish_reason: "stop", "criterion" or "length" (token limit or context); from an Engine also "cancelled", "timeout"
        or "error".
    stop: EOS id, stop string or criterion's name, else None; also None at the end of a grammar.
    prompt_tokens: prompt length.
    cached_tokens: tokens of the prompt that an Engine did not read again; otherwise 0.
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
    sample: int
    rule: str = TOP_W.name
    finish_reason: str
    stop: int | str | None
    prompt_tokens: int
    cached_tokens: int = field(compare=False, default=0)
    sampler: str = field(compare=False)
    timings: Timings = field(compare=False)

    @property
    def certified_share(self) -> float:
        """Fraction of certified tokens; 1.0 without tokens."""
        return sum(self.certified) / len(self.certified) if self.certified else 1.0

    def prompt_likelihood(self, start: int = 1) -> tuple[float, bool]:
        """The likelihood of the prompt's tokens from `start` >= 1 on.

        It equals lm-evaluation-harness' `loglikelihood` of a continuation after `start` tokens of context.

        Returns (sum of their log-probabilities, whether each is the most probable token at its place).

        Raises ParameterError without `prompt_logprobs`, or for another `start`.
        """
        if self.prompt_logprobs is None:
            raise ParameterError(
                "the result has no log-probabilities of the prompt; generate with prompt_logprobs=0.", "prompt_logprobs"
            )
        if not 1 <= start <= len(self.prompt_logprobs):
            raise ParameterError(f"start is {start}, but must be from 1 to {len(self.prompt_logprobs)}.", "start")
        scored = [entry for entry in self.prompt_logprobs[start:] if entry is not None]
        return math.fsum(entry.logprob for entry in scored), all(entry.greedy for entry in scored)

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
