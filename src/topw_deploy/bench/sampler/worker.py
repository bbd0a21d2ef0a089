"""The worker for this environment's samplers.

It is a separate process because BLAS libraries fix their thread count when loaded, and native code may crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.bench.measurement import calls_filling, seconds
from topw_deploy.bench.sampler import samplers
from topw_deploy.bench.sampler.inputs import (
    Case,
    Inputs,
    cases,
    given_logits,
    logits_for,
    pool_bound,
    write_table,
)
from topw_deploy.bench.sampler.request import SIDES
from topw_deploy.bench.sampler.samplers import Call, Sampler
from topw_deploy.errors import BenchmarkError
from topw_deploy.reports import counted
from topw_deploy.sampling import Geometry, TopWOptions, crop
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop

_BURST, _MOST_CALLS = 2e-3, 100  # seconds per sample; maximum calls


def make_inputs(settings: dict[str, Any]) -> Inputs:
    """The inputs for the JSON settings from `run.py`."""
    options = TopWOptions(**settings["options"])
    chosen = cases(settings["regimes"], settings["temperatures"], settings["geom_scale"])
    if settings["logits"] is not None:
        rows = given_logits(Path(settings["logits"]))
        logits = tuple(rows for _ in chosen)
    else:
        logits = tuple(logits_for(c, settings["vocab"], settings["batch"], settings["seed"]) for c in chosen)
    folder, (batch, vocab) = Path(settings["folder"]), logits[0].shape
    for index, rows in enumerate(logits):
        np.save(folder / f"logits-{index}.npy", rows)
    if options.metric == "uniform":
        embeddings, geometry = None, Geometry.uniform()
    else:
        embeddings = write_table(folder, vocab, settings["hidden"], settings["seed"])
        geometry = Geometry.from_embeddings(embeddings, options.metric)
    with_bound = settings["neighbour_bound"] and embeddings is not None
    return Inputs(
        cases=chosen,
        logits=logits,
        uniform=np.random.default_rng([settings["seed"], 2]).random((batch,), np.float32),
        options=options,
        geometry=geometry,
        embeddings=embeddings,
        neighbour_bound=pool_bound(geometry, logits, options.top_m) if with_bound else None,
        folder=folder,
        threads=settings["threads"],
        authors=Path(settings["authors"]) if settings["authors"] else None,
    )


def make_sampler(name: str, inputs: Inputs) -> Sampler:
    """The sampler of side `name`. Imports its libraries."""
    made: dict[str, Callable[[], Sampler]] = {
        "numpy": partial(samplers.NumpySampler, inputs),
        "max": samplers.NumpyMax,
        "native": partial(samplers.NativeSampler, inputs),
        "native-op": partial(samplers.GraphSampler, inputs, "portable", native=True),
        "graph": partial(samplers.GraphSampler, inputs, "portable", native=False),
        "graph-ort": partial(samplers.GraphSampler, inputs, "onnxruntime", native=False),
        "argmax": partial(samplers.OperatorModel, inputs, "ArgMax"),
        "topk": partial(samplers.OperatorModel, inputs, "TopK"),
    }
    if name in made:
        return made[name]()
    import torch

    from topw_deploy.bench.sampler import torch_samplers

    torch.set_num_threads(inputs.threads)
    if name.startswith("hf-"):
        return torch_samplers.Warper(name.removeprefix("hf-"))
    return torch_samplers.TorchSampler(inputs) if name == "torch" else torch_samplers.AuthorsProcessor(inputs)


class SamplerWorker:
    """The samplers of the named sides."""

    def __init__(self, inputs: Inputs, names: list[str]) -> None:
        self.inputs = inputs
        self.samplers = {name: make_sampler(name, inputs) for name in names}
        self._ready: dict[tuple[str, int], tuple[Call, int]] = {}

    def cases(self) -> list[dict[str, Any]]:
        """The cases, for the report."""
        pairs = zip(self.inputs.cases, self.inputs.logits, strict=True)
        return [
            {
                "label": case.label,
                "regime": case.regime,
                "batch": logits.shape[0],
                "vocab": logits.shape[1],
                "parameters": _parameters(case),
            }
            for case, logits in pairs
        ]

    def instruction_set(self) -> str | None:
        """The native library's instruction set; None if it is not measured."""
        if not {"native", "native-op"} & set(self.samplers):
            return None
        from topw_deploy.plugins.kernel import Kernel
        from topw_deploy.plugins.shared_library import library_path

        path = library_path()
        return None if path is None else Kernel(path).instruction_set

    def check(self, case: int) -> dict[str, Any]:
        """Compare the kept sets with the reference's. Raises BenchmarkError if an exact side differs."""
        chosen, logits, p = self.inputs.cases[case], self.inputs.logits[case], self.inputs
        crops = [crop(row, chosen.parameters, p.options, p.geometry) for row in logits]
        found = []
        for name, sampler in self.samplers.items():
            kept = sampler.kept(chosen, logits)
            if kept is not None:
                found.append(agree(name, kept, crops, exact=SIDES[name].exact))
        return {
            "sentence": sentence(found, crops),
            "certified": sum(c.certified for c in crops),
            "kept": [len(c.kept) for c in crops],
            "sides": {a.side: {"rows": a.rows, "same": a.same, "ties": a.ties} for a in found},
        }

    def time(self, side: str, case: int) -> float:
        """Seconds per step over about 2 ms of steps. Caches are warm, as they are after a model's last matmul."""
        key = (side, case)
        if key not in self._ready:
            call = self.samplers[side].step(self.inputs.cases[case], self.inputs.logits[case])
            self._ready[key] = call, calls_filling(call, _BURST, _MOST_CALLS)
        call, count = self._ready[key]
        return seconds(call, count)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    worker = SamplerWorker(make_inputs(settings), settings["sides"])
    return {
        "cases": worker.cases,
        "check": worker.check,
        "time": worker.time,
        "instruction_set": worker.instruction_set,
    }


