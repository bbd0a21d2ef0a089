"""Metrics for Prometheus. They have vLLM's names with the prefix `topw:`.

All but the count of answers have the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topw_deploy.engine import EngineStats
from topw_deploy.runtime import GenerationResult

MODEL, REASON = "model_name", "finished_reason"
_MODELS = "/v1/models/"
PATHS = frozenset({
    "/", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", f"{_MODELS}NAME", "/tokenize",
    "/detokenize", "/topw/inspect", "/health", "/live", "/metrics", "/openapi.json",
})  # fmt: skip
"""Values of the label `path` of an answer. Other paths are labelled "other": clients can request any number of them."""

ABORT = "abort"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
ReadStats: TypeAlias = Callable[[EngineStats], float]
GAUGES: tuple[tuple[str, str, ReadStats], ...] = (
    ("num_requests_running", "Sequences that have a slot of the cache.", lambda stats: stats.in_use),
    ("num_requests_waiting", "Sequences that wait for a slot.", lambda stats: stats.queued),
    ("kv_cache_usage_perc", "Share of the cache's slots in use, 0 to 1.", lambda stats: stats.in_use / stats.slots),
)
COUNTERS: tuple[tuple[str, str, ReadStats], ...] = (
    ("prompt_tokens", "Tokens of prompts, read or reused.", lambda stats: stats.prompt_tokens + stats.cached_tokens),
    ("generation_tokens", "Tokens drawn.", lambda stats: stats.new_tokens),
    ("spec_decode_num_draft_tokens", "Drafted tokens that runs have read.", lambda stats: stats.drafted_tokens),
    ("spec_decode_num_accepted_tokens", "Those of them that were drawn.", lambda stats: stats.accepted_tokens),
    ("prefix_cache_queries", "Tokens looked up.", lambda stats: stats.prompt_tokens + stats.cached_tokens),
    ("prefix_cache_hits", "Tokens of prompts that were not read again.", lambda stats: stats.cached_tokens),
    ("engine_steps", "Runs that drew a token for each decoding sequence.", lambda stats: stats.steps),
    ("engine_prompt_chunks", "Runs that read a part of a prompt.", lambda stats: stats.chunks),
    ("engine_busy_seconds", "Seconds in iterations.", lambda stats: stats.busy_seconds),
    ("engine_run_seconds", "Seconds of them in runs of the graph.", lambda stats: stats.run_seconds),
    ("failed_requests", "Requests that the engine failed.", lambda stats: stats.failed),
)


READ_ENDED: tuple[tuple[str, str, tuple[float, ...], Callable[[GenerationResult], float | None]], ...] = (
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS, lambda result: result.prompt_tokens),
    ("request_generation_tokens", "Tokens drawn for a sequence.", _TOKENS, lambda result: len(result.token_ids)),
    ("request_queue_time_seconds", "Until the engine began to read the prompt.", _SECONDS,
     lambda result: result.timings.queue_seconds),
    ("e2e_request_latency_seconds", "From the engine's call to the last token.", _SECONDS,
     lambda result: result.timings.prefill_seconds + result.timings.decode_seconds),
    ("time_to_first_token_seconds", "From the engine's call to the first token.", _SECONDS,
     lambda result: result.timings.prefill_seconds if result.token_ids else None),
    ("request_prefill_time_seconds", "From the queue's end to the first token.", _SECONDS,
     lambda result: result.timings.prefill_seconds - result.timings.queue_seconds if result.token_ids else None),
    ("request_decode_time_seconds", "From the first to the last token.", _SECONDS,
     lambda result: result.timings.decode_seconds if result.token_ids else None),
)  # fmt: skip
"""(name, help, buckets, value of an ended sequence; None if it has none) of each histogram of sequences."""


class Metrics:
    """The server's metrics.

    engines: returns each model's name and the state of its engine; called at each scrape.
    """

    def __init__(self, engines: Callable[[], Iterable[tuple[str, EngineStats]]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(engines))
        self._ended = [(self._histogram(name, text, buckets), read) for name, text, buckets, read in READ_ENDED]
        self._gap = self._histogram("inter_token_latency_seconds", "Between tokens.", _SECONDS)
        self._kept = self._histogram("kept_tokens", "Tokens that the sampler kept at a step.", _TOKENS)
        self._certified = self._counter("certified_tokens", "Tokens whose kept set was proven without distances.")
        self._success = self._counter("request_success", "Sequences that ended.", REASON)
        text = "Answers, by path and status; 499 if the client left before."
        self._answers = Counter("topw:http_responses", text, ["path", "status"], registry=self.registry)

    def count_answer(self, path: str, status: int) -> None:
        """Count an answer by its path and status."""
        if path.startswith(_MODELS):
            path = f"{_MODELS}NAME"
        self._answers.labels(path if path in PATHS else "other", status).inc()

    def count_aborted(self, model: str, sequences: int) -> None:
        """Count sequences whose client disconnected before their end."""
        if sequences > 0:
            self._increase(self._success, sequences, model, ABORT)

    def count_ended(self, model: str, result: GenerationResult, *, streamed: bool) -> None:
        """Count an ended sequence.

        streamed: whether `add_gap` was called for the gaps between its tokens.
        """
        self._increase(self._success, 1, model, ABORT if result.finish_reason == "cancelled" else result.finish_reason)
        self._increase(self._certified, sum(result.certified), model)
        for histogram, read in self._ended:
            value = read(result)
            self._observe(histogram, model, [] if value is None else [value])
        self._observe(self._kept, model, result.kept)
        if result.timings.decode_steps and not streamed:
            self.add_gap(model, result.timings.seconds_per_token)

    def add_gap(self, model: str, seconds: float) -> None:
        """Count the seconds between two tokens of a streamed sequence."""
        self._observe(self._gap, model, [seconds])

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Any:
        return Histogram(f"topw:{name}", text, [MODEL], registry=self.registry, buckets=tuple(buckets))

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return Counter(f"topw:{name}", text, [MODEL, *labels], registry=self.registry)

    def _observe(self, histogram: Any, model: str, values: Iterable[float]) -> None:
        labelled = histogram.labels(model)
        for value in values:
            labelled.observe(value)

    def _increase(self, counter: Any, amount: int, *labels: str) -> None:
        counter.labels(*labels).inc(amount)


class _Engines(Collector):
    """Reads the engines' own counts when Prometheus scrapes."""

    def __init__(self, engines: Callable[[], Iterable[tuple[str, EngineStats]]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        found = list(self._engines())
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, read in table:
                family = kind(f"topw:{name}", text, labels=[MODEL])
                for model, stats in found:
                    family.add_metric([model], read(stats))
                yield family
