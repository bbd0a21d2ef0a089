"""Sides that need numpy alone, and the native C function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.bench.sampler.problem import Case, Logits, Problem
from topw_deploy.bench.sampler.side import Call
from topw_deploy.sampling import draw
from topw_deploy.sampling.fast.crop import FastCrop, fast_crop


class NumpySide:
    """`fast_crop` and, unless the row is greedy, `draw`; a row at a time."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def step(self, case: Case, logits: Logits) -> Call:
        numbers, temperature = self._problem.uniform.tolist(), case.parameters.temperature

        def sample() -> list[int]:
            if case.parameters.greedy:
                return [int(self._crop(row, case).kept[0]) for row in logits]
            pairs = zip(logits, numbers, strict=True)
            return [draw(row, self._crop(row, case).kept, temperature, uniform).token for row, uniform in pairs]

        return sample

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        return [self._crop(row, case).kept for row in logits]

    def _crop(self, row: Logits, case: Case) -> FastCrop:
        p = self._problem
        return fast_crop(row, case.parameters, p.options, p.geometry, p.neighbour_bound)


class MaxSide:
    """One maximum per row: the least that anything can do that reads the logits."""

    def step(self, case: Case, logits: Logits) -> Call:
        return lambda: np.max(logits, axis=1) if len(logits) > 1 else np.max(logits[0])

    def kept(self, case: Case, logits: Logits) -> None:
        return None
