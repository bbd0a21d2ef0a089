"""Parts of answers that several endpoints share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from topw_deploy.runtime import GenerationResult
from topw_deploy.runtime.tools.calls import ToolCall

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
