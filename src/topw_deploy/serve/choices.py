"""Parts of answers that several endpoints share: usage, ends of sequences, log-probabilities."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from topw_deploy.runtime import GenerationResult, TokenLogprob, TopLogprob
from topw_deploy.runtime.tools.parser import ToolCall

_MINUS_INFINITY = -9999.0  # OpenAI's value for -inf, which JSON cannot hold
_FINISH_REASONS = {"stop": "stop", "criterion": "stop", "length": "length", "timeout": "length"}
"""The engine's finish reason -> OpenAI's. Its clients know no others; `stop_reason` tells a timeout from a length."""


def usage_fields(prompt: int, drawn: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`.

    prompt: tokens of all prompts.
    drawn: tokens of all answers.
    cached: tokens of the prompts that were not read again.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def ending_fields(
    result: GenerationResult, calls: Sequence[ToolCall] = (), *, per_token: bool = False
) -> dict[str, Any]:
    """The fields of a choice that state why the sequence ended, and what the sampler did.

    calls: the tool calls in the answer.
    per_token: whether `topw` has `kept`, `certified` and `logprobs` of each token.

    Returns `finish_reason`; `stop_reason`, the stop string, "timeout" or None; and `topw`, whose `seed` repeats the
    draws and whose `certified_share` and `kept_mean` are as in GenerationResult.
    """
    reason = "tool_calls" if calls else _FINISH_REASONS[result.finish_reason]
    stop = "timeout" if result.finish_reason == "timeout" else result.stop
    facts: dict[str, Any] = {
        "seed": result.seed,
        "rule": result.rule,
        "certified_share": round(result.certified_share, 6),
        "kept_mean": round(statistics.fmean(result.kept), 6) if result.kept else None,
    }
    if per_token:
        facts |= {"kept": result.kept, "certified": result.certified, "logprobs": result.logprobs}
    return {"finish_reason": reason, "stop_reason": stop if isinstance(stop, str) else None, "topw": facts}


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice; None without entries."""
    if entries is None:
        return None
    return {"content": text_logprobs(entries), "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities of a text's tokens, each with its likeliest alternatives."""
    return [
        {**_token_fields(one), "top_logprobs": [_token_fields(each) for each in one.top_logprobs]} for one in entries
    ]


def _token_fields(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": _finite(one.logprob), "bytes": list(one.text.encode())}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None] | None, *, first: str = "", offset: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice; None without entries.

    entries: of the tokens in order; None for the first token of a prompt, which has no log-probability.
    first: text of that first token.
    offset: number of characters of the text before the first entry.
    """
    if entries is None:
        return None
    texts = [first if one is None else one.text for one in entries]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in entries],
        "top_logprobs": [None if one is None else _alternatives(one) for one in entries],
        "text_offset": offsets[:-1],
    }


def _alternatives(one: TokenLogprob) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and of the drawn one. Of equal texts, the likeliest counts."""
    found: dict[str, float] = {}
    entries: list[TokenLogprob | TopLogprob] = [*one.top_logprobs, one]
    for each in entries:
        found.setdefault(each.text, _finite(each.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _MINUS_INFINITY)
