"""The implementations of the sampler that `fuzz.sampler` compares, behind one interface.

A function of ADAPTERS opens an implementation for one scenario. It imports what the implementation needs, raises
`Absent` with the reason if that cannot run, and returns a function that answers lists of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tests.support.rows import Case
from tests.support.sampler_cases import Visit
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import as_float32, fast_crop
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWOptions

Answerer = Callable[[list[Case]], list["Answer"]]


class Absent(Exception):  # noqa: N818 - a state, not a failure
    """Raised by an adapter whose implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Answer:
    """An implementation's answer for one row; by default that of an invalid row.

    kept: the kept ids, in the order (logit descending, id ascending) if `ordered`, else ascending.
    stage: the stage of the algorithm that answered.
    distances: the number of computed distances.
    distances_avoided: the number of distances that bounds made unnecessary.
    next_token, logprob, mass: of the draw; None if the implementation does not draw.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    certified: bool = False
    stage: str = "invalid"
    distances: int = 0
    distances_avoided: int = 0
    ordered: bool = True
    next_token: int | None = None
    logprob: float | None = None
    mass: float | None = None


def open_fast(visit: Visit, bound: np.ndarray | None) -> Answerer:
    """Open `sampling.fast_crop`, which answers row by row."""

    def answer(case: Case) -> Answer:
        try:
            found = fast_crop(case.logits, as_float32(case.parameters), visit.scenario.options, visit.geometry, bound)
        except ParameterError:
            return Answer()
        return Answer(found.kept, found.certified, found.stage, found.distances, found.distances_avoided)

    return lambda cases: [answer(case) for case in cases]


def open_torch(visit: Visit, bound: np.ndarray | None) -> Answerer:
    """Open `sampling.torch.crop_rows`, which answers a batch with parameters for each row."""
    try:
        import torch

        from topw_deploy.sampling.torch import CropStage, TensorGeometry, crop_rows
    except ImportError as error:
        raise Absent(str(error)) from error
    torch.set_num_threads(1)
    geometry, bounds = None, None if bound is None else torch.from_numpy(bound)
    if visit.scenario.options.metric != "uniform":
        points = (
            torch.from_numpy(np.asarray(a)) for a in (visit.table, visit.geometry.mean, visit.geometry.inverse_std)
        )
        geometry = TensorGeometry(visit.scenario.options.metric, *points)

    def answer(cases: list[Case]) -> list[Answer]:
        logits = torch.from_numpy(np.stack([case.logits for case in cases]))
        parameters = {
            name: torch.tensor([case.parameters[name] for case in cases], dtype=torch.float64)
            for name in PARAMETER_NAMES
        }
        found = crop_rows(logits, parameters, visit.scenario.options, geometry, bounds)
        return [
            Answer(
                found.ids[i, : found.kept[i]].numpy(),
                bool(found.certified[i]),
                CropStage(int(found.stage[i])).name.lower(),
                int(found.distances[i]),
                int(found.distances_avoided[i]),
            )
            for i in range(len(cases))
        ]

    return answer


def open_native(visit: Visit, bound: np.ndarray | None) -> Answerer:
    """Open the native library's kernel through ctypes. It answers a batch, and also draws."""
    from topw_deploy.plugins.kernel import Kernel, KernelTable
    from topw_deploy.plugins.shared_library import library_path, why_absent

    path = library_path()
    if path is None:
        raise Absent(why_absent())
    options = visit.scenario.options
    table = None if options.metric == "uniform" else KernelTable.from_geometry(visit.geometry, bound)
    return open_kernel(Kernel(path), options, table)


class Sampling(Protocol):
    """The method of `plugins.kernel.Kernel` that is compared."""

    def sample(self, logits: Any, columns: Any, options: Any, table: Any, *, mass: bool, keep_mask: bool) -> Any: ...


def open_kernel(
    kernel: Sampling, options: TopWOptions, table: object, logits: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> Answerer:
    """Open a kernel with one scenario's options and table. It answers a batch.

    table: None for the uniform metric.
    logits: converts float32 rows to the type that the kernel reads.
    """
    from topw_deploy.plugins.kernel import STAGES

    def answer(cases: list[Case]) -> list[Answer]:
        columns = {name: np.array([case.parameters[name] for case in cases]) for name in PARAMETER_NAMES}
        columns["uniform"] = np.array([case.uniform for case in cases])
        rows = logits(np.stack([case.logits for case in cases]))
        found = kernel.sample(rows, columns, options, table, mass=True, keep_mask=True)
        assert found.mass is not None
        assert found.keep_mask is not None
        return [
            Answer(
                np.flatnonzero(found.keep_mask[i]),
                bool(found.certified[i]),
                STAGES[int(report["stage"])],
                int(report["distances"]),
                int(report["distances_avoided"]),
                False,
                int(found.next_token[i]),
                float(found.logprob[i]),
                float(found.mass[i]),
            )
            for i, report in enumerate(found.reports)
        ]

    return answer


ADAPTERS: dict[str, Callable[[Visit, np.ndarray | None], Answerer]] = {
    "fast": open_fast,
    "torch": open_torch,
    "native": open_native,
}
