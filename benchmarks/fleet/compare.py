"""Compare a real engine with the simulated one on the same requests.

The real engine runs on a virtual clock, which each run of the engine advances by its time in `costs`. So scheduling and
reuse of prefixes are compared without the noise of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.costs import MODEL_OPTIONS, Costs
from benchmarks.fleet.simulate import Outcome, simulate
from benchmarks.fleet.workload import Requests
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel

FIGURES = (
    ("first token, mean", lambda outcome: float(outcome.first.mean())),
    ("first token, p50", lambda outcome: float(np.percentile(outcome.first, 50))),
    ("first token, p99", lambda outcome: float(np.percentile(outcome.first, 99))),
    ("whole answer, mean", lambda outcome: float(outcome.whole.mean())),
    ("whole answer, p99", lambda outcome: float(np.percentile(outcome.whole, 99))),
    ("prompt tokens reused", lambda outcome: outcome.reused),
)
"""(Name, function of an Outcome). All are in seconds except the last, which is a share."""

_WARM_UP = 0.2


@dataclass(frozen=True)
class Comparison:
    """The figures of both engines at one load.

    load: share of the replica's capacity without reuse of prefixes.
    measured, simulated: FIGURES by name, of the real and of the simulated engine.
    """

    load: float
    measured: dict[str, float]
    simulated: dict[str, float]

    def rows(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for name, measured in self.measured.items():
            simulated, unit = self.simulated[name], "" if name.endswith("reused") else " ms"
            scale = 1e3 if unit else 1
            ratio = f"{simulated / measured:.2f}" if measured else ""
            found.append(
                (f"{self.load:g}", name, f"{measured * scale:.3g}{unit}", f"{simulated * scale:.3g}{unit}", ratio)
            )
        return found


def compare(folder: Path, costs: Costs, requests: Requests, load: float) -> Comparison:
    """Run `requests` at `load` times the capacity on both engines."""
    rate = load / costs.request(float(requests.prompt.mean()), float(requests.new.mean()))
    timed = requests.at_rate(rate)
    measured = _run_on_virtual_clock(folder, costs, timed)
    outcomes = measured, simulate(costs, timed, 1, "random")
    return Comparison(load, *({name: figure(outcome) for name, figure in FIGURES} for outcome in outcomes))


@contextmanager
def _open_engine(folder: Path, costs: Costs, requests: Requests) -> Iterator[tuple[Engine, list[list[int]]]]:
    """Open an engine. Yields the engine and the prompts' token ids.

    Prompts of a group begin with the same tokens; all other tokens are random.
    """
    rng = np.random.default_rng(1)
    with TopWModel.from_pretrained(folder, **MODEL_OPTIONS) as model:
        vocabulary = model.manifest.sampler.vocab_size
        heads = {group: rng.integers(3, vocabulary, most) for group, most in _longest_shared_prefixes(requests).items()}
        prompts = [
            np.concatenate([heads[group][:shared], rng.integers(3, vocabulary, prompt - shared)]).tolist()
            for group, shared, prompt in zip(requests.group.tolist(), requests.shared, requests.prompt, strict=True)
        ]
        with Engine(model, max_batch=costs.rows, prefill_budget=costs.chunk, max_queue=len(prompts)) as engine:
            for _ in range(2):  # warm-up: the first runs compile code and allocate memory
                engine.submit(prompts[0][:1], max_new_tokens=8, ignore_eos=True).result()
            yield engine, prompts


def _run_on_virtual_clock(folder: Path, costs: Costs, requests: Requests) -> Outcome:
    """After each run, submit the requests that have arrived. When the engine is idle, submit the next request."""
    with _open_engine(folder, costs, requests) as (engine, prompts):
        now = 0.0
        asked: list[Any] = []
        tokens: list[list[float]] = [[] for _ in prompts]
        batch: Any = engine._batch
        read, step = batch.read, batch.step

        def noting(index: int) -> Any:
            def note(*_: Any) -> bool:
                tokens[index].append(now)
                return False

            return note

        def submit() -> None:
            index = len(asked)
            options: dict[str, Any] = {"max_new_tokens": int(requests.new[index]), "ignore_eos": True, "seed": 0}
            asked.append(engine.submit(prompts[index], stopping_criteria=[noting(index)], **options))

        def after(found: Any, seconds: float) -> Any:
            nonlocal now
            now += seconds
            while len(asked) < len(prompts) and requests.arrival[len(asked)] <= now:
                submit()
            return found

        batch.read = lambda row, request, start, end: after(read(row, request, start, end), costs.reading(end - start))
        batch.step = lambda width: after(step(width), costs.step[width - 1])
        while len(asked) < len(prompts):
            if all(each.done for each in asked):  # then the engine's thread is idle and does not change `now`
                now = max(now, float(requests.arrival[len(asked)]))
                submit()
            time.sleep(0.001)
        results = [each.result() for each in asked]
    first = [times[0] - arrival for times, arrival in zip(tokens, requests.arrival.tolist(), strict=True)]
    whole = [times[-1] - arrival for times, arrival in zip(tokens, requests.arrival.tolist(), strict=True)]
    return _outcome(first, whole, results)


def _outcome(first: list[float], whole: list[float], results: list[Any]) -> Outcome:
    start = int(len(results) * _WARM_UP)
    counted = results[start:]
    reused = sum(each.cached_tokens for each in counted) / sum(each.prompt_tokens for each in counted)
    return Outcome(np.array(first[start:]), np.array(whole[start:]), reused)


def _longest_shared_prefixes(requests: Requests) -> dict[int, int]:
    found: dict[int, int] = {}
    for group, shared in zip(requests.group.tolist(), requests.shared.tolist(), strict=True):
        found[group] = max(shared, found.get(group, 0))
    return found
