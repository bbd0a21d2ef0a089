"""What a generation returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds.

    load_seconds: opening the model.
    prefill_seconds: the batch's prompts and first tokens.
    decode_seconds: the batch's later steps, up to this row's last token.
    decode_steps: how many steps those were.
    """

    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int

    @property
    def seconds_per_token(self) -> float:
        """For the tokens after the first; 0.0 if there are none."""
        return self.decode_seconds / self.decode_steps if self.decode_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult:
    """One generated sequence.

    text: the text after the prompt, without the end-of-sequence token and cut before a stop string.
    token_ids: every token drawn, with the end-of-sequence token and those of a stop string.
    logprobs: per token, the log-probability under its crop (renormalised, at `temperature`).
    kept: per token, how many tokens the crop kept.
    certified: per token, whether the crop was proven without geometry (docs/contract/graph.md section 4).
    mass: per token, the crop's share of the full softmax; None unless the model was exported with it.
    seed, sample: the same pair, prompt and parameters give the same tokens.
    finish_reason: "stop", "criterion" (see `stop`) or "length" (the token limit or the context).
    stop: for "stop" the end-of-sequence token's id or the stop string, for "criterion" the criterion's name, else None.
    prompt_tokens: number of tokens of the prompt.
    sampler: "native", "plugin" or "graph" (docs/guide/native.md).
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    kept: list[int]
    certified: list[bool]
    mass: list[float] | None
    seed: int
    sample: int
    finish_reason: str
    stop: int | str | None
    prompt_tokens: int
    sampler: str = field(compare=False)
    timings: Timings = field(compare=False)

    @property
    def certified_share(self) -> float:
        """Share of tokens whose crop was certified, in [0, 1]; 1.0 if there are no tokens."""
        return sum(self.certified) / len(self.certified) if self.certified else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {**asdict(self), "certified_share": self.certified_share}

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
    row: index of the sequence in the request, from 0.
    result: set in a row's last piece.
    """

    text: str
    row: int = 0
    result: GenerationResult | None = None
