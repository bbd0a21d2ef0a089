"""Compare random and adversarial rows in the emulated CUDA kernels with the reference.

    python -m fuzz.cuda [--rows 50000] [--seed 0]

It uses the rows of `fuzz.sampler`, with every table and logits type, several block sizes, and a random thread order.
Differences are allowed only at float32 ties (docs/contract/graph.md, section 4), but not at equal logits across the
pool's cut. Prints every difference with its explanation; exits 1 if one has none.

`fuzz` accepts any `plugins.kernel.Kernel`, so `benchmarks.gpu` uses it on a real GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fuzz.emulation import arguments, emulated, exit_code
from fuzz.implementations import Answerer, Sampling, open_kernel
from fuzz.sampler import Bounding, Outcome, Side, compare, exported_bound, report
from tests.support.rows import geometry_of
from tests.support.sampler_cases import ALL, Size, Visit, visits
from topw_deploy.plugins.kernel import KernelBlocks, KernelTable
from topw_deploy.sampling import FLOAT32_TIES, TieBounds

TYPES = ("float32", "float32", "float32", "float16", "bfloat16", "8 bits", "4 bits")
_BLOCK = 16  # coordinates that share a scale
_NAME = "cuda"
_NEARLY = TieBounds(objective=1e-3, nucleus=1e-3, draw=0.0)

# (threads per block, blocks). Small pools need small blocks, as distance tiles are as wide as a block.
_LAYOUTS = ((64, 3), (32, 1), (128, 2), (64, 5))
_LARGE_LAYOUTS = ((256, 2), (512, 1), (256, 3), (128, 4))
_LARGE_POOL = 200


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 from bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantised(table: np.ndarray, bits: int) -> tuple[np.ndarray, KernelBlocks, np.ndarray]:
    """Quantise in blocks of 16 coordinates: packed codes, scales, dequantised rows."""
    tokens, hidden = table.shape
    blocks = -(-hidden // _BLOCK)
    padded = np.zeros((tokens, blocks * _BLOCK), np.float32)
    padded[:, :hidden] = table
    cut = padded.reshape(tokens, blocks, _BLOCK)
    middle = 1 << (bits - 1)
    scales = (np.abs(cut).max(axis=2) / np.float32(middle - 1)).astype(np.float32)
    steps = np.rint(cut / np.where(scales > 0, scales, 1)[:, :, None])
    rows = (steps.astype(np.float32) * scales[:, :, None]).reshape(tokens, -1)[:, :hidden]
    codes = (steps.reshape(tokens, -1)[:, :hidden] + middle).astype(np.uint8)
    packed = codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(packed), KernelBlocks(bits, _BLOCK, scales), np.ascontiguousarray(rows)


def in_type(visit: Visit, kind: str) -> tuple[Visit, Callable[[np.ndarray | None], KernelTable | None]]:
    """Returns (the visit with its table rounded to `kind`, function from neighbour bounds to the kernel's table)."""
    if visit.scenario.options.metric == "uniform":
        return visit, lambda bound: None
    codes, blocks, rows = visit.table, None, visit.table
    if kind == "float16":
        codes = visit.table.astype(np.float16)
        rows = codes.astype(np.float32)
    elif kind == "bfloat16":
        codes = as_bfloat16(visit.table)
        rows = from_bfloat16(codes)
    elif kind == "8 bits" or (kind == "4 bits" and visit.table.shape[1] % 2 == 0):
        codes, blocks, rows = quantised(visit.table, int(kind[0]))
    geometry = visit.geometry if rows is visit.table else geometry_of(visit.scenario.options, rows)
    assert geometry.mean is not None
    assert geometry.inverse_std is not None
    statistics = geometry.mean.astype(np.float32), geometry.inverse_std.astype(np.float32)
    return replace(visit, table=rows, geometry=geometry), lambda bound: KernelTable(codes, *statistics, bound, blocks)


def new_outcome() -> Outcome:
    """An empty outcome with float32's tie bounds."""
    return Outcome({_NAME: Side(FLOAT32_TIES)}, _NEARLY)


def fuzz(
    kernel: Sampling, rows: int, seed: int, before: Callable[[int, Visit], None] | None = None,
    sizes: tuple[Size, ...] = ALL, *, first: int = 0, measure: Bounding = exported_bound,
    after: Callable[[Outcome, int], object] = lambda outcome, rows: None,
) -> Outcome:  # fmt: skip
    """Compare `rows` rows of `kernel` with the reference.

    before: called with each visit's number and the visit.
    after: called with the outcome and each visit's number of rows.
    first: number of the first visit; the number determines the types.
    measure: function that computes the neighbour bounds.
    """
    outcome, done = new_outcome(), 0
    for number, drawn in enumerate(visits(seed, sizes), first):
        if before is not None:
            before(number, drawn)
        visit, table = in_type(drawn, TYPES[number % len(TYPES)])
        logits, rounded = _logits_types(number)
        cases = [replace(case, logits=rounded(case.logits)) for case in visit.cases[: rows - done]]

        def opened(
            visit: Visit, bound: np.ndarray | None, table: Callable[..., KernelTable | None] = table,
            logits: Callable[[np.ndarray], np.ndarray] = logits,
        ) -> Answerer:  # fmt: skip
            return open_kernel(kernel, visit.scenario.options, table(bound), logits)

        compare(visit, cases, bool(number % 2), outcome, {_NAME: opened}, measure)
        done += len(cases)
        after(outcome, len(cases))
        if done >= rows:
            return outcome
    raise AssertionError("visits are endless")


def unexplained_of(outcome: Outcome) -> list[str]:
    """Differences without an explanation."""
    return outcome.sides[_NAME].unexplained


def _logits_types(number: int) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """Every tenth visit stores float16, every tenth bfloat16."""
    if number % 10 == 3:
        return as_bfloat16, lambda row: from_bfloat16(as_bfloat16(row))
    if number % 10 == 7:
        return _as_float16, lambda row: _as_float16(row).astype(np.float32)
    return np.asarray, np.asarray


def _as_float16(row: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return row.astype(np.float16)


def main() -> int:
    given = arguments(__doc__, 50_000)
    with emulated(given.rows) as (kernel, advance):

        def shuffle(number: int, visit: Visit) -> None:
            large = min(visit.scenario.options.top_m, visit.scenario.vocab_size) > _LARGE_POOL
            threads, blocks = (_LARGE_LAYOUTS if large else _LAYOUTS)[number % len(_LAYOUTS)]
            kernel.emulate(given.seed * 1000 + number, threads, blocks)

        outcome = fuzz(kernel, given.rows, given.seed, shuffle, after=lambda outcome, rows: advance(rows))
    print(report(outcome))
    return exit_code(unexplained_of(outcome))


if __name__ == "__main__":
    sys.exit(main())
