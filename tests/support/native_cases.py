"""Rows for the native sampler, with each instruction set, and for the emulated CUDA kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import Kernel, KernelSamples, KernelTable
from tests.support.rows import (
    DOUBLE,
    MIXED,
    Case,
    Edits,
    Scenario,
    columns,
    embedding_table,
    geometry_of,
    kernel_differences,
    random_case,
    reference,
    rules_of,
)
from topw_deploy.plugins import compile_native, library
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import Geometry, SampledRow, TopWOptions


def opened(folder: Path) -> Kernel:
    """The packaged library, else one compiled into `folder`; else skips."""
    path = library_path()
    if path is None:
        path = folder / compile_native.LIBRARY_NAME
        try:
            compile_native.compile_native(path)
        except compile_native.NotBuiltError as reason:
            pytest.skip(f"no native sampler: {library.why_absent()}, and {reason}")
    return Kernel(path)


def instruction_sets(kernel: Kernel) -> list[str]:
    """The processor's instruction sets, best first; the best stays active."""
    found = []
    for name in ("generic", "avx2", "avx512"):
        if kernel.use_instruction_set(name):
            found.append(kernel.instruction_set)
    return found[::-1]


def sampled(
    kernel: Any, cases: list[Case], options: TopWOptions, table: KernelTable | None = None, **settings: Any
) -> KernelSamples:
    """A kernel's answers, with mass and keep_mask. settings: further arguments of `sample`."""
    logits = np.stack([case.logits for case in cases])
    if any(case.rule for case in cases):
        settings["rules"] = rules_of(cases)
    return kernel.sample(logits, columns(cases), options, table, mass=True, keep_mask=True, **settings)


def scenario_cases(scenario: Scenario, rows: int) -> tuple[np.ndarray, Geometry, list[Case]]:
    rng = np.random.default_rng(scenario.seed + 1)
    embeddings = embedding_table(scenario)
    cases = [random_case(rng, scenario.vocab_size) for _ in range(rows)]
    return embeddings, geometry_of(scenario.options, embeddings), cases


def differences(
    kernel: Any, cases: list[Case], options: TopWOptions, geometry: Geometry | None = None,
    table: KernelTable | None = None, edits: Edits | None = None, allowed: np.ndarray | None = None,
) -> list[str]:  # fmt: skip
    """A line for each difference from the reference that no tie explains. table: not the geometry's own, if given."""
    table = KernelTable.from_geometry(geometry) if table is None and geometry is not None else table
    found = sampled(kernel, cases, options, table, edits=edits, allowed=allowed)
    held = 0 if geometry is None or geometry.table is None else hash(geometry.table.tobytes())
    wanted = []
    for i, case in enumerate(cases):
        edit = None if edits is None else (edits[0][i], edits[1][i], edits[2][i])
        words = None if allowed is None else allowed[i]
        arrays = (case.logits, *(edit or ()), *(() if words is None else (words,)))
        numbers = (str(case.parameters), case.uniform, case.rule, str(case.rule_values), options, held)
        key = hash((*numbers, *(array.tobytes() for array in arrays)))
        if key not in _answers:
            with np.errstate(all="ignore"):
                _answers[key] = reference(options, geometry, case, edit, words)
        wanted.append(_answers[key])
    return kernel_differences(found, cases, wanted, DOUBLE if isinstance(kernel, Kernel) else MIXED)


_answers: dict[int, SampledRow] = {}  # several kernels get the same rows
