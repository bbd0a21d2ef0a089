"""Rows of every kind: bit by bit across launches and batch sizes, and against the CPU's kernel and the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device import BoundStep, DeviceKernel, DeviceTable, table_of
from benchmarks.gpu.small_rows import UNCERTIFIED, compare_row
from fuzz.implementations import as_bfloat16, from_bfloat16
from tests.support.kernel import STAGES, Kernel, KernelSamples, KernelTable, RuleArrays
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import Geometry, pack_mask
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWOptions, TopWParameters
from topw_lab.bench.logits import bell_logits, likely_logits

_OPTIONS = TopWOptions(metric="cosine", alt_iters=9)
_RULES = np.array([0, 0, 0, 1, 0, 0, 2, 0, 5, 0, 3, 4, 0, 10, 11, 8], np.int32)  # codes of successive rows
_VALUES = {1: (5_000, 0), 2: (0.97, 0), 3: (0.01, 0), 4: (0.9, 5_000), 5: (0.9, 0), 8: (1.5, 0), 10: (30, 0)}
_OPEN_DEVIATION, _PEAK = 1.6, 8.0  # deviation of the logits of rows that need geometry; logit of their likely tokens


def are_equal(first: KernelSamples, second: KernelSamples) -> bool:
    """Whether all outputs are bitwise equal and the rows took the same stages."""
    for output in fields(KernelSamples):
        a, b = getattr(first, output.name), getattr(second, output.name)
        if output.name == "reports":
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


def mixed_step(kernel: DeviceKernel, batch: int, seed: int, table: DeviceTable) -> BoundStep:
    """Bind a step of `mixed_rows` over the table's tokens, with every output."""
    logits, columns, allowed, rules = mixed_rows(batch, seed, table.structure.tokens)
    rows = torch.from_numpy(logits).to(kernel.device)
    return BoundStep(kernel, rows, columns, _OPTIONS, table, allowed=allowed, rules=rules, mass=True, keep_mask=True)


def load_rows(step: BoundStep, seed: int) -> None:
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
        step = BoundStep(kernel, torch.from_numpy(logits[row : row + 1]).to(kernel.device), mine, _OPTIONS, table,
                    allowed=allowed[row : row + 1], rules=own_rules, mass=True, keep_mask=True)  # fmt: skip
        step.launch()
        if not are_equal(_one_row(wanted, row), step.samples()):
            unequal.append(row)
    return unequal


def _one_row(samples: KernelSamples, row: int) -> KernelSamples:
    found = {name: None if values is None else values[row : row + 1] for name, values in vars(samples).items()}
    return KernelSamples(**found)  # type: ignore[arg-type]


KINDS = ("certified", "open", "edited", "invalid", "masked", "masked open")
_EDITS = 8
_JUDGED = 8  # rows per batch always compared with the reference


@dataclass(frozen=True)
class ShippedRows:
    """Rows of KINDS: logits float32 [B, V], exact in the tested type, with parameters, edits and masks.

    allowed: int32 [B, ceil(V / 32)]; None if no row is masked.
    """

    logits: np.ndarray
    columns: dict[str, np.ndarray]
    edits: tuple[np.ndarray, np.ndarray, np.ndarray]
    allowed: np.ndarray | None
    kinds: list[str]


@dataclass
class Verdict:
    """Counts of rows and stages by kind, and the differences, explained or wrong."""

    rows: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    by_reference: int = 0


def round_logits(logits: np.ndarray, dtype: str) -> np.ndarray:
    """The logits rounded to `dtype`, as float32."""
    if dtype == "bfloat16":
        return from_bfloat16(as_bfloat16(logits))
    return logits.astype(dtype).astype(np.float32)


