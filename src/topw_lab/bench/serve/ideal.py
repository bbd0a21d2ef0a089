"""Make the runs that the engine makes for given requests, without threads, callers or texts. Only the runs are timed.

Their time is a lower bound for `Engine`, which adds the cost of the engine's and the callers' Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.scheduler import ScheduledSequence, Scheduler
from topw_deploy.runtime.sequence import Sequence as Prepared


class _Sequence(ScheduledSequence):
    """A request in the scheduler. left: number of tokens to draw."""

    def __init__(self, request: Prepared) -> None:
        super().__init__(len(request.prompt))
        self.request, self.left = request, request.params.budget


def run_requests(
    batch: Batch, rows: int, chunk: int, requests: Sequence[Prepared], callers: int, *, decoding_only: bool = False
) -> float:
    """Serve the requests, at most `callers` at a time, in the engine's order. Returns the seconds spent in runs.

    rows: number of rows of `batch`; all must be free.
    chunk: maximum number of prompt tokens per run.
    decoding_only: see `Scheduler`.
    """
    scheduler: Scheduler[_Sequence] = Scheduler(rows, chunk, decoding_only=decoding_only, moves_rows=batch.copies_rows)
    sequences = [_Sequence(request) for request in requests]
    waiting = iter(sequences[callers:])
    for sequence in sequences[:callers]:
        scheduler.submit(sequence)
    before = batch.run_seconds
    while not scheduler.is_idle:
        for sequence in scheduler.admit():
            batch.assign(sequence.row, sequence.request)
        ended = _read_chunk(batch, scheduler)
        ended += _run_step(batch, scheduler)
        for sequence in ended:
            batch.clear(sequence.row)
            following = next(waiting, None)
            if following is not None:
                scheduler.submit(following)
    return batch.run_seconds - before


def _read_chunk(batch: Batch, scheduler: Scheduler[_Sequence]) -> list[_Sequence]:
    """Read a chunk of a prompt, if one waits. Returns the sequences that ended."""
    chunk = scheduler.next_chunk()
    if chunk is None:
        return []
    sequence = chunk.sequence
    token = batch.read(sequence.row, sequence.request, chunk.start, chunk.end)
    scheduler.record_read(chunk)
    if token is None:
        return []
    return _accept_tokens(scheduler, [sequence], lambda sequence: batch.begin(sequence.row, token))


def _run_step(batch: Batch, scheduler: Scheduler[_Sequence]) -> list[_Sequence]:
    """Draw a token for each decoding row. Returns the sequences that ended."""
    for pair in scheduler.arrange():
        batch.exchange(*pair)
    if not scheduler.decoding:
        return []
    tokens = batch.step(scheduler.width)
    return _accept_tokens(
        scheduler, list(scheduler.decoding), lambda sequence: batch.accept(sequence.row, tokens[sequence.row])
    )


def _accept_tokens(
    scheduler: Scheduler[_Sequence], sequences: Sequence[_Sequence], feed: Callable[[_Sequence], None]
) -> list[_Sequence]:
    """Count the new token of each sequence, and feed it to the next run. Returns the sequences that ended."""
    ended = []
    for sequence in sequences:
        sequence.left -= 1
        if sequence.left:
            feed(sequence)
        else:
            scheduler.end(sequence)
            ended.append(sequence)
    return ended
