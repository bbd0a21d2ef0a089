"""Run and report of `topw bench sampler`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from topw_deploy.bench.measurement import Machine, Spread, interleave, paired, this_machine
from topw_deploy.bench.picture import Bar, Panel
from topw_deploy.bench.process import Worker
from topw_deploy.bench.report import (
    closing_lines,
    comparison,
    duration,
    ratio_json,
    reference_side,
    request_json,
    significant,
    table,
)
from topw_deploy.bench.sampler import worker
from topw_deploy.bench.sampler.genai_model import write_model
from topw_deploy.bench.sampler.request import GENAI_SEARCHES, SIDES, SamplerBenchRequest, choose
from topw_deploy.progress import SILENT, Progress
from topw_deploy.reports import counted

_WARMUP = 2
_YARDSTICK = "max"
_KNOWN = (
    ("authors", "the authors' code"),
    ("hf-top-p", "transformers' top-p"),
    ("genai-top-p", "onnxruntime-genai's top-p"),
)


def run(request: SamplerBenchRequest, progress: Progress = SILENT) -> SamplerReport:
    """Compare the kept sets with the reference's, then time all sides in turn.

    Raises ParameterError for a request that does not fit its logits, BenchmarkError for a named side that is
    missing, and for a side that dies or differs from the reference.
    """
    present, absent = choose(request)
    names = [side.name for side in present]
    machine = this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topw-bench-")))
        progress.say("Preparing logits, embeddings and sides")
        workers = stack.enter_context(_workers(request, names, folder))
        here = workers["here"]
        cases, instructions = here.call("cases"), here.call("instruction_set")
        agreements = []
        for index, case in enumerate(cases):
            progress.say(f"Comparing kept sets: {case['label']}")
            agreements.append(here.call("check", case=index))
        total = len(cases) * len(names) * (request.rounds + _WARMUP)
        with progress.bar(total, "step") as advance:
            samples = [
                interleave(_calls(workers, names, i), request.rounds, _WARMUP, seed=request.seed, advance=advance)
                for i in range(len(cases))
            ]
    found = [CaseReport(*parts) for parts in zip(cases, agreements, samples, strict=True)]
    reasons = [(side.label, str(side.why_not)) for side in absent]
    return SamplerReport(request, machine, found, reasons, instructions)


@contextmanager
def _workers(request: SamplerBenchRequest, names: Sequence[str], folder: Path) -> Iterator[dict[str, Worker]]:
    plain = {k: v for k, v in asdict(request).items() if k not in ("rounds", "peers", "genai_python")}
    paths = {name: str(plain[name]) if plain[name] else None for name in ("logits", "authors")}
    own = [name for name in names if name not in GENAI_SEARCHES]
    with ExitStack() as stack:
        here = Worker(
            "the sampler's process",
            worker.__file__,
            {**plain, **paths, "sides": own, "folder": str(folder)},
            threads=request.threads,
        )
        workers = {"here": stack.enter_context(here)}
        wanted = [name for name in names if name in GENAI_SEARCHES]
        if wanted:
            cases = here.call("cases")
            settings = {
                "task": "sample",
                "model": str(write_model(folder / "genai", cases[0]["vocab"], request.threads)),
                "sides": {name: GENAI_SEARCHES[name] for name in wanted},
                "logits": [str(folder / f"logits-{i}.npy") for i in range(len(cases))],
                "temperatures": [case["parameters"]["temperature"] for case in cases],
            }
            genai = Worker(
                "onnxruntime-genai", "genai.py", settings, python=request.genai_python, threads=request.threads
            )
            workers["genai"] = stack.enter_context(genai)
        yield workers


def _calls(workers: Mapping[str, Worker], names: Sequence[str], case: int) -> dict[str, Callable[[], float]]:
    def of(name: str) -> Worker:
        return workers["genai" if name in GENAI_SEARCHES else "here"]

    return {name: partial(of(name).call, "time", side=name, case=case) for name in names}


@dataclass(frozen=True)
class CaseReport:
    """One case.

    case, agreement: the worker's descriptions of the case and of the comparison.
    samples: seconds per step, by side and round.
    """

    case: Mapping[str, Any]
    agreement: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]

    @property
    def reference(self) -> str:
        return reference_side({name: SIDES[name].kind for name in self.samples})

    def ratios(self, name: str) -> list[float]:
        """Time of `name` relative to the reference, by round."""
        return paired(self.samples, name, self.reference)

    def rows(self) -> Iterator[tuple[str, ...]]:
        for name, times in self.samples.items():
            ratios = [
                Spread.of(paired(self.samples, name, under)).median if under in self.samples else None
                for under in (_YARDSTICK, self.reference)
            ]
            shown = ["" if ratio is None else significant(ratio) for ratio in ratios]
            yield SIDES[name].label, SIDES[name].does, quartiles(Spread.of(times)), *shown


@dataclass(frozen=True)
class SamplerReport:
    """Results.

    absent: (label, reason) of the sides left out.
    instruction_set: instruction set of the native library; None if it is not measured.
    """

    request: SamplerBenchRequest
    machine: Machine
    cases: Sequence[CaseReport]
    absent: Sequence[tuple[str, str]]
    instruction_set: str | None = None

    def text(self) -> str:
        asked = self.request
        geometry = f"metric {asked.options.metric}"
        if asked.options.metric != "uniform":
            geometry += f", d = {asked.hidden:,}" + (", neighbour bound" if asked.neighbour_bound else "")
        native = f", native with {self.instruction_set}" if self.instruction_set else ""
        lines = [f"{self.machine}; {counted(asked.threads, 'thread')}, {counted(asked.rounds, 'round')}{native}"]
        for found in self.cases:
            batch, vocab = found.case["batch"], found.case["vocab"]
            ours = SIDES[found.reference].label
            lines += [
                f"\n{found.case['label']}: {vocab:,} tokens, {counted(batch, 'row')}, {geometry}",
                f"{found.agreement['sentence']}\n",
                table(("side", "gives", "median (quartiles)", "x numpy.max", f"x {ours}"), found.rows()),
            ]
        return "\n".join([*lines, *closing_lines(self.absent, self.machine)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "sampler",
            "machine": self.machine.as_dict(),
            "settings": request_json(self.request),
            "instruction_set": self.instruction_set,
            "cases": [
                {
                    **found.case,
                    "agreement": found.agreement,
                    "sides": {name: _side_json(found, name) for name in found.samples},
                }
                for found in self.cases
            ],
            "absent": dict(self.absent),
        }

    def panels(self) -> list[Panel]:
        return [_panel(found) for found in self.cases]


def quartiles(spread: Spread) -> str:
    """17.1 us (16.9-17.6), in the median's unit."""
    unit, factor = duration(spread.median).split()[1], {"s": 1.0, "ms": 1e3, "us": 1e6}
    low, median, high = (significant(v * factor[unit]) for v in (spread.low, spread.median, spread.high))
    return f"{median} {unit} ({low}-{high})"


