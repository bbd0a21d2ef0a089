"""State and totals of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State and totals of an engine.

    rows: rows of the cache.
    in_use: rows in use.
    queued: accepted sequences without a row.
    steps: runs that drew a token per row.
    chunks: runs that read a part of a prompt.
    prompt_tokens: prompt tokens that were read.
    cached_tokens: prompt tokens that were reused instead.
    new_tokens: tokens drawn.
    ended: sequences that ended for any reason.
    failed: requests that failed.
    cache_bytes: size of the cache.
    busy_seconds: time in iterations.
    run_seconds: time in runs of the session, which is part of `busy_seconds`; the rest is overhead. A run may include
        waiting for another thread that holds Python's interpreter lock when it ends.
    steady_seconds, steady_run_seconds: the same of iterations that only ran a step, of the same sequences as the step
        before.
    """

    rows: int
    in_use: int
    queued: int
    steps: int
    chunks: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ended: int
    failed: int
    cache_bytes: int
    busy_seconds: float
    run_seconds: float
    steady_seconds: float
    steady_run_seconds: float
