"""Log-probabilities under the model, as the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topw_deploy.runtime import TokenLogprob, TopLogprob

_IMPOSSIBLE = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice. None without entries."""
    if entries is None:
        return None
    content = [{**_entry(one), "top_logprobs": [_entry(each) for each in one.top_logprobs]} for one in entries]
    return {"content": content, "refusal": None}


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
