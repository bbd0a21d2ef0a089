"""The worker of `topw bench sampler` for the samplers of this environment.

It is a separate process because BLAS libraries fix their thread count when they are loaded, and native code may crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import BenchmarkError
from topw_deploy.reports import count_text
from topw_deploy.sampling import Geometry, TopWOptions, crop
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop
from topw_lab.bench.measurement import calls_filling, seconds
from topw_lab.bench.sampler import samplers
from topw_lab.bench.sampler.inputs import (
    Case,
    SamplerInputs,
    logits_path,
    make_cases,
    make_logits,
    pool_neighbour_bound,
    read_logits,
    write_table,
)
from topw_lab.bench.sampler.request import SIDES
from topw_lab.bench.sampler.samplers import Call, TimedSampler

NAME = "own"
"""Name of this worker among the workers of the benchmark."""

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many


class SamplerSettings(TypedDict):
    """Settings of the worker. Those that are not described are as in `SamplerBenchRequest`.

    options: fields of TopWOptions.
    logits, authors: paths; None without.
    sides: names of the sides.
    folder: an empty folder for models, logits and embeddings.
    """

    vocab: int
    hidden: int
    batch: int
    regimes: list[str]
    temperatures: list[float]
    options: dict[str, Any]
    geom_scale: float
    logits: str | None
    neighbour_bound: bool
    authors: str | None
    threads: int
    seed: int
    sides: list[str]
    folder: str


def make_inputs(settings: SamplerSettings) -> SamplerInputs:
    """Make the inputs of all samplers. Writes logits and embeddings to the folder of the settings."""
    options = TopWOptions(**settings["options"])
    cases = make_cases(settings["regimes"], settings["temperatures"], settings["geom_scale"])
    if settings["logits"] is not None:
        rows = read_logits(Path(settings["logits"]))
        logits = tuple(rows for _ in cases)
    else:
        logits = tuple(make_logits(c, settings["vocab"], settings["batch"], settings["seed"]) for c in cases)
    folder, (batch, vocab) = Path(settings["folder"]), logits[0].shape
    for index, rows in enumerate(logits):
        np.save(logits_path(folder, index), rows)
    if options.metric == "uniform":
        embeddings, geometry = None, Geometry.uniform()
    else:
        embeddings = write_table(folder, vocab, settings["hidden"], settings["seed"])
        geometry = Geometry.from_embeddings(embeddings, options.metric)
    with_bound = settings["neighbour_bound"] and embeddings is not None
    return SamplerInputs(
        cases=cases,
        logits=logits,
        uniform=np.random.default_rng([settings["seed"], 2]).random((batch,), np.float32),
        options=options,
        geometry=geometry,
        embeddings=embeddings,
        neighbour_bound=pool_neighbour_bound(geometry, logits, options.top_m) if with_bound else None,
        folder=folder,
        threads=settings["threads"],
        authors=Path(settings["authors"]) if settings["authors"] else None,
    )


def make_sampler(name: str, inputs: SamplerInputs) -> TimedSampler:
    """Make the sampler of side `name`, and import its libraries."""
    makers: dict[str, Callable[[], TimedSampler]] = {
        "max": samplers.NumpyMax,
        "native": partial(samplers.GraphSampler, inputs, "portable", native=True),
        "graph": partial(samplers.GraphSampler, inputs, "portable", native=False),
        "graph-ort": partial(samplers.GraphSampler, inputs, "onnxruntime", native=False),
        "argmax": partial(samplers.OperatorModel, inputs, "ArgMax"),
        "topk": partial(samplers.OperatorModel, inputs, "TopK"),
    }
    if name in makers:
        return makers[name]()
    import torch

    from topw_lab.bench.sampler import torch_samplers

    torch.set_num_threads(inputs.threads)
    if name.startswith("hf-"):
        return torch_samplers.TransformersWarper(name.removeprefix("hf-"))
    return torch_samplers.TorchSampler(inputs) if name == "torch" else torch_samplers.AuthorsProcessor(inputs)


class SamplerWorker:
    """The functions of the worker.

    names: of the sides.
    """

    def __init__(self, inputs: SamplerInputs, names: list[str]) -> None:
        self.inputs = inputs
        self.samplers = {name: make_sampler(name, inputs) for name in names}
        self._timed_calls: dict[tuple[str, int], tuple[Call, int]] = {}

    def cases(self) -> list[dict[str, Any]]:
        """Describe the cases, for the report."""
        pairs = zip(self.inputs.cases, self.inputs.logits, strict=True)
        return [
            {
                "label": case.label,
                "regime": case.regime,
                "batch": logits.shape[0],
                "vocab": logits.shape[1],
                "parameters": _parameter_values(case),
            }
            for case, logits in pairs
        ]

    def instruction_set(self) -> str | None:
        """The instruction set of the native library; None if no side uses the library."""
        from topw_deploy.plugins.shared_library import library_path, load

        path = library_path()
        return load(path).instruction_set if path is not None and "native" in self.samplers else None

    def check(self, case: int) -> dict[str, Any]:
        """Compare the kept sets of all sides with the reference's. Raises BenchmarkError if an exact side differs.

        case: number of the case.
        """
        inputs, timed_case, logits = self.inputs, self.inputs.cases[case], self.inputs.logits[case]
        crops = [crop(row, timed_case.parameters, inputs.options, inputs.geometry) for row in logits]
        agreements = []
        for name, sampler in self.samplers.items():
            kept = sampler.kept_ids(timed_case, logits)
            if kept is not None:
                agreements.append(compare_kept_ids(name, kept, crops, exact=SIDES[name].exact))
        return {
            "sentence": agreement_sentence(agreements, crops),
            "certified": sum(c.certified for c in crops),
            "kept": [len(c.kept) for c in crops],
            "sides": {a.side: {"rows": a.rows, "same": a.same, "ties": a.ties} for a in agreements},
        }

    def time(self, side: str, case: int) -> float:
        """Seconds per step, over about 2 ms of steps. CPU caches are warm, as they are after a model's last matmul."""
        key = (side, case)
        if key not in self._timed_calls:
            call = self.samplers[side].prepare_step(self.inputs.cases[case], self.inputs.logits[case])
            self._timed_calls[key] = call, calls_filling(call, _SAMPLE_SECONDS, _MOST_CALLS)
        call, count = self._timed_calls[key]
        return seconds(call, count)


