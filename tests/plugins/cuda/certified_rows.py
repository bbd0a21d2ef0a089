"""Compare rows that the first launch answers alone with the CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from tests.support.kernel import STAGES, Kernel, KernelSamples
from tests.support.native_cases import sampled, unexplained
from tests.support.rows import Case, Scenario, random_case
from tests.support.sampler_cases import Size, visits
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import Geometry, TopWOptions, sample_row

ALONE = [STAGES.index(name) for name in ("invalid", "greedy", "candidates")]
ANSWERS = ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports")


def settled(cpu: Kernel, cases: list[Case], options: TopWOptions) -> list[Case]:
    """Rows that the CPU kernel answers without the pool, under the uniform metric."""
    stages = sampled(cpu, cases, options).reports["stage"]
    return [case for case, stage in zip(cases, stages, strict=True) if stage in ALONE]


def built_rows(
    cpu: Kernel, seed: int, sizes: tuple[Size, ...], number: int
) -> Iterator[tuple[list[Case], TopWOptions]]:
    """Settled rows of `sampler_cases`, ties included, with their options except the metric."""
    for visit in islice(visits(seed, sizes), number):
        options = TopWOptions(top_m=visit.scenario.options.top_m, metric="uniform")
        cases = settled(cpu, visit.cases, options)
        if cases:
            yield cases, options


def random_rows(cpu: Kernel, seed: int, vocab: int, rows: int, options: TopWOptions) -> list[Case]:
    rng = np.random.default_rng(seed)
    return settled(cpu, [random_case(rng, vocab) for _ in range(rows)], options)


def differences_from_reference(found: KernelSamples, cases: list[Case], options: TopWOptions) -> list[str]:
    """Answers not explained by the ties of docs/contract/graph.md, section 4."""
    lines = []
    for i, case in enumerate(cases):
        if np.isnan(case.logits).any() or np.isposinf(case.logits).any() or not np.isfinite(case.logits).any():
            given = found.next_token[i], found.logprob[i], found.kept[i], found.certified[i]
            lines += [] if given == (-1, 0, 0, False) else [f"invalid: {given}, {case.regime}"]
            continue
        wanted = sample_row(case.logits, case.parameters, options, Geometry.uniform(), case.uniform)
        lines += [f"{what}: {case.regime}, {case.parameters}, {wanted.ties}" for what in unexplained(wanted, found, i)]
    return lines


def differences_from(cpu: KernelSamples, found: KernelSamples) -> list[str]:
    """All differences except the last bits of logprob and mass."""
    lines = [name for name in ("next_token", "kept", "certified", "keep_mask") if not _same(cpu, found, name)]
    assert cpu.mass is not None
    assert found.mass is not None
    lines += [] if np.allclose(cpu.logprob, found.logprob, rtol=2e-7, atol=2e-7) else ["logprob"]
    lines += [] if np.allclose(cpu.mass, found.mass, rtol=6e-7, atol=0) else ["mass"]
    return lines


def same_bits(first: KernelSamples, second: KernelSamples) -> list[str]:
    return [name for name in ANSWERS if not _same(first, second, name)]


def _same(first: KernelSamples, second: KernelSamples, name: str) -> bool:
    return bool(np.array_equal(getattr(first, name), getattr(second, name)))


def native_kernel() -> Kernel | None:
    path = library_path()
    return None if path is None else Kernel(path)


__all__ = [
    "Case", "Scenario", "built_rows", "differences_from", "differences_from_reference", "native_kernel", "random_rows",
    "same_bits", "settled",
]  # fmt: skip
