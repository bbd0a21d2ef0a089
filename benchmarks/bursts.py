"""The worker of `benchmarks.decode`: several models in one process, decoding in turns of a few steps.

What is compared differs by a hundredth or less, on machines that drift by a tenth within seconds. So all models stand
at the same cache length, take turns of a few steps in an order that is drawn anew each time, and share one pool of
threads: with a pool each, the threads of the model that has just stopped would spin for a while on the core that the
next one needs. The first steps of a turn bring the caches back and are not counted; of the others the median is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import onnxruntime as ort

from topw_deploy.bench.decode.argmax import ArgMaxLoop
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.loop import Generation, Row, accept, decode_one_token, prefill

_UNCOUNTED = 2  # steps at the beginning of a turn


class Stepper(Protocol):
    """A model that decodes one sequence, step by step."""

    def begin(self, prompt: list[int], new_tokens: int) -> None: ...

    def step(self) -> object: ...


class TopW:
    """`TopWModel`, its loop taken apart into steps."""

    def __init__(self, folder: Path, sampler: str) -> None:
        self.model = TopWModel.from_pretrained(
            folder, provider="cpu", session_options=shared_threads(), sampler=sampler
        )
        assert self.model.sampler == sampler
        self.certified: list[bool] = []

    def begin(self, prompt: list[int], new_tokens: int) -> None:
        requests, _, _ = self.model._requests(
            [prompt], {"max_new_tokens": new_tokens + 1, "seed": 1, "ignore_eos": True}
        )
        assert self.model._session is not None
        self.row = Row(0, requests[0], None)
        self.generation = Generation(self.model._session, self.model.manifest, [self.row])
        accept(self.generation, prefill(self.generation))

    def step(self) -> None:
        accept(self.generation, decode_one_token(self.generation))

    def end(self) -> None:
        """Remember which steps were certified."""
        self.certified += self.generation.recorded("certified", self.row)


class ArgMax:
    """The same decoder with ArgMax, and no more Python than it takes."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.loop = ArgMaxLoop(path, folder, shared_threads())

    def begin(self, prompt: list[int], new_tokens: int) -> None:
        self.loop.prefill(prompt, len(prompt) + new_tokens + 1)

    def step(self) -> int:
        return self.loop.step()


def shared_threads() -> ort.SessionOptions:
    """Options of a session that uses the process's pool of threads."""
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    return options


def turn(stepper: Stepper, steps: int) -> float:
    """Seconds of a step: the median of `steps`, after those that are not counted."""
    for _ in range(_UNCOUNTED):
        stepper.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        stepper.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder, argmax (its file), samplers, threads, seed."""
    ort.set_global_thread_pool_sizes(settings["threads"], 1)
    folder, argmax = Path(settings["folder"]), Path(settings["argmax"])
    topw = {name: TopW(folder, name) for name in settings["samplers"]}
    # ArgMax once more: what its ratio to itself shows is the noise and the luck of where weights lie in memory
    steppers: dict[str, Stepper] = {"argmax": ArgMax(argmax, folder), **topw, "control": ArgMax(argmax, folder)}
    order = random.Random(settings["seed"])

    def sweep(prompt: list[int], turns: int, steps: int) -> list[dict[str, float]]:
        """From the prompt on, `turns` turns of every model: seconds of a step, by model."""
        for stepper in steppers.values():
            stepper.begin(prompt, turns * (steps + _UNCOUNTED))
        found = []
        for _ in range(turns):
            names = order.sample(list(steppers), len(steppers))
            found.append({name: turn(steppers[name], steps) for name in names})
        for model in topw.values():
            model.end()
        return found

    def certified() -> float:
        every = [step for model in topw.values() for step in model.certified]
        return sum(every) / len(every) if every else 1.0

    return {"sweep": sweep, "certified": certified}
