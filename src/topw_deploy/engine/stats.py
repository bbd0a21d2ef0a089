"""The engine's counters, and what `Engine.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State and totals of an engine.

    rows: rows of the cache.
    in_use: rows in use.
    queued: accepted sequences without a row.
    steps: runs that drew a token for each decoding row.
    chunks: runs that read a part of a prompt.
    prompt_tokens: prompt tokens that were read.
    cached_tokens: prompt tokens that were reused instead.
    new_tokens: tokens drawn.
    ended: sequences that ended for any reason.
    failed: requests that failed.
    cache_bytes: size of the cache.
    busy_seconds: time in iterations of the engine's thread.
    run_seconds: the part of `busy_seconds` in runs of the session; the rest is overhead. A run may include a wait for
        another thread that holds Python's interpreter lock when the run ends.
    steady_seconds, steady_run_seconds: the same of iterations that ran only a step, with the same sequences as the step
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


@dataclass
class Counters:
    """The counters of the engine's thread, as in EngineStats."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ended: int = 0
    failed: int = 0
    busy_seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_run_seconds: float = 0.0