def _parameters(case: Case) -> dict[str, float]:
    return {name: getattr(case.parameters, name) for name in case.parameters.__slots__}


@dataclass(frozen=True)
class Agreement:
    """How many rows equal the reference, and how many differ at a tie."""

    side: str
    rows: int
    same: int
    ties: int


def agree(side: str, kept: Sequence[ArrayLike], crops: Sequence[Crop], *, exact: bool) -> Agreement:
    """Compare each row's kept ids with the reference's.

    Raises BenchmarkError if an `exact` side differs beyond ties (docs/contract/graph.md, section 4).
    """
    same = ties = 0
    for row, (ids, wanted) in enumerate(zip(kept, crops, strict=True)):
        found = np.unique(np.asarray(ids, np.int64))
        if np.array_equal(found, np.sort(wanted.kept)):
            same += 1
        elif wanted.ties.allow_other_set(FLOAT32_TIES):
            ties += 1
        elif exact:
            raise BenchmarkError(
                f"{side} keeps {len(found)} tokens of row {row} where the reference keeps {len(wanted.kept)} "
                f"({len(np.setxor1d(found, wanted.kept))} differ), so its time means nothing; report this with the "
                "options used."
            )
    return Agreement(side, len(crops), same, ties)


def sentence(agreements: Iterable[Agreement], crops: Sequence[Crop]) -> str:
    found = list(agreements)
    certified = sum(c.certified for c in crops)
    sizes = sorted(len(c.kept) for c in crops)
    kept = counted(sizes[0], "token") if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} tokens"
    rows = f"{counted(len(crops), 'row')}, {certified} certified, {kept} kept"
    equal = [a.side for a in found if a.same == a.rows]
    other = [f"{a.side} on {a.same} of {a.rows}, {a.ties} differ at a tie" for a in found if a.same < a.rows]
    parts = [f"the reference's set on every row: {', '.join(equal)}"] if equal else []
    return "; ".join([rows, *parts, *other])
