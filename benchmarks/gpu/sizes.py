"""Problem sizes on the host and in a rehearsal, where a CPU emulates every thread."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.job import Job


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts.

    checked: batch sizes compared with the reference.
    rule_rows: number of random rows under rules other than Top-W.
    rows, rounds: maximum numbers of random rows and of rounds.
    small_vocab, small_hidden: table sizes of repeats and captures.
    certified, open_batches: batch sizes timed.
    captured: (batch size, number of other batches).
    replays: replays of one captured step.
    steps: steps in each timed graph.
    cold: bytes that exceed every cache.
    decoder: (hidden, inner, kv, layers, vocab).
    """

    vocab: int = 151_936
    hidden: int = 2_048
    checked: tuple[int, ...] = (1, 5, 33, 64)
    rows: int = 10**9
    rule_rows: int = 8_000
    small_vocab: int = 32_000
    small_hidden: int = 64
    certified: tuple[int, ...] = (1, 8, 64, 128, 256)
    open_batches: tuple[int, ...] = (1, 8, 64)
    captured: tuple[int, int] = (16, 10)
    replays: int = 1_000
    steps: int = 20
    rounds: int = 10**9
    cold: int = 256 << 20
    decoder: tuple[int, int, int, int, int] = (3_072, 8_192, 1_024, 28, 128_256)
    top_m: int = 1_200


REHEARSED = Sizes(
    vocab=4_096, hidden=64, checked=(1, 3), rows=400, rule_rows=300, small_vocab=2_000, small_hidden=16,
    certified=(1, 3), open_batches=(1, 2), captured=(4, 2), replays=3, steps=2, rounds=2, cold=1 << 18,
    decoder=(64, 128, 32, 2, 4_096), top_m=200,
)  # fmt: skip


def sizes_of(job: Job) -> Sizes:
    return REHEARSED if job.rehearse else Sizes()
