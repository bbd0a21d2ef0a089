"""The native library, its instruction sets and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import Kernel, KernelSamples, KernelTable
from tests.support.rows import Case, Scenario, embedding_table, geometry_of, random_case
from topw_deploy.plugins import compile_native, library
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import FLOAT64_TIES, Geometry, SampledRow, TopWOptions, sample_row

LOGPROB_BOUND = 2e-7  # relative above 1: float64 rounded to float32
MASS_BOUND = 5e-7  # relative: the exponentials' 3e-7 plus rounding to float32


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


def columns(cases: list[Case]) -> dict[str, list[float]]:
    """Parameters and uniform numbers of all rows, by name."""
    named = {name: [case.parameters[name] for case in cases] for name in cases[0].parameters}
    return named | {"uniform": [case.uniform for case in cases]}


def sampled(
    kernel: Kernel, cases: list[Case], options: TopWOptions, table: KernelTable | None = None, **settings: Any
) -> KernelSamples:
    """A kernel's answers, with mass and keep_mask. settings: further arguments of `sample`."""
    logits = np.stack([case.logits for case in cases])
    return kernel.sample(logits, columns(cases), options, table, mass=True, keep_mask=True, **settings)


def scenario_cases(scenario: Scenario, rows: int) -> tuple[np.ndarray, Geometry, list[Case]]:
    rng = np.random.default_rng(scenario.seed + 1)
    embeddings = embedding_table(scenario)
    cases = [random_case(rng, scenario.vocab_size) for _ in range(rows)]
    return embeddings, geometry_of(scenario.options, embeddings), cases


def unexplained(wanted: SampledRow, found: KernelSamples, row: int) -> Iterator[str]:
    """Differences beyond the ties of docs/contract/graph.md, section 4."""
    assert found.keep_mask is not None
    assert found.mass is not None
    ids = np.flatnonzero(found.keep_mask[row])
    if found.certified[row] != wanted.certified and not wanted.ties.allow_other_certified(FLOAT64_TIES):
        yield "certified"
    if found.kept[row] != len(ids) or not np.array_equal(ids, np.sort(wanted.kept_ids)):
        if not wanted.ties.allow_other_set(FLOAT64_TIES):
            yield "kept set"
        return
    if found.next_token[row] != wanted.next_token and wanted.draw_margin > FLOAT64_TIES.draw:
        yield "token"
    elif abs(found.logprob[row] - wanted.logprob) > LOGPROB_BOUND * max(1.0, abs(wanted.logprob)):
        yield "logprob"
    if abs(found.mass[row] - wanted.mass) > MASS_BOUND * wanted.mass:
        yield "mass"


def differences(
    kernel: Kernel, cases: list[Case], options: TopWOptions, geometry: Geometry, table: KernelTable | None
) -> list[str]:
    """A line per unexplained difference."""
    found = sampled(kernel, cases, options, table)
    lines = []
    for i, case in enumerate(cases):
        wanted = _wanted(case, options, geometry)
        lines += [f"{what}: {case.regime}, {case.parameters}, {wanted.ties}" for what in unexplained(wanted, found, i)]
    return lines


_answers: dict[tuple[bytes, str, TopWOptions, int], SampledRow] = {}


def _wanted(case: Case, options: TopWOptions, geometry: Geometry) -> SampledRow:
    table = 0 if geometry.table is None else hash(geometry.table.tobytes())
    key = (case.logits.tobytes(), f"{case.parameters} {case.uniform}", options, table)
    if key not in _answers:
        _answers[key] = sample_row(case.logits, case.parameters, options, geometry, case.uniform)
    return _answers[key]
