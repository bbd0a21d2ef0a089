"""The native C function, called without any runtime around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.bench.sampler.problem import Case, Logits, Problem
from topw_deploy.bench.sampler.side import Call
from topw_deploy.errors import ProviderError
from topw_deploy.plugins.kernel import Kernel, KernelCall, KernelTable
from topw_deploy.plugins.shared_library import library_path, why_absent
from topw_deploy.sampling.parameters import PARAMETER_NAMES


class NativeSide:
    """`topw_sample_row` for every row, in one thread, its arguments prepared once."""

    def __init__(self, problem: Problem) -> None:
        path = library_path()
        if path is None:
            raise ProviderError(why_absent())
        self._kernel, self._problem = Kernel(path), problem
        self._table = KernelTable.from_geometry(problem.geometry, problem.neighbour_bound)

    def step(self, case: Case, logits: Logits) -> Call:
        return self._prepared(case, logits, keep_mask=False)

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        call = self._prepared(case, logits, keep_mask=True)
        call()
        mask = call.samples.keep_mask
        assert mask is not None
        return [np.flatnonzero(row) for row in mask]

    def _prepared(self, case: Case, logits: Logits, *, keep_mask: bool) -> KernelCall:
        columns = {name: getattr(case.parameters, name) for name in PARAMETER_NAMES}
        return self._kernel.prepare(
            logits,
            {**columns, "uniform": self._problem.uniform},
            self._problem.options,
            self._table,
            keep_mask=keep_mask,
        )
