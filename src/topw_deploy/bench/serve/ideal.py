"""The engine's runs without threads, callers or texts. Only the runs are timed.

This is a lower bound for `Engine`, which adds the cost of its own and the callers' Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.scheduler import Scheduler, Task
from topw_deploy.runtime.request import RowRequest


class _Job(Task):
    def __init__(self, request: RowRequest) -> None:
        super().__init__(len(request.prompt))
        self.request, self.left = request, request.budget


def run_all(
    batch: Batch, rows: int, chunk: int, requests: Sequence[RowRequest], callers: int, *, dense: bool = False
) -> float:
    """Serve the requests, at most `callers` at a time, in the engine's order. Returns the seconds spent in runs.

    rows: number of rows of `batch`; all must be free.
    chunk: maximum number of prompt tokens per run.
    dense: see `Scheduler`.
    """
    scheduler: Scheduler[_Job] = Scheduler(rows, chunk, dense=dense, moves=batch.copies_rows)
    jobs = [_Job(request) for request in requests]
    coming = iter(jobs[callers:])
    for job in jobs[:callers]:
        scheduler.submit(job)
    before = batch.run_seconds
    while not scheduler.idle:
        for job in scheduler.admit():
            batch.set(job.row, job.request)
        ended = _read(batch, scheduler)
        ended += _step(batch, scheduler)
        for job in ended:
            batch.clear(job.row)
            following = next(coming, None)
            if following is not None:
                scheduler.submit(following)
    return batch.run_seconds - before


def _read(batch: Batch, scheduler: Scheduler[_Job]) -> list[_Job]:
    """Read a chunk. Returns the sequences that ended."""
    chunk = scheduler.next_chunk()
    if chunk is None:
        return []
    job = chunk.task
    token = batch.read(job.row, job.request, chunk.start, chunk.end)
    scheduler.read(chunk)
    if token is None:
        return []
    return _accept(scheduler, [job], lambda job: batch.begin(job.row, token))


def _step(batch: Batch, scheduler: Scheduler[_Job]) -> list[_Job]:
    """Draw a token for each decoding row. Returns the sequences that ended."""
    for pair in scheduler.arrange():
        batch.exchange(*pair)
    if not scheduler.decoding:
        return []
    tokens = batch.step(scheduler.width)
    return _accept(scheduler, list(scheduler.decoding), lambda job: batch.accept(job.row, tokens[job.row]))


def _accept(scheduler: Scheduler[_Job], jobs: Sequence[_Job], feed: Callable[[_Job], None]) -> list[_Job]:
    """Count the new token of each sequence, and feed it to the next run. Returns the sequences that ended."""
    ended = []
    for job in jobs:
        job.left -= 1
        if job.left:
            feed(job)
        else:
            scheduler.end(job)
            ended.append(job)
    return ended
