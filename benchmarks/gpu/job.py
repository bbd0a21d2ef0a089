"""The interface of a part.

A part is a module of this folder, listed in PARTS, with a function `steps(job) -> list[Step]`. It runs in child
processes, so a step may import anything, initialise CUDA, hang or crash. At the top level, parts import only the
standard library, and `steps` opens nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = ("build", "check", "sanitize", "capture", "speed", "models", "engines")
PART_LIMIT = 480.0
"""Seconds after which a part's process is killed, whatever its steps say."""

REHEARSAL = "REHEARSAL on a CPU with stand-ins and small sizes: no figure here says anything about a GPU."


@dataclass(frozen=True)
class Result:
    """A step's result.

    data: plain JSON types for results.json.
    table: Markdown for results.md.
    failed: why it failed, as a sentence; empty if it passed. Exceptions fail a step too.
    absent: sentences on what could not run here. A step that ran nothing has neither data nor table.
    partial: the next run repeats the step, with `data` as `Job.earlier`.
    """

    data: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    failed: str = ""
    absent: tuple[str, ...] = ()
    partial: bool = False


@dataclass(frozen=True)
class Step:
    """One entry of the record.

    name: unique within its part.
    seconds: expected duration; a step does not start with less budget left.
    limit: seconds until the process is killed; None for four times `seconds`, at least a minute.
    inputs: what the step depends on besides the kernels, torch and the GPU; a change repeats the step.
    """

    name: str
    run: Callable[[Job], Result]
    seconds: float
    limit: float | None = None
    inputs: tuple[str, ...] = ()

    @property
    def longest(self) -> float:
        return min(PART_LIMIT, max(60.0, 4 * self.seconds) if self.limit is None else self.limit)


@dataclass
class Job:
    """The input of steps, sent to the child as JSON.

    kernel_file: the library from `build` or --library; read it with `Job.kernels`.
    rehearse: emulate the kernels on the CPU, at small sizes.
    rows, seed: number and seed of the random rows.
    folders: exported models that replace the packed ones.
    architecture: 90 for sm_90; 0 without a GPU.
    built: whether the library was given.
    earlier: data of the last partial run, else {}.
    end: end of the step, on time.monotonic's clock.
    """

    out: Path
    kernel_file: Path
    rehearse: bool = False
    rows: int = 100_000
    seed: int = 0
    rounds: int = 50
    folders: list[str] = field(default_factory=list)
    architecture: int = 0
    built: bool = False
    earlier: dict[str, Any] = field(default_factory=dict)
    end: float = float("inf")
    keep: Callable[[dict[str, Any]], None] = lambda data: None
    """`job.keep(data)` records the data of an unfinished step, in case the process dies."""

    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def packed(self) -> Path:
        return self.out / "packed"

    def folder(self, name: str) -> Path:
        """A folder for the part's files, kept between runs."""
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def kernels(self) -> Path:
        """The library of kernels. Raises StepError if there is none."""
        if not self.kernel_file.is_file():
            raise StepError(f"there is no library of kernels at {self.kernel_file}; the part `build` makes it.")
        return self.kernel_file

    def as_json(self) -> str:
        plain = {name: value for name, value in vars(self).items() if name not in ("keep", "earlier", "end")}
        return json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in plain.items()})

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        paths = {name: Path(given[name]) for name in ("out", "kernel_file")}
        return cls(**(given | paths))


class StepError(Exception):
    """A step cannot go on, for the reason in the message."""


def steps_of(part: str, job: Job) -> list[Step]:
    """The steps of a part, in order. part: a module of this folder, or a dotted name."""
    steps: list[Step] = import_module(part if "." in part else f"benchmarks.gpu.{part}").steps(job)
    return steps


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