def rows_of(kinds: list[str], vocab: int, dtype: str, seed: int) -> ShippedRows:
    """One row per kind; edits penalise, favour and ban likely tokens; masks forbid half of all, one of them NaN."""
    rng = np.random.default_rng(seed)
    batch = len(kinds)
    logits = np.concatenate([(likely_logits if "open" not in k else bell_logits)(vocab, 1, seed * 1000 + i)
                             for i, k in enumerate(kinds)])  # fmt: skip
    logits = round_logits(logits, dtype)
    columns = {name: np.full(batch, getattr(TopWParameters(), name), np.float32) for name in PARAMETER_NAMES}
    columns["uniform"] = rng.integers(0, 1 << 24, batch).astype(np.float32) * np.float32(2.0**-24)
    ids = np.full((batch, _EDITS), -1, np.int64)
    penalty, bias = np.ones((batch, _EDITS), np.float32), np.zeros((batch, _EDITS), np.float32)
    open_tokens = np.ones((batch, vocab), np.bool_)
    for row, kind in enumerate(kinds):
        if "masked" in kind:
            open_tokens[row] = rng.random(vocab) < 0.5
            open_tokens[row, 1], logits[row, 1] = False, np.nan
        if "open" in kind:
            for name, value in UNCERTIFIED.items():
                columns[name][row] = value
        if kind in ("edited", "masked open"):
            likely = np.argsort(-np.nan_to_num(logits[row]))[: _EDITS - 1]
            ids[row, : len(likely)] = rng.permutation(likely)
            penalty[row, :4], bias[row, 2:5] = 1.3, np.float32(rng.standard_normal(3))
            bias[row, 5] = -np.inf
        if kind == "invalid":
            logits[row, int(rng.integers(vocab))] = rng.choice([np.nan, np.inf])
    allowed = None if open_tokens.all() else pack_mask(open_tokens)
    return ShippedRows(logits, columns, (ids, penalty, bias), allowed, kinds)


def judge(
    rows: ShippedRows,
    found: KernelSamples,
    options: TopWOptions,
    geometry: Geometry,
    cpu: Kernel | None,
    verdict: Verdict,
) -> None:
    """Compare all rows with the CPU's kernel, and some rows and all that differ with the reference."""
    beside = None
    if cpu is not None:
        table = KernelTable.from_geometry(geometry)
        outputs: dict[str, Any] = {"allowed": rows.allowed, "mass": True, "keep_mask": True}
        beside = cpu.sample(rows.logits, rows.columns, options, table, rows.edits, **outputs)
    changes = (*rows.edits, rows.allowed)
    for row, kind in enumerate(rows.kinds):
        verdict.rows[kind] += 1
        verdict.stages[f"{kind}: {STAGES[int(found.reports['stage'][row])]}"] += 1
        if beside is not None and row >= _JUDGED and _rows_agree(beside, found, row):
            continue
        verdict.by_reference += 1
        for difference, reason in compare_row(found, row, rows.logits, rows.columns, changes, options, geometry):
            if reason is None:
                verdict.wrong.append(f"row {row} of {len(rows.kinds)} ({kind}): {difference}")
            else:
                verdict.explained[f"{difference}: {reason}"] += 1


def _rows_agree(first: KernelSamples, second: KernelSamples, row: int) -> bool:
    exact = ("next_token", "kept", "certified", "keep_mask")
    close = ("logprob", "mass")
    return all(np.array_equal(getattr(first, name)[row], getattr(second, name)[row]) for name in exact) and all(
        np.isclose(getattr(first, name)[row], getattr(second, name)[row], rtol=1e-5, atol=1e-6) for name in close
    )


def cpu_kernel(kernels: Path) -> Kernel | None:
    """The CPU's kernel in the CUDA or the native library, else None."""
    for path in (kernels, library_path()):
        try:
            if path is not None:
                return Kernel(path)
        except (OSError, AttributeError):  # not a library, or one without the CPU's kernel
            continue
    return None


def compare(
    kernel: DeviceKernel, table: torch.Tensor, metric: str, dtype: str, batches: tuple[int, ...], cpu: Kernel | None
) -> Verdict:
    """Compare batches of every kind; a batch of one runs once per kind.

    table: float16 [V, d] on the device.
    """
    options = TopWOptions(metric=metric)
    device_table = table_of(table, metric)
    mean, inverse_std = (tensor.cpu().numpy() for tensor in device_table.statistics)
    geometry = Geometry.from_embeddings(table.cpu().numpy(), metric, (mean, inverse_std))
    verdict = Verdict()
    for seed, batch in enumerate(batches):
        mixes = [[kind] * batch for kind in KINDS] if batch == 1 else [[KINDS[i % len(KINDS)] for i in range(batch)]]
        for mix in mixes:
            rows = rows_of(mix, len(table), dtype, seed + 1)
            found = launch_rows(kernel, rows, dtype, options, device_table)
            judge(rows, found, options, geometry, cpu, verdict)
    return verdict


def launch_rows(
    kernel: DeviceKernel, rows: ShippedRows, dtype: str, options: TopWOptions, table: DeviceTable
) -> KernelSamples:
    logits = torch.from_numpy(rows.logits).to(kernel.device, getattr(torch, dtype))
    step = BoundStep(kernel, logits, rows.columns, options, table, rows.edits, allowed=rows.allowed, mass=True,
                keep_mask=True)  # fmt: skip
    step.launch()
    return step.samples()
