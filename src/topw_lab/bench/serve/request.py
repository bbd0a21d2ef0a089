"""The request of `topw bench serve`, the sides that it selects, and the requests of the callers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from topw_deploy.errors import ParameterError
from topw_lab.bench import sides
from topw_lab.bench.process import require_few_threads
from topw_lab.bench.prompts import decoder_manifest
from topw_lab.bench.serve import worker
from topw_lab.bench.sides import Side

MEAN_PROMPT, MEAN_NEW = 342, 62  # default mean numbers of prompt tokens and new tokens
LONG_PROMPT, LONG_PREFIX = 4000, 1000  # default lengths of the long prompt and of the reused prefix
SHORT_PROMPT, SUFFIX = 16, 8  # tokens of the request that waits for the long prompt, and after a prefix
_CONTEXT_DIVISOR = 8  # a default mean length is at most the context divided by this
_LOG_DEVIATION = 0.6  # standard deviation of a length's logarithm
_LEAST_VALUES = {"concurrency": 1, "requests": 1, "prompt_tokens": 1, "new_tokens": 2, "rows": 1, "prefill_budget": 1,
          "long_tokens": 1, "prefix_tokens": 1, "rounds": 1}  # fmt: skip

Requests = list[tuple[list[int], int]]
"""(prompt, new tokens) of each request."""


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """Options of `topw bench serve`.

    folder: an exported model with a `static` cache.
    concurrency: numbers of callers; each number is measured on its own.
    requests: minimum number of requests in a round; there is at least one for each caller.
    prompt_tokens, new_tokens: mean lengths. None: MEAN_PROMPT and MEAN_NEW, or less if the context is short.
    rows: maximum number of rows of the engine.
    prefill_budget: the engine's option.
    long_tokens: length of the prompt that a short request waits for. None: LONG_PROMPT, or what fits the context.
    prefix_tokens: length of the reused prefix. None: LONG_PREFIX, or what fits the context.
    threads: thread counts; each count is measured on its own.
    peers: names of sides; empty for all.
    rounds: number of times that each side is timed.
    seed: of the requests and of the order of the sides.

    Raises ParameterError for a value out of range.
    """

    folder: Path
    concurrency: Sequence[int] = (1, 4, 16, 64)
    requests: int = 16
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rows: int = 16
    prefill_budget: int = 256
    long_tokens: int | None = None
    prefix_tokens: int | None = None
    threads: Sequence[int] = (1,)
    peers: Sequence[str] = ()
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST_VALUES.items():
            value = getattr(self, name)
            for number in value if isinstance(value, (list, tuple)) else (value,):
                if number is not None and number < least:
                    raise ParameterError(f"{name} is {number}, but must be an integer >= {least}.", name)
        if not self.concurrency:
            raise ParameterError("concurrency is empty, but must list numbers of callers.", "concurrency")
        require_few_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class FittedServeRequest(ServeRequest):
    """A request whose lengths are all set and fit the model's context."""

    prompt_tokens: int
    new_tokens: int
    long_tokens: int
    prefix_tokens: int


@dataclass(frozen=True)
class ServeSide(Side):
    """A way to serve the requests. Sides with equal worker, settings and python share a process.

    worker: the worker's file, as for `WorkerProcess`.
    do: the worker's function, which is called with `requests` and `callers`; see worker.py.
    settings: settings for the worker's `start`, without `threads`.
    python: the worker's interpreter; None for this one.
    alone: whether the side is also measured with a single caller.
    """

    worker: str
    do: str
    settings: Mapping[str, Any]
    python: Path | None = None
    alone: bool = True


def fit_lengths(request: ServeRequest) -> tuple[FittedServeRequest, int, int]:
    """Set the lengths that are None. Returns (the request, the size of the model's vocabulary, its context).

    Raises ManifestError for a folder without a decoder, ParameterError for lengths that do not fit the context.
    """
    manifest = decoder_manifest(request.folder)
    context = manifest.decoder.context_length
    lengths = {
        "prompt_tokens": request.prompt_tokens or max(1, min(MEAN_PROMPT, context // _CONTEXT_DIVISOR)),
        "new_tokens": request.new_tokens or max(2, min(MEAN_NEW, context // _CONTEXT_DIVISOR)),
        "long_tokens": request.long_tokens or max(1, min(LONG_PROMPT, context - 1)),
        "prefix_tokens": request.prefix_tokens or max(1, min(LONG_PREFIX, context - SUFFIX - 1)),
    }
    fitted = FittedServeRequest(**{**vars(request), **lengths})
    for needed, name in (
        (longest_sequence(fitted), "prompt_tokens"),
        (fitted.long_tokens + 1, "long_tokens"),
        (fitted.prefix_tokens + SUFFIX + 1, "prefix_tokens"),
    ):
        if needed > context:
            raise ParameterError(
                f"{name} is {lengths[name]}, so a sequence may need {needed} tokens, but the context has {context}; "
                "give less.",
                name,
            )
    return fitted, manifest.sampler.vocab_size, context


def log_normal_lengths(count: int, mean: int) -> list[int]:
    """`count` lengths with about this mean, in ascending order: quantiles of a log-normal distribution."""
    normal = NormalDist(-(_LOG_DEVIATION**2) / 2, _LOG_DEVIATION)
    return [max(1, round(mean * math.exp(normal.inv_cdf((index + 0.5) / count)))) for index in range(count)]


def longest_sequence(request: FittedServeRequest) -> int:
    """The maximum number of tokens of a sequence, prompt and new tokens together."""
    count = max(request.requests, *request.concurrency)
    return log_normal_lengths(count, request.prompt_tokens)[-1] + log_normal_lengths(count, request.new_tokens)[-1]


def make_requests(request: FittedServeRequest, callers: int, vocab: int) -> Requests:
    """Random requests of `callers` callers, the same for equal seeds. vocab: size of the vocabulary."""
    count = max(request.requests, callers)
    rng = np.random.default_rng([request.seed, count])
    prompts = rng.permutation(log_normal_lengths(count, request.prompt_tokens)).tolist()
    budgets = rng.permutation(log_normal_lengths(count, request.new_tokens)).tolist()
    return [(rng.integers(0, vocab, tokens).tolist(), budget) for tokens, budget in zip(prompts, budgets, strict=True)]


def own_sides(request: ServeRequest) -> list[ServeSide]:
    """The sides of this package. They share a process: the addresses of the weights affect times."""
    settings = {"folder": str(request.folder), "rows": request.rows, "prefill_budget": request.prefill_budget}
    file = worker.__file__
    return [
        ServeSide("engine", "Engine", "ours", file, "engine", settings),
        ServeSide("one-by-one", "generate one by one", "yardstick", file, "one_by_one", settings),
        ServeSide("static", "generate of lists", "yardstick", file, "static", settings, alone=False),
        ServeSide("ideal", "the Engine's runs alone", "yardstick", file, "ideal", settings),
    ]


def choose(request: ServeRequest, others: Sequence[ServeSide] = ()) -> tuple[list[ServeSide], list[ServeSide]]:
    """Select the sides. Returns (sides to run, sides that cannot run here).

    others: sides other than this package's.

    Raises ParameterError for an unknown name in `peers`, BenchmarkError if a named side cannot run.
    """
    return sides.choose([*own_sides(request), *others], request.peers, ())
