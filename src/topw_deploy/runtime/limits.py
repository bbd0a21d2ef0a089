"""The limits of an opened model on a request, and the checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.rules import longest_pool
from topw_deploy.sampling.rules import RULES

_MOST_CHARACTERS = 256  # per token; the longest tokens of published vocabularies are runs of 128 spaces


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model, and of the options with which the model or an engine was opened.

    context_length, max_length: maximum tokens per sequence.
    rows: maximum sequences per call.
    opened_as: "model" or "engine", the word for messages.
    longest_pool: see `rules.longest_pool`.
    rules: names of the sampling rules that the folder carries.
    """

    context_length: int
    vocab_size: int
    max_length: int | None = None
    rows: int | None = None
    opened_as: str = "model"
    longest_pool: int | None = None
    rules: tuple[str, ...] = tuple(RULES)

    @property
    def tokens(self) -> int:
        """The maximum number of tokens per sequence."""
        return self.context_length if self.max_length is None else min(self.max_length, self.context_length)


def model_limits(manifest: DecoderManifest, session: Session, max_length: int | None, max_batch: int | None) -> Limits:
    """The limits of a model that is opened with these options. Raises ParameterError for an option out of range."""
    context, built_for = manifest.decoder.context_length, session.most_rows
    check_size("max_length", max_length)
    check_size("max_batch", max_batch)
    if max_length is not None and max_length > context:
        raise ParameterError(
            f"max_length is {max_length}, but the model's context holds {context}; give at most that.", "max_length"
        )
    if built_for is not None and (max_batch or 1) > built_for:
        raise ParameterError(
            f"max_batch is {max_batch}, but the engine was built for {built_for}; give at most that, or build it again "
            "with a higher --max-batch.",
            "max_batch",
        )
    sampler = manifest.sampler
    return Limits(
        context,
        sampler.vocab_size,
        max_length,
        max_batch or built_for,
        longest_pool=longest_pool(session.sampler, sampler),
        rules=sampler.rules,
    )


def check_size(name: str, value: object) -> None:
    """Raises ParameterError unless `value` is None or an integer >= 1. name: the option's name."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ParameterError(f"{name} is {value!r}, but must be an integer >= 1.", name)


def check_length(tokens: int, limits: Limits, which: str) -> None:
    """Raises PromptError for a prompt of too many tokens. which: the prompt's name in the message."""
    if tokens > limits.tokens:
        raise PromptError(f"{which} has {tokens} tokens, {_excess_clause(tokens, limits)}", "max_length")


def check_sequence_count(rows: int, limits: Limits) -> None:
    """Raises PromptError, or ParameterError for an engine, if a request has more sequences than the limits allow."""
    if rows <= (limits.rows or rows):
        return
    if limits.opened_as == "engine":
        raise ParameterError(
            f"the request has {rows} sequences, but the engine takes {limits.rows} at a time; give fewer, or make it "
            "with a higher max_queue.",
            "max_queue",
        )
    raise PromptError(
        f"the request has {rows} sequences, but the model was opened with max_batch {limits.rows}; "
        "give fewer at a time, or open it (or build its engine) for more.",
        "max_batch",
    )


def check_text_length(text: str, limits: Limits, which: str) -> None:
    """Raises PromptError for a text that is too long to be tokenized. which: the prompt's name."""
    if len(text) > _MOST_CHARACTERS * limits.tokens:
        raise PromptError(
            f"{which} has {len(text):,} characters, more than {_MOST_CHARACTERS} per token, "
            f"{_excess_clause(limits.tokens + 1, limits)}",
            "max_length",
        )


def _excess_clause(tokens: int, limits: Limits) -> str:
    if tokens > limits.context_length:
        return f"the model's context holds {limits.context_length}; shorten it."
    what = limits.opened_as
    return f"but the {what} was opened with max_length {limits.tokens}; shorten it, or open the {what} with more."


def check_prompt(prompt: Sequence[int], limits: Limits, which: str) -> None:
    """Raises PromptError for token ids that are none, too many or outside the vocabulary. which: the prompt's name."""
    if not prompt:
        raise PromptError(f"{which} is empty and the tokenizer has no BOS token to start from; give some text.")
    check_length(len(prompt), limits, which)
    for token in prompt:
        if not 0 <= token < limits.vocab_size:
            raise PromptError(f"{which} holds the token id {token}, but ids go from 0 to {limits.vocab_size - 1}.")
