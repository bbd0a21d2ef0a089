"""The worker of `topw bench sampler` that runs all sides of this environment (started by path through serve.py).

In a process of its own because thread counts of BLAS libraries are fixed when they load, and because a crash of native
code is then an answer and not an end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.bench.sampler.agreement import agree, sentence
from topw_deploy.bench.sampler.catalogue import CATALOGUE
from topw_deploy.bench.sampler.problem import (
    Case,
    Problem,
    cases,
    given_logits,
    logits_for,
    pool_bound,
    write_table,
)
from topw_deploy.bench.sampler.side import Call, Side
from topw_deploy.bench.timing import calls_filling, seconds
from topw_deploy.sampling import Geometry, TopWOptions, crop

_BURST, _MOST_CALLS = 2e-3, 100  # seconds of one sample; calls in it


def make_problem(settings: dict[str, Any]) -> Problem:
    """From the settings that `run.py` sends, plain JSON."""
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
    return Problem(
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


def make_side(name: str, problem: Problem) -> Side:
    """The side called `name`; its libraries are imported here and not before."""
    if name in ("native-op", "graph", "graph-ort", "argmax", "topk"):
        from topw_deploy.bench.sampler import graph_sides

        made: dict[str, Callable[[], Side]] = {
            "native-op": partial(graph_sides.SamplerSide, problem, "portable", native=True),
            "graph": partial(graph_sides.SamplerSide, problem, "portable", native=False),
            "graph-ort": partial(graph_sides.SamplerSide, problem, "onnxruntime", native=False),
            "argmax": partial(graph_sides.OperatorSide, problem, "ArgMax"),
            "topk": partial(graph_sides.OperatorSide, problem, "TopK"),
        }
        return made[name]()
    if name in ("torch", "authors", "hf-top-p", "hf-top-k", "hf-min-p"):
        import torch

        from topw_deploy.bench.sampler import torch_sides

        torch.set_num_threads(problem.threads)
        if name.startswith("hf-"):
            return torch_sides.WarperSide(name.removeprefix("hf-"))
        return torch_sides.TorchSide(problem) if name == "torch" else torch_sides.AuthorsSide(problem)
    if name == "native":
        from topw_deploy.bench.sampler.native_side import NativeSide

        return NativeSide(problem)
    from topw_deploy.bench.sampler import array_sides

    return array_sides.NumpySide(problem) if name == "numpy" else array_sides.MaxSide()


class Home:
    """The sides `names`, opened when they are first used."""

    def __init__(self, problem: Problem, names: list[str]) -> None:
        self.problem = problem
        self.sides = {name: make_side(name, problem) for name in names}
        self._ready: dict[tuple[str, int], tuple[Call, int]] = {}

    def cases(self) -> list[dict[str, Any]]:
        """What is measured, for the report."""
        pairs = zip(self.problem.cases, self.problem.logits, strict=True)
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
        """The one that the native library uses; None if no side is native."""
        if not {"native", "native-op"} & set(self.sides):
            return None
        from topw_deploy.plugins.kernel import Kernel
        from topw_deploy.plugins.shared_library import library_path

        path = library_path()
        return None if path is None else Kernel(path).instruction_set

    def check(self, case: int) -> dict[str, Any]:
        """Compare the kept sets of all sides with the reference's; BenchmarkError if an exact one differs."""
        chosen, logits, p = self.problem.cases[case], self.problem.logits[case], self.problem
        crops = [crop(row, chosen.parameters, p.options, p.geometry) for row in logits]
        found = []
        for name, side in self.sides.items():
            kept = side.kept(chosen, logits)
            if kept is not None:
                found.append(agree(name, kept, crops, exact=CATALOGUE[name].exact))
        return {
            "sentence": sentence(found, crops),
            "certified": sum(c.certified for c in crops),
            "kept": [len(c.kept) for c in crops],
            "sides": {a.side: {"rows": a.rows, "same": a.same, "ties": a.ties} for a in found},
        }

    def time(self, side: str, case: int) -> float:
        """Seconds of one step, from as many in a row as take 2 ms: with warm caches, as after the matmul."""
        key = (side, case)
        if key not in self._ready:
            call = self.sides[side].step(self.problem.cases[case], self.problem.logits[case])
            self._ready[key] = call, calls_filling(call, _BURST, _MOST_CALLS)
        call, count = self._ready[key]
        return seconds(call, count)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The handlers that serve.py calls."""
    home = Home(make_problem(settings), settings["sides"])
    return {"cases": home.cases, "check": home.check, "time": home.time, "instruction_set": home.instruction_set}


def _parameters(case: Case) -> dict[str, float]:
    return {name: getattr(case.parameters, name) for name in case.parameters.__slots__}
