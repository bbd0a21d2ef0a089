"""Run `topw bench sampler`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from topw_deploy.progress import SILENT, Progress
from topw_lab.bench.measurement import interleave, this_machine
from topw_lab.bench.process import WorkerProcess
from topw_lab.bench.sampler import worker
from topw_lab.bench.sampler.genai_model import write_model
from topw_lab.bench.sampler.inputs import logits_path
from topw_lab.bench.sampler.report import CaseReport, SamplerReport
from topw_lab.bench.sampler.request import GENAI_SEARCHES, SamplerBenchRequest, choose
from topw_lab.bench.sides import absences

_WARMUP_ROUNDS = 2


def run(request: SamplerBenchRequest, progress: Progress = SILENT) -> SamplerReport:
    """Compare the kept sets of all exact sides with the reference's, then time all sides in turn.

    Raises ParameterError for a request that does not fit its logits, BenchmarkError for a named side that is missing,
    and for a side that dies or differs from the reference.
    """
    present, absent = choose(request)
    names = [side.name for side in present]
    machine = this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topw-bench-")))
        progress.say("Preparing logits, embeddings and sides")
        workers = stack.enter_context(_start_workers(request, names, folder))
        own = workers[worker.NAME]
        cases, instruction_set = own.call("cases"), own.call("instruction_set")
        agreements = []
        for index, case in enumerate(cases):
            progress.say(f"Comparing kept sets: {case['label']}")
            agreements.append(own.call("check", case=index))
        total = len(cases) * len(names) * (request.rounds + _WARMUP_ROUNDS)
        with progress.bar(total, "step") as advance:
            samples = [
                interleave(
                    _timed_calls(workers, names, index),
                    request.rounds,
                    _WARMUP_ROUNDS,
                    seed=request.seed,
                    advance=advance,
                )
                for index in range(len(cases))
            ]
    reports = [CaseReport(*fields) for fields in zip(cases, agreements, samples, strict=True)]
    return SamplerReport(
        request=request, machine=machine, cases=reports, absent=absences(absent), instruction_set=instruction_set
    )


@contextmanager
def _start_workers(
    request: SamplerBenchRequest, names: Sequence[str], folder: Path
) -> Iterator[Mapping[str, WorkerProcess]]:
    """Start the worker of this environment's samplers and, if a side needs it, that of onnxruntime-genai.

    names: of the sides.
    folder: an empty folder for models, logits and embeddings.

    Yields the workers by name.
    """
    genai_sides = {name: GENAI_SEARCHES[name] for name in names if name in GENAI_SEARCHES}
    with ExitStack() as stack:
        settings = _own_settings(request, [name for name in names if name not in GENAI_SEARCHES], folder)
        own = WorkerProcess("the sampler's process", worker.__file__, settings, threads=request.threads)
        workers = {worker.NAME: stack.enter_context(own)}
        if genai_sides:
            cases = own.call("cases")
            genai_settings = {
                "task": "sample",
                "model": str(write_model(folder / "genai", cases[0]["vocab"], request.threads)),
                "sides": genai_sides,
                "logits": [str(logits_path(folder, index)) for index in range(len(cases))],
                "temperatures": [case["parameters"]["temperature"] for case in cases],
            }
            genai = WorkerProcess(
                "onnxruntime-genai", "genai.py", genai_settings, python=request.genai_python, threads=request.threads
            )
            workers["genai"] = stack.enter_context(genai)
        yield workers


def _own_settings(request: SamplerBenchRequest, sides: list[str], folder: Path) -> worker.SamplerSettings:
    return {
        "vocab": request.vocab,
        "hidden": request.hidden,
        "batch": request.batch,
        "regimes": list(request.regimes),
        "temperatures": list(request.temperatures),
        "options": asdict(request.options),
        "geom_scale": request.geom_scale,
        "logits": None if request.logits is None else str(request.logits),
        "neighbour_bound": request.neighbour_bound,
        "authors": None if request.authors is None else str(request.authors),
        "threads": request.threads,
        "seed": request.seed,
        "sides": sides,
        "folder": str(folder),
    }


def _timed_calls(
    workers: Mapping[str, WorkerProcess], names: Sequence[str], case: int
) -> dict[str, Callable[[], float]]:
    """For each side, a call that returns the seconds of a step of `case`."""
    process_of = {name: workers["genai" if name in GENAI_SEARCHES else worker.NAME] for name in names}
    return {name: partial(process.call, "time", side=name, case=case) for name, process in process_of.items()}
