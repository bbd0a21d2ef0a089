"""Compare the emulated CUDA kernels with the reference, on random and adversarial rows.

    python -m fuzz.cuda [--rows 50000] [--seed 0]

The rows are those of `fuzz.sampler`. Tables and logits have every type, blocks several sizes, and threads run in random
order. A difference is allowed only at a float32 tie (docs/contract/graph.md, section 4), but not at equal logits across
the pool's cut. The program prints every difference with its explanation, and exits with 1 if one has none.

The function `fuzz` accepts any `plugins.kernel.Kernel`; `benchmarks.gpu` passes a real GPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fuzz.emulation import arguments, emulated, exit_code
from fuzz.implementations import Answerer, Sampling, open_kernel
from fuzz.sampler import BoundFunction, Outcome, Side, compare, exported_bound, report
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
    """Round to bfloat16, to the nearest number and ties to even. Returns the bits, uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers of bfloat16 bits, uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantised(table: np.ndarray, bits: int) -> tuple[np.ndarray, KernelBlocks, np.ndarray]:
    """Quantise a table in blocks of 16 coordinates. Returns packed codes, scales, and the dequantised rows."""
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
    """Round a visit's table to the type `kind`.

    Returns the visit with the rounded table, and a function that makes the kernel's table from neighbour bounds.
    """
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
    """An outcome without rows, with the tie bounds of float32."""
    return Outcome({_NAME: Side(FLOAT32_TIES)}, _NEARLY)


def fuzz(
    kernel: Sampling, rows: int, seed: int, before: Callable[[int, Visit], None] | None = None,
    sizes: tuple[Size, ...] = ALL, *, first: int = 0, measure: BoundFunction = exported_bound,
    after: Callable[[Outcome, int], object] = lambda outcome, rows: None,
) -> Outcome:  # fmt: skip
    """Compare a kernel with the reference on `rows` rows.

    before: called with the number of each visit and the visit.
    after: called with the outcome and the number of rows of each visit.
    first: the number of the first visit. A visit's number determines its types.
    measure: computes neighbour bounds.
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
    """The differences without an explanation, as lines of text."""
    return outcome.sides[_NAME].unexplained


def _logits_types(number: int) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """How visit `number` stores logits, and how it rounds them before the reference reads them.

    One visit in ten stores float16, another one bfloat16, the others float32.
    """
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
