"""Parts of answers that several endpoints share: endings and log-probabilities."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from topw_deploy.runtime import GenerationResult, TokenLogprob, TopLogprob
from topw_deploy.runtime.tools.calls import ToolCall

_IMPOSSIBLE = -9999.0  # OpenAI's value for -inf, which JSON cannot hold
_REASONS = {"stop": "stop", "criterion": "stop", "length": "length", "timeout": "length"}
"""The engine's reasons as OpenAI's, whose clients know no others. `stop_reason` has the difference."""


def usage_of(prompt: int, drawn: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def ending(result: GenerationResult, calls: Sequence[ToolCall] = (), *, per_token: bool = False) -> dict[str, Any]:
    """Why a sequence ended, and what the sampler did in it.

    stop_reason: the stop string, "timeout", or None.
    topw: `seed` repeats the draws; `certified_share` and `kept_mean` as in GenerationResult; `kept`,
        `certified` and `logprobs` of each token if `per_token`.
    """
    reason = "tool_calls" if calls else _REASONS[result.finish_reason]
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
    """`logprobs` of a chat's choice. None without entries."""
    if entries is None:
        return None
    return {"content": text_logprobs(entries), "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities of a text's tokens, with their best alternatives."""
    return [{**_entry(one), "top_logprobs": [_entry(each) for each in one.top_logprobs]} for one in entries]


def _entry(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": _finite(one.logprob), "bytes": list(one.text.encode())}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None] | None, *, first: str = "", offset: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice. None without entries.

    entries: None for the first token of a prompt, whose text is `first`.
    offset: characters of the text before them.
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
        "top_logprobs": [None if one is None else _best(one) for one in entries],
        "text_offset": offsets[:-1],
    }


def _best(one: TokenLogprob) -> dict[str, float]:
    """The best tokens and the drawn one. Of equal texts, the most probable counts."""
    found: dict[str, float] = {}
    entries: list[TokenLogprob | TopLogprob] = [*one.top_logprobs, one]
    for each in entries:
        found.setdefault(each.text, _finite(each.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
