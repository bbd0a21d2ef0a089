"""Run `topw bench rules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import count_text
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_lab.bench.measurement import interleave, this_machine
from topw_lab.bench.process import WorkerProcess
from topw_lab.bench.rules import worker
from topw_lab.bench.rules.report import ModelReport, RulesReport, RuleTimes
from topw_lab.bench.rules.request import RulesRequest, choose, prompt_ids
from topw_lab.bench.sides import Side, absences

_WARMUP_ROUNDS = 1


def run(request: RulesRequest, progress: Progress = SILENT) -> RulesReport:
    """Measure one model after the other, each in a process of its own.

    A round calls every rule at every temperature once, in random order.

    Raises ManifestError for a folder without a decoder, ParameterError for a prompt that does not fit, BenchmarkError
    for a named sampler that is not available, and errors of opening and running the models.
    """
    present, absent = choose(request)
    prompts = {folder: prompt_ids(request, folder) for folder in request.folders}
    machine = this_machine()
    cells = len(request.rules) * len(request.temperatures)
    total = len(prompts) * len(present) * len(request.threads) * cells * (request.rounds + _WARMUP_ROUNDS)
    with progress.bar(total, "generation") as advance:
        models = [
            _measure(request, folder, prompt, side, threads, advance, progress)
            for folder, prompt in prompts.items()
            for side in present
            for threads in request.threads
        ]
    return RulesReport(request=request, machine=machine, models=models, absent=absences(absent))


def _measure(
    request: RulesRequest,
    folder: Path,
    prompt: list[int],
    side: Side,
    threads: int,
    advance: Advance,
    progress: Progress,
) -> ModelReport:
    progress.say(f"Loading {folder}, {side.label}, {count_text(threads, 'thread')}")
    settings: worker.RulesSettings = {
        "folder": str(folder),
        "sampler": side.name,
        "threads": threads,
        "prompt": prompt,
        "new_tokens": request.new_tokens,
    }
    with WorkerProcess(str(folder), worker.__file__, settings, threads=threads) as process:
        places = {
            f"{rule.label} at {temperature!r}": (rule, temperature)
            for temperature in request.temperatures
            for rule in request.rules
        }
        calls = {name: _seeded_call(process, *place, request.seed) for name, place in places.items()}
        samples = interleave(calls, request.rounds, _WARMUP_ROUNDS, seed=request.seed, advance=advance)
    cells = [RuleTimes(rule.label, temperature, samples[name]) for name, (rule, temperature) in places.items()]
    return ModelReport(folder, side.label, threads, len(prompt), request.top_w_label, cells)


def _seeded_call(
    process: WorkerProcess, rule: RuleSetting, temperature: float, seed: int
) -> Callable[[], Mapping[str, float]]:
    """A call that generates once. Its n-th call has the seed `seed` + n, the same for all rules and temperatures."""
    seeds = count(seed)

    def call(parameters: Mapping[str, object]) -> Mapping[str, float]:
        result: Mapping[str, float] = process.call("run", parameters=parameters, seed=next(seeds))
        return result

    return partial(call, {**rule.parameters, "temperature": temperature})