def start(settings: SamplerSettings) -> dict[str, Callable[..., Any]]:
    """Make inputs and samplers. Returns the methods of SamplerWorker."""
    worker = SamplerWorker(make_inputs(settings), settings["sides"])
    return {
        "cases": worker.cases,
        "check": worker.check,
        "time": worker.time,
        "instruction_set": worker.instruction_set,
    }


def _parameter_values(case: Case) -> dict[str, float]:
    return {name: getattr(case.parameters, name) for name in case.parameters.__slots__}


@dataclass(frozen=True)
class Agreement:
    """How many rows of a side have the kept ids of the reference.

    rows: number of rows.
    same: rows with the same kept ids.
    ties: rows with other kept ids, at a tie.
    """

    side: str
    rows: int
    same: int
    ties: int


def compare_kept_ids(side: str, kept: Sequence[ArrayLike], crops: Sequence[Crop], *, exact: bool) -> Agreement:
    """Compare the kept ids of each row with the reference's.

    side: name of the side.
    kept: its kept ids.
    crops: the reference's crops.
    exact: whether the side must agree.

    Raises BenchmarkError if an `exact` side differs beyond ties (docs/contract/graph.md, section 4).
    """
    same = ties = 0
    for row, (ids, reference) in enumerate(zip(kept, crops, strict=True)):
        kept_ids = np.unique(np.asarray(ids, np.int64))
        if np.array_equal(kept_ids, np.sort(reference.kept)):
            same += 1
        elif reference.ties.allow_other_set(FLOAT32_TIES):
            ties += 1
        elif exact:
            raise BenchmarkError(
                f"{side} keeps {len(kept_ids)} tokens of row {row} where the reference keeps {len(reference.kept)} "
                f"({len(np.setxor1d(kept_ids, reference.kept))} differ), so its time means nothing; report this with "
                "the options used."
            )
    return Agreement(side, len(crops), same, ties)


def agreement_sentence(agreements: Sequence[Agreement], crops: Sequence[Crop]) -> str:
    """Say how large the crops are, and which sides agree with the reference."""
    certified = sum(c.certified for c in crops)
    sizes = sorted(len(c.kept) for c in crops)
    kept = count_text(sizes[0], "token") if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} tokens"
    rows = f"{count_text(len(crops), 'row')}, {certified} certified, {kept} kept"
    agreeing = [a.side for a in agreements if a.same == a.rows]
    differing = [f"{a.side} on {a.same} of {a.rows}, {a.ties} differ at a tie" for a in agreements if a.same < a.rows]
    parts = [f"the reference's set on every row: {', '.join(agreeing)}"] if agreeing else []
    return "; ".join([rows, *parts, *differing])
