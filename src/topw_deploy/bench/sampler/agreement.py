"""Before anything is timed: does every implementation keep the set that the definition keeps?

A fast answer that is wrong is no answer, so a difference that docs/contract/graph.md section 4 does not allow ends the
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import BenchmarkError
from topw_deploy.reports import counted
from topw_deploy.sampling.reference import FLOAT32_TIES, Crop


@dataclass(frozen=True)
class Agreement:
    """Of one side: how many of `rows` keep the reference's set, and how many differ at a tie."""

    side: str
    rows: int
    same: int
    ties: int


def agree(side: str, kept: Sequence[ArrayLike], crops: Sequence[Crop], *, exact: bool) -> Agreement:
    """Compare the ids that `side` keeps of each row with the reference's crops.

    Raises BenchmarkError if an `exact` side differs where rounding may not decide (FLOAT32_TIES).
    """
    same = ties = 0
    for row, (ids, crop) in enumerate(zip(kept, crops, strict=True)):
        found = np.unique(np.asarray(ids, np.int64))
        if np.array_equal(found, np.sort(crop.kept)):
            same += 1
        elif crop.ties.allow(FLOAT32_TIES):
            ties += 1
        elif exact:
            raise BenchmarkError(
                f"{side} keeps {len(found)} tokens of row {row} where the reference keeps {len(crop.kept)} "
                f"({len(np.setxor1d(found, crop.kept))} differ), so its time means nothing; report this with the "
                "options used."
            )
    return Agreement(side, len(crops), same, ties)


def sentence(agreements: Iterable[Agreement], crops: Sequence[Crop]) -> str:
    """What was found, for people."""
    found = list(agreements)
    certified = sum(crop.certified for crop in crops)
    sizes = sorted(len(crop.kept) for crop in crops)
    kept = counted(sizes[0], "token") if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} tokens"
    rows = f"{counted(len(crops), 'row')}, {certified} certified, {kept} kept"
    equal = [a.side for a in found if a.same == a.rows]
    other = [f"{a.side} on {a.same} of {a.rows}, {a.ties} differ at a tie" for a in found if a.same < a.rows]
    parts = [f"the reference's set on every row: {', '.join(equal)}"] if equal else []
    return "; ".join([rows, *parts, *other])
