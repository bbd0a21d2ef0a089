"""The decoding sequences and the tokens they have drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.job import Drawn, Job
from topw_deploy.engine.scheduler import Scheduler


class Group:
    """The sequences of a step. `Decoding` makes a new group when one joins, leaves or moves.

    While all tokens pass, steps leave the sequences untouched, because each run evicts them from the CPU cache.

    jobs: in the order of their rows.
    scored: whether one of them has log-probabilities.
    together: whether `passes` can return True.
    """

    def __init__(self, jobs: Sequence[Job], width: int) -> None:
        """width: rows of a step."""
        self.jobs = sorted(jobs, key=lambda job: job.row)
        self._rows = [job.generated for job in self.jobs]
        self.scored = any(row.scores is not None for row in self._rows)
        self.together = len(jobs) == width and all(row.plain for row in self._rows)
        self._left = min(row.left for row in self._rows)
        self._ends = frozenset[int]().union(*(row.request.eos_token_ids for row in self._rows))
        self._passed = 0

    def passes(self, tokens: list[int]) -> bool:
        """`Row.passes` for all rows; `settle` adds their tokens.

        Returns False, and adds nothing, if a token may not pass. Make a new group then.

        tokens: of all rows of a step.
        """
        if self._left <= 1 or min(tokens) < 0 or not self._ends.isdisjoint(tokens):
            return False
        self._left -= 1
        self._passed += 1
        return True

    def settle(self) -> None:
        """Add the tokens that have passed to the sequences."""
        if self._passed:
            for row in self._rows:
                row.steps += self._passed
            self._passed = 0


class Decoding:
    """The group of the next step, and the tokens of its sequences. Used only by the engine's thread.

    group: None if a sequence has joined, left or moved since the last step, or must process its token.
    """

    def __init__(self, batch: Batch, scheduler: Scheduler[Job]) -> None:
        self._batch, self._scheduler = batch, scheduler
        self.group: Group | None = None

    def next_group(self) -> Group:
        """The group of the next step; a new one after `regroup`."""
        if self.group is None:
            self.group = Group(self._scheduler.decoding, self._scheduler.width)
        return self.group

    def regroup(self) -> None:
        """Settle the group, and make a new one for the next step."""
        if self.group is not None:
            self.group.settle()
            self.group = None

    def drawn(self, job: Job) -> Drawn:
        """A copy of the outputs of a sequence."""
        if self.group is not None:
            self.group.settle()
        if job.first is None:
            return Drawn()
        parts = [job.first]
        ends = [start for _, start in job.spans[1:]] + [self._batch.steps]
        for (row, start), end in zip(job.spans, ends, strict=False):
            parts += self._batch.recorded(row, start, end)
        return Drawn(parts, slice(job.generated.skipped, job.generated.skipped + job.generated.steps))

    def tokens(self, row: int) -> np.ndarray | None:
        """The tokens in a row; None if it is not decoding."""
        job = self._scheduler.at(row)
        return None if job is None or not job.decoding else tokens_read(job, self.drawn(job))


def tokens_read(job: Job, drawn: Drawn) -> np.ndarray:
    """The tokens in the row of a decoding sequence: all but the last drawn one, int64 [n]."""
    given = np.array(job.generated.given, np.int64) if job.generated.skipped else job.prompt
    return np.concatenate([given, drawn.array("next_token")])[:-1]
