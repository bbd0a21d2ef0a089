"""Compare answers bit by bit across launches and batch sizes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from benchmarks.gpu.device import DeviceKernel, DeviceTable, Step
from tests.support.kernel import KernelSamples, KernelTable, RuleArrays
from topw_deploy.sampling import Geometry, pack_mask
from topw_deploy.sampling.parameters import TopWOptions

UNCERTIFIED = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0, "geom_scale": 0.6}
_OPTIONS = TopWOptions(metric="cosine", alt_iters=9)
_RULES = np.array([0, 0, 0, 1, 0, 0, 2, 0, 5, 0, 3, 4, 0, 10, 11, 8], np.int32)  # codes of successive rows
_VALUES = {1: (5_000, 0), 2: (0.97, 0), 3: (0.01, 0), 4: (0.9, 5_000), 5: (0.9, 0), 8: (1.5, 0), 10: (30, 0)}
_OPEN_DEVIATION, _PEAK = 1.6, 8.0  # deviation of the logits of rows that need geometry; logit of their likely tokens


def are_equal(first: KernelSamples, second: KernelSamples) -> bool:
    """Whether all outputs are bitwise equal and the rows took the same stages."""
    for field in fields(KernelSamples):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name == "reports":
            a, b = a["stage"], b["stage"]
        if a is not None and not np.array_equal(a, b):
            return False
    return True


def mixed_rows(batch: int, seed: int, vocab: int) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, RuleArrays]:
    """Logits, parameters, masks and rules of certified, uncertified, greedy, repelled and invalid rows.

    Repelled: with a negative geom_scale. Every second row is masked; one such mask is empty. Some rows have other rules
    than Top-W.
    """
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((batch, vocab)) * _OPEN_DEVIATION).astype(np.float32)
    logits[::3, :20] += _PEAK
    logits[5::17, 3] = np.nan
    columns = {name: np.full(batch, value, np.float32) for name, value in UNCERTIFIED.items()}
    columns["lam"] = rng.choice([0.3, 1.0, 2.2], batch).astype(np.float32)
    columns["init_top_p"] = rng.choice([0.1, 0.3, 0.5, 0.999], batch).astype(np.float32)
    columns["temperature"] = rng.choice([0.7, 1.0, 2.0], batch).astype(np.float32)
    columns["temperature"][7::11] = 0
    columns["geom_scale"][4::13] = -0.3
    columns["uniform"] = rng.random(batch, dtype=np.float32)
    allowed = rng.random((batch, vocab)) < rng.choice([0.02, 0.5, 0.99], (batch, 1))
    allowed[::2], allowed[9:10] = True, False
    codes = np.resize(_RULES, batch)
    values = np.array([_VALUES.get(int(code), (0, 0)) for code in codes], np.float32)
    return logits, columns, pack_mask(allowed), (codes, values)


def random_table_on(kernel: DeviceKernel, vocab: int, hidden: int = 64) -> DeviceTable:
    rows = np.random.default_rng(3).standard_normal((vocab, hidden), dtype=np.float32)
    table = KernelTable.from_geometry(Geometry.from_embeddings(rows, _OPTIONS.metric))
    assert table is not None
    return DeviceTable(table, kernel.device)


def mixed_step(kernel: DeviceKernel, batch: int, seed: int, table: DeviceTable) -> Step:
    """Bind a step of `mixed_rows` over the table's tokens, with every output."""
    logits, columns, allowed, rules = mixed_rows(batch, seed, table.structure.tokens)
    rows = torch.from_numpy(logits).to(kernel.device)
    return Step(kernel, rows, columns, _OPTIONS, table, allowed=allowed, rules=rules, mass=True, keep_mask=True)


def load_rows(step: Step, seed: int) -> None:
    """Copy the `mixed_rows` of another seed into the step's tensors."""
    logits, columns, allowed, rules = mixed_rows(len(step.logits), seed, step.logits.shape[1])
    step.logits.copy_(torch.from_numpy(logits))
    step.allowed.copy_(torch.from_numpy(allowed))
    for tensor, array in zip(step.rules, rules, strict=True):
        tensor.copy_(torch.from_numpy(array))
    for name, values in columns.items():
        step.columns[name].copy_(torch.from_numpy(values))


def unequal_repeats(kernel: DeviceKernel, table: DeviceTable, batch: int, times: int) -> list[int]:
    """Indices of the launches that differ from the first."""
    step = mixed_step(kernel, batch, 1, table)
    step.launch()
    first = step.samples()
    unequal = []
    for number in range(times):
        step.launch()
        if not are_equal(first, step.samples()):
            unequal.append(number)
    return unequal


def unequal_alone(kernel: DeviceKernel, table: DeviceTable, batch: int) -> list[int]:
    """Indices of the rows that differ from the same row launched alone."""
    together = mixed_step(kernel, batch, 2, table)
    together.launch()
    wanted = together.samples()
    logits, columns, allowed, rules = mixed_rows(batch, 2, table.structure.tokens)
    unequal = []
    for row in range(batch):
        mine = {name: values[row : row + 1] for name, values in columns.items()}
        own_rules = rules[0][row : row + 1], rules[1][row : row + 1]
        step = Step(kernel, torch.from_numpy(logits[row : row + 1]).to(kernel.device), mine, _OPTIONS, table,
                    allowed=allowed[row : row + 1], rules=own_rules, mass=True, keep_mask=True)  # fmt: skip
        step.launch()
        if not are_equal(_one_row(wanted, row), step.samples()):
            unequal.append(row)
    return unequal


def _one_row(samples: KernelSamples, row: int) -> KernelSamples:
    own = slice(row, row + 1)
    return KernelSamples(
        samples.next_token[own],
        samples.logprob[own],
        samples.kept[own],
        samples.certified[own],
        None if samples.mass is None else samples.mass[own],
        None if samples.keep_mask is None else samples.keep_mask[own],
        samples.reports[own],
    )
