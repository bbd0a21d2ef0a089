"""Seconds of an engine's runs: of a step by the number of its rows, and of a chunk by the number of its tokens."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel

STEPS, REPEATS = 96, 5
# `python -m benchmarks.serve` on an idle AMD EPYC with AVX2 (docs/lab/results.md, "Serving many callers").
_REQUESTS, _PROMPTS, _NEW, _CHUNK = 16, 5383, 976, 256  # requests, prompt tokens, new tokens, tokens of a chunk
_RATES = {1: 111, 4: 123}  # callers -> new tokens per second
_REUSED, _FACTOR = 16.8e-3, 70  # seconds to the first text after a reused prefix; times as long if it is read
MODEL_OPTIONS: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}


@dataclass(frozen=True)
class Costs:
    """Measured seconds.

    step: of a step that draws a token for 1, 2, ... rows, work between runs included.
    chunk_fixed, chunk_token: of a chunk of n tokens, chunk_fixed + n * chunk_token.
    chunk: maximum tokens of a chunk.
    model, machine: what was measured, and where.
    """

    step: tuple[float, ...]
    chunk_fixed: float
    chunk_token: float
    chunk: int
    model: str
    machine: str

    @property
    def rows(self) -> int:
        return len(self.step)

    def reading(self, tokens: int) -> float:
        """Seconds of one chunk."""
        return self.chunk_fixed + tokens * self.chunk_token

    def request(self, prompt: float, new: float) -> float:
        """Seconds of a replica that one request takes when all rows are in use: its share of the steps, and its chunks.

        Its inverse is the capacity of a replica in requests per second.
        """
        chunks = np.ceil(prompt / self.chunk)
        return float(chunks * self.chunk_fixed + prompt * self.chunk_token + (new - 1) * self.step[-1] / self.rows)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Costs:
        found = json.loads(path.read_text("utf-8"))
        return cls(**{**found, "step": tuple(found["step"])})


def stored_costs(rows: int = 8) -> Costs:
    """The costs of the random Llama of 52 M parameters, int4, one thread, on an idle machine, as docs/lab has them.

    Solves for the table "Serving many callers": the time for all requests with one and with four callers, and the times
    to the first text of prompts of 1,008 tokens, of which 1,000 are reused or none. A step takes a + b * width, so more
    than four rows are extrapolated.
    """
    most, left = 1008, 8
    chunks = math.ceil(most / _CHUNK)
    # fixed + left * token = reused; chunks * fixed + most * token = reused * factor
    token = (_FACTOR - chunks) * _REUSED / (most - chunks * left)
    fixed = _REUSED - left * token
    reading = math.ceil(_PROMPTS / _REQUESTS / _CHUNK) * _REQUESTS * fixed + _PROMPTS * token
    one, four = (width * (_NEW / rate - reading) / (_NEW - _REQUESTS) for width, rate in _RATES.items())
    steps = tuple(one + (width - 1) * (four - one) / 3 for width in range(1, rows + 1))
    return Costs(steps, fixed, token, _CHUNK, "random Llama, 52 M, int4, 1 thread", "docs/lab/results.md")


class _Clock:
    """A stopping criterion that never stops, and notes the time of each token."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self, *_: Any) -> bool:
        self._times.append(time.perf_counter())
        return False


def measure(folder: Path, rows: int, chunk: int) -> Costs:
    """Measure an exported model on one thread.

    A step's time is the least of REPEATS medians, and a chunk's the least of 4 * REPEATS: other programs only add to
    them.
    """
    rng = np.random.default_rng(0)
    with TopWModel.from_pretrained(folder, **MODEL_OPTIONS) as model:
        vocabulary = model.manifest.sampler.vocab_size
        with Engine(model, max_batch=rows, prefill_budget=chunk, reuse_prefixes=False) as engine:

            def prompt(tokens: int) -> list[int]:
                return rng.integers(3, vocabulary, tokens).tolist()

            def step(width: int) -> float:
                """Median seconds between the last request's tokens, while all `width` requests are running."""
                times: list[float] = []
                options: dict[str, Any] = {"max_new_tokens": STEPS, "ignore_eos": True}
                asked = [engine.submit(prompt(8), **options) for _ in range(width - 1)]
                asked.append(engine.submit(prompt(8), **options, stopping_criteria=[_Clock(times)]))
                for each in asked:
                    each.result()
                return statistics.median(np.diff(times[: STEPS - width]).tolist())

            def read(tokens: int) -> float:
                result = engine.submit(prompt(tokens), max_new_tokens=1, ignore_eos=True).result()
                return float(result.timings.prefill_seconds)

            step(rows)
            steps = [min(step(width) for _ in range(REPEATS)) for width in range(1, rows + 1)]
            lengths = [chunk // 8, chunk // 4, chunk // 2, chunk]
            seconds = [min(read(length) for _ in range(REPEATS * 4)) for length in lengths]
    slope, fixed = np.polyfit(lengths, seconds, 1)
    # A step of more rows is never cheaper; what says otherwise is noise.
    rising = np.maximum.accumulate(steps)
    return Costs(tuple(map(float, rising)), max(float(fixed), 0.0), float(slope), chunk, folder.name, machine())
