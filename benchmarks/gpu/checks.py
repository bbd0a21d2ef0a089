"""Whether the kernels answer on a GPU as the reference does, and the same every time."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from benchmarks.common import say
from benchmarks.gpu.device import DeviceKernel, DeviceTable, Step
from benchmarks.gpu.speed import UNCERTIFIED, captured
from topw_deploy.plugins.kernel import KernelSamples, KernelTable
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

VOCAB, HIDDEN = 32_000, 64
_OPTIONS = TopWOptions(metric="cosine", alt_iters=9)


def same(first: KernelSamples, second: KernelSamples) -> bool:
    """Whether two calls answered alike, bit for bit; which stage answered a row counts, not how many distances."""
    for field in fields(KernelSamples):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name == "reports" and a is not None:
            a, b = a["stage"], b["stage"]
        if a is not None and not np.array_equal(a, b):
            return False
    return True


def mixed_rows(batch: int, seed: int, vocab: int = VOCAB) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of which some are certified, some need geometry, some are greedy, repelled or invalid."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((batch, vocab)) * 1.6).astype(np.float32)
    logits[::3, :20] += 8
    logits[5::17, 3] = np.nan
    columns = {name: np.full(batch, value, np.float32) for name, value in UNCERTIFIED.items()}
    columns["lam"] = rng.choice([0.3, 1.0, 2.2], batch).astype(np.float32)
    columns["init_top_p"] = rng.choice([0.1, 0.3, 0.5, 0.999], batch).astype(np.float32)
    columns["temperature"] = rng.choice([0.7, 1.0, 2.0], batch).astype(np.float32)
    columns["temperature"][7::11] = 0
    columns["geom_scale"][4::13] = -0.3
    columns["uniform"] = rng.random(batch, dtype=np.float32)
    return logits, columns


def table_on(kernel: DeviceKernel, vocab: int = VOCAB) -> DeviceTable:
    rows = np.random.default_rng(3).standard_normal((vocab, HIDDEN), dtype=np.float32)
    return DeviceTable(KernelTable.from_geometry(Geometry.from_embeddings(rows, _OPTIONS.metric)), kernel.device)


def step_of(kernel: DeviceKernel, batch: int, seed: int, vocab: int = VOCAB) -> Step:
    logits, columns = mixed_rows(batch, seed, vocab)
    rows = torch.from_numpy(logits).to(kernel.device)
    return Step(kernel, rows, columns, _OPTIONS, table_on(kernel, vocab), mass=True, keep_mask=True)


def repeats(kernel: DeviceKernel, times: int = 20, batch: int = 64, vocab: int = VOCAB) -> bool:
    """The same rows, launched again and again, answer alike."""
    step = step_of(kernel, batch, 1, vocab)
    step.launch()
    first = step.samples()
    for _ in range(times):
        step.launch()
        if not same(first, step.samples()):
            return False
    return True


def batch_does_not_matter(kernel: DeviceKernel, batch: int = 48, vocab: int = VOCAB) -> bool:
    """Every row of a batch answers as it does alone."""
    logits, columns = mixed_rows(batch, 2, vocab)
    together = step_of(kernel, batch, 2, vocab)
    together.launch()
    wanted = together.samples()
    table = table_on(kernel, vocab)
    for row in range(batch):
        mine = {name: values[row : row + 1] for name, values in columns.items()}
        alone = Step(kernel, torch.from_numpy(logits[row : row + 1]).to(kernel.device), mine, _OPTIONS, table)
        alone.launch()
        found = alone.samples()
        if (found.next_token[0], found.logprob[0], found.kept[0], found.certified[0]) != (
            wanted.next_token[row], wanted.logprob[row], wanted.kept[row], wanted.certified[row],
        ):  # fmt: skip
            return False
    return True


def captures(kernel: DeviceKernel) -> bool:
    """A captured step, replayed over other logits, answers as a launch over those does."""
    step = step_of(kernel, 16, 4)
    graph = captured(step.launch, 1)
    for seed in range(5, 15):
        logits, columns = mixed_rows(16, seed)
        step.logits.copy_(torch.from_numpy(logits))
        for name, values in columns.items():
            step.columns[name].copy_(torch.from_numpy(values))
        graph.replay()
        replayed = step.samples()
        fresh = step_of(kernel, 16, seed)
        fresh.launch()
        if not same(fresh.samples(), replayed):
            return False
    return True


def run(kernel: DeviceKernel) -> dict[str, bool]:
    """Every check by its sentence."""
    checks = {
        "the same rows answer the same, 20 times": repeats,
        "a row of a batch answers as it does alone": batch_does_not_matter,
        "a captured step answers as a launched one": captures,
    }
    found = {}
    for sentence, check in checks.items():
        found[sentence] = check(kernel)
        say(f"{'yes' if found[sentence] else 'NO'}: {sentence}")
    return found