def _side_json(found: CaseReport, name: str) -> dict[str, Any]:
    times = found.samples[name]
    return {
        "seconds": list(times),
        "spread": asdict(Spread.of(times)),
        "ratio_to_ours": ratio_json(found.ratios(name)),
    }


def _panel(found: CaseReport) -> Panel:
    bars = []
    for name, times in found.samples.items():
        spread, ratio = Spread.of(times), Spread.of(found.ratios(name)).median
        relation = f"   {significant(ratio, 2)}x ours" if SIDES[name].kind == "peer" else ""
        bars.append(Bar(SIDES[name].label, spread, SIDES[name].kind, duration(spread.median) + relation))
    vocab, batch = found.case["vocab"], found.case["batch"]
    rows = "" if batch == 1 else f", {batch} rows"
    subtitle = f"{found.case['label']}: {vocab:,} tokens{rows}"
    return Panel(subtitle, _finding(found), sorted(bars, key=lambda bar: bar.spread.median))


def _finding(found: CaseReport) -> str:
    ours = found.reference
    took = duration(Spread.of(found.samples[ours]).median)
    factors = {name: Spread.of(found.ratios(other)).median for other, name in _KNOWN if other in found.samples}
    yardstick = ""
    if _YARDSTICK in found.samples:
        yardstick = f" ({significant(Spread.of(paired(found.samples, ours, _YARDSTICK)).median, 2)}x one numpy.max)"
    return f"A Top-W step takes {took}{yardstick}" + (f": {comparison(factors)}" if factors else "")
