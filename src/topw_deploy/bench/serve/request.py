"""The options of `topw bench serve`, its sides, and the callers' requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from topw_deploy.bench import sides
from topw_deploy.bench.process import require_few_threads
from topw_deploy.bench.serve import worker
from topw_deploy.bench.sides import Side
from topw_deploy.errors import ManifestError, ParameterError
from topw_deploy.manifest import DecoderManifest, load_manifest

MEAN_PROMPT, MEAN_NEW = 342, 62
LONG_PROMPT, LONG_PREFIX = 4000, 1000
SHORT_PROMPT, SUFFIX = 16, 8  # tokens of the short request that waits for a long prompt; tokens after a prefix
_SHARE = 8  # default mean lengths are at most the context divided by this
_SPREAD = 0.6  # standard deviation of a length's logarithm
_LEAST = {"concurrency": 1, "requests": 1, "prompt_tokens": 1, "new_tokens": 2, "rows": 1, "prefill_budget": 1,
          "long_tokens": 1, "prefix_tokens": 1, "rounds": 1}  # fmt: skip

Requests = list[tuple[list[int], int]]
"""(prompt, new tokens) of each request."""


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """Options of `topw bench serve`.

    folder: an exported model with a `static` cache.
    concurrency: numbers of callers; each is measured on its own.
    requests: minimum number of requests in a round; there are at least as many as callers.
    prompt_tokens, new_tokens: mean lengths. None: MEAN_PROMPT and MEAN_NEW, or less if the context is short.
    rows: maximum rows of the engine.
    prefill_budget: the engine's option.
    long_tokens: length of the prompt that a short request waits for. None: LONG_PROMPT, or what fits the context.
    prefix_tokens: length of the reused prefix. None: LONG_PREFIX, or what fits the context.
    threads: thread counts; each is measured on its own.
    peers: names of sides; empty for all.

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
        for name, least in _LEAST.items():
            value = getattr(self, name)
            for number in value if isinstance(value, (list, tuple)) else (value,):
                if number is not None and number < least:
                    raise ParameterError(f"{name} is {number}, but must be an integer >= {least}.", name)
        if not self.concurrency:
            raise ParameterError("concurrency is empty, but must list numbers of callers.", "concurrency")
        require_few_threads(self.threads)


@dataclass(frozen=True)
class ServeSide(Side):
    """A way to serve the requests. Sides with equal worker, settings and python share a process.

    worker: the worker's file, as for `Worker`.
    do: the worker's function, called with `requests` and `callers`; see worker.py.
    settings: the worker's settings other than `threads`.
    python: the worker's interpreter; None for this one.
    alone: whether it is also measured with a single caller.
    """

    worker: str
    do: str
    settings: dict[str, Any]
    python: Path | None = None
    alone: bool = True


def fitted(request: ServeRequest) -> tuple[ServeRequest, int, int]:
    """Returns (the request with lengths that fit the model's context, the vocabulary's size, the context).

    Raises ManifestError for a folder without a decoder, ParameterError for lengths that do not fit.
    """
    manifest = load_manifest(request.folder)
    if not isinstance(manifest, DecoderManifest):
        raise ManifestError(f"{request.folder} is a sampler without a decoder; give an exported model.")
    context = manifest.decoder.context_length
    found = replace(
        request,
        prompt_tokens=request.prompt_tokens or max(1, min(MEAN_PROMPT, context // _SHARE)),
        new_tokens=request.new_tokens or max(2, min(MEAN_NEW, context // _SHARE)),
        long_tokens=request.long_tokens or max(1, min(LONG_PROMPT, context - 1)),
        prefix_tokens=request.prefix_tokens or max(1, min(LONG_PREFIX, context - SUFFIX - 1)),
    )
    assert found.long_tokens
    assert found.prefix_tokens
    for needed, name in (
        (longest(found), "prompt_tokens"),
        (found.long_tokens + 1, "long_tokens"),
        (found.prefix_tokens + SUFFIX + 1, "prefix_tokens"),
    ):
        if needed > context:
            raise ParameterError(
                f"{name} is {getattr(found, name)}, so a sequence may need {needed} tokens, but the context has "
                f"{context}; give less.",
                name,
            )
    return found, manifest.sampler.vocab_size, context


def ragged(count: int, mean: int) -> list[int]:
    """`count` lengths with about this mean, ascending: the quantiles of a log-normal distribution."""
    normal = NormalDist(-(_SPREAD**2) / 2, _SPREAD)
    return [max(1, round(mean * math.exp(normal.inv_cdf((index + 0.5) / count)))) for index in range(count)]


def longest(request: ServeRequest) -> int:
    """The maximum number of tokens of a sequence. request: from `fitted`."""
    assert request.prompt_tokens
    assert request.new_tokens
    count = max(request.requests, *request.concurrency)
    return ragged(count, request.prompt_tokens)[-1] + ragged(count, request.new_tokens)[-1]


def requests_of(request: ServeRequest, callers: int, vocab: int) -> Requests:
    """Random prompts for a number of callers; equal for equal seeds. request: from `fitted`."""
    assert request.prompt_tokens
    assert request.new_tokens
    count = max(request.requests, callers)
    rng = np.random.default_rng([request.seed, count])
    prompts = rng.permutation(ragged(count, request.prompt_tokens)).tolist()
    budgets = rng.permutation(ragged(count, request.new_tokens)).tolist()
    return [(rng.integers(0, vocab, tokens).tolist(), budget) for tokens, budget in zip(prompts, budgets, strict=True)]


def own_sides(request: ServeRequest) -> list[ServeSide]:
    """The sides of this package. They share a process, and so the addresses of the weights."""
    settings = {"folder": str(request.folder), "rows": request.rows, "prefill_budget": request.prefill_budget}
    file = worker.__file__
    return [
        ServeSide("engine", "Engine", "ours", file, "engine", settings),
        ServeSide("one-by-one", "generate one by one", "yardstick", file, "one_by_one", settings),
        ServeSide("static", "generate of lists", "yardstick", file, "static", settings, alone=False),
        ServeSide("ideal", "the Engine's runs alone", "yardstick", file, "ideal", settings),
    ]


def choose(request: ServeRequest, others: Sequence[ServeSide] = ()) -> tuple[list[ServeSide], list[ServeSide]]:
    """Returns (sides to run, sides left out). others: sides other than this package's.

    Raises ParameterError for an unknown name in `peers`, BenchmarkError if a named side cannot run.
    """
    return sides.choose([*own_sides(request), *others], request.peers, ())
