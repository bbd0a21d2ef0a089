"""What every side of `topw bench sampler` offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from numpy.typing import ArrayLike

from topw_deploy.bench.sampler.problem import Case, Logits

Call = Callable[[], object]


class Side(Protocol):
    """One way to sample. Both methods may keep what they prepare, for the next case."""

    def step(self, case: Case, logits: Logits) -> Call:
        """A function that takes one step over all rows, [B, V], with everything that can be prepared prepared."""

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike] | None:
        """The ids that each row keeps; None for a side that keeps no set of Top-W."""
