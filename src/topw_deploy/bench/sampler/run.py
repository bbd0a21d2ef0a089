"""The run of `topw bench sampler`: which sides are there, do they agree, and what does each take."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from topw_deploy.bench.machine import describe
from topw_deploy.bench.process import Worker
from topw_deploy.bench.progress import Progress, no_progress
from topw_deploy.bench.sampler import home
from topw_deploy.bench.sampler.catalogue import GENAI, choose
from topw_deploy.bench.sampler.genai_model import SEARCHES, write_model
from topw_deploy.bench.sampler.report import CaseReport, SamplerReport
from topw_deploy.bench.sampler.settings import SamplerSettings
from topw_deploy.bench.timing import interleave

_WARMUP = 2


def run(settings: SamplerSettings, progress: Progress = no_progress) -> SamplerReport:
    """Take the measurement.

    Raises ParameterError for settings that fit nothing, BenchmarkError for a side that was named and is absent, that
    dies, or that keeps other tokens than the reference.
    """
    choice = choose(settings.peers, authors=settings.authors, genai_python=settings.genai_python)
    machine = describe()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topw-bench-")))
        progress.say("Preparing logits, embeddings and sides")
        workers = stack.enter_context(_workers(settings, choice.present, folder))
        here = workers["home"]
        cases, instructions = here.call("cases"), here.call("instruction_set")
        agreements = []
        for index, case in enumerate(cases):
            progress.say(f"Comparing kept sets: {case['label']}")
            agreements.append(here.call("check", case=index))
        total = len(cases) * len(choice.present) * (settings.rounds + _WARMUP)
        with progress.bar(total, "step") as tick:
            samples = [
                interleave(_sides(workers, choice.present, i), settings.rounds, _WARMUP, seed=settings.seed, tick=tick)
                for i in range(len(cases))
            ]
    found = [CaseReport(*parts) for parts in zip(cases, agreements, samples, strict=True)]
    return SamplerReport(settings, machine, found, choice.absent, instructions)


@contextmanager
def _workers(settings: SamplerSettings, names: Sequence[str], folder: Path) -> Iterator[dict[str, Worker]]:
    """The processes that the sides run in: one of this environment, one of onnxruntime-genai's if it is wanted."""
    plain = {k: v for k, v in asdict(settings).items() if k not in ("rounds", "peers", "genai_python")}
    paths = {name: str(plain[name]) if plain[name] else None for name in ("logits", "authors")}
    sides = [name for name in names if name not in GENAI]
    with ExitStack() as stack:
        here = Worker(
            "the sampler's process",
            home.__file__,
            {**plain, **paths, "sides": sides, "folder": str(folder)},
            threads=settings.threads,
        )
        workers = {"home": stack.enter_context(here)}
        wanted = [name for name in names if name in GENAI]
        if wanted:
            cases = here.call("cases")
            genai = {
                "model": str(write_model(folder / "genai", cases[0]["vocab"], settings.threads)),
                "sides": {name: SEARCHES[name] for name in wanted},
                "logits": [str(folder / f"logits-{i}.npy") for i in range(len(cases))],
                "temperatures": [case["parameters"]["temperature"] for case in cases],
            }
            there = Worker(
                "onnxruntime-genai",
                "genai_sampler.py",
                genai,
                python=settings.genai_python,
                threads=settings.threads,
            )
            workers["genai"] = stack.enter_context(there)
        yield workers


def _sides(workers: Mapping[str, Worker], names: Sequence[str], case: int) -> dict[str, Callable[[], float]]:
    def worker(name: str) -> Worker:
        return workers["genai" if name in GENAI else "home"]

    return {name: partial(worker(name).call, "time", side=name, case=case) for name in names}
