"""The sides that `speed` times on rows that geometry decides: V = 151,936, d = 2,048, float16 table."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.agreement import UNCERTIFIED
from benchmarks.gpu.device import DeviceKernel, Step
from benchmarks.gpu.measure import Timed
from benchmarks.gpu.tables import table_of
from tests.support.kernel import STAGES, KernelSamples
from topw_deploy.sampling.parameters import TopWOptions
from topw_lab.bench.logits import bell_logits

GOALS = {1: 60.0}
"""Goal for a step of open rows on an H200, in microseconds, by batch."""


class NotOpenError(Exception):
    """A row needed no distances, which invalidates the measurement."""


def sides(kernel: DeviceKernel, table: torch.Tensor, metric: str, batch: int, top_m: int) -> dict[str, Timed]:
    """The sides, with and without neighbour bounds. table: float16 [V, d] on the device."""
    options = TopWOptions(metric=metric, top_m=top_m)
    vocab = len(table)
    logits = torch.from_numpy(np.concatenate([bell_logits(vocab, 1, seed) for seed in range(batch)])).to(table.device)
    pool = logits.topk(min(options.top_m, vocab), 1).indices.unique()
    moved = logits.nbytes + len(pool) * table[0].nbytes
    found = {}
    for name, bounded in (("no bound", None), ("nearest neighbours bounded", pool)):
        step = Step(kernel, logits, UNCERTIFIED | {"uniform": 0.37}, options, table_of(table, metric, bounded))
        step.launch()
        note = describe_work(step.samples())
        found[f"Top-W, {metric}, {name}"] = Timed(step.launch, moved, note, goal=GOALS.get(batch))
    found["torch.topk of the pool's size"] = Timed(lambda: logits.topk(min(options.top_m, vocab), 1), logits.nbytes)
    return found


def describe_work(samples: KernelSamples) -> str:
    """A sentence on the work of the rows. Raises NotOpenError for a row that needed no distances."""
    reports = samples.reports
    stages = {STAGES[int(stage)] for stage in reports["stage"]}
    if stages != {"geometry"}:
        raise NotOpenError(f"rows were answered by {', '.join(sorted(stages))}, so this does not measure geometry.")
    kept, steps = (np.median(values) for values in (samples.kept, reports["steps"]))
    return (
        f"keeps {kept:g}, {steps:g} steps, {np.median(reports['distances']):,.0f} distances, "
        f"{np.median(reports['distances_avoided']):,.0f} avoided"
    )
