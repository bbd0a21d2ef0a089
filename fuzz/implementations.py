"""The implementations of the sampler that `fuzz.sampler` compares, behind one interface.

A function of ADAPTERS opens an implementation for one scenario. It imports what the implementation needs, raises
`Absent` with the reason if that cannot run, and returns a function that answers lists of rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fuzz.visits import Visit
from tests.support.kernel import STAGES, KernelBlocks, KernelTable
from tests.support.rows import Case, geometry_of
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.parameters import PARAMETER_NAMES

if TYPE_CHECKING:
    from tests.support.cuda_kernel import EmulatedKernel

Answerer = Callable[[list[Case]], list["Answer"]]
Opener = Callable[[Visit, "np.ndarray | None"], Answerer]
"""(visit, neighbour bounds float32 [V] or None) -> the implementation."""

TYPES = ("float32", "float32", "float32", "float16", "bfloat16", "8 bits", "4 bits")
_BLOCK = 16  # coordinates that share a scale

# (threads per block, blocks). Small pools need small blocks, as distance tiles are as wide as a block.
_LAYOUTS = ((64, 3), (32, 1), (128, 2), (64, 5))
_LARGE_LAYOUTS = ((256, 2), (512, 1), (256, 3), (128, 4))
_LARGE_POOL = 200


class Absent(Exception):  # noqa: N818 - a state, not a failure
    """Raised by an adapter whose implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Answer:
    """An implementation's answer for one row; by default that of an invalid row.

    kept: the kept ids, in the order (logit descending, id ascending) if `ordered`, else ascending.
    stage: what decided the row.
    next_token, logprob, mass: of the draw; None if the implementation does not draw.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    certified: bool = False
    stage: str = "invalid"
    ordered: bool = True
    next_token: int | None = None
    logprob: float | None = None
    mass: float | None = None


def open_torch(visit: Visit, bound: np.ndarray | None) -> Answerer:
    """Open `sampling.torch.crop_rows`, which answers a batch with parameters for each row, without bounds."""
    try:
        import torch

        from topw_deploy.sampling.torch import TensorGeometry, crop_rows
    except ImportError as error:
        raise Absent(str(error)) from error
    torch.set_num_threads(1)
    geometry = None
    if visit.scenario.options.metric != "uniform":
        points = (
            torch.from_numpy(np.asarray(a)) for a in (visit.table, visit.geometry.mean, visit.geometry.inverse_std)
        )
        geometry = TensorGeometry(visit.scenario.options.metric, *points)

    def answer(cases: list[Case]) -> list[Answer]:
        logits = torch.from_numpy(np.stack([case.logits for case in cases]))
        parameters = {
            name: torch.tensor([case.parameters[name] for case in cases], dtype=torch.float64)
            for name in PARAMETER_NAMES
        }
        found = crop_rows(logits, parameters, visit.scenario.options, geometry)
        stages = ("geometry", "certified", "invalid")
        return [
            Answer(
                found.ids[i, : found.kept[i]].numpy(),
                bool(found.certified[i]),
                stages[2 if found.invalid[i] else int(found.certified[i])],
            )
            for i in range(len(cases))
        ]

    return answer


def open_native(visit: Visit, bound: np.ndarray | None) -> Answerer:
    """Open the native library's kernel through ctypes. It answers a batch, and also draws."""
    return open_kernel(native_kernel(), visit.scenario.options, KernelTable.from_geometry(visit.geometry, bound))


def native_kernel() -> Any:
    """The kernel of the native library."""
    from tests.support.kernel import Kernel
    from topw_deploy.plugins.library import library_path, why_absent

    path = library_path()
    if path is None:
        raise Absent(why_absent())
    return Kernel(path)


class Sampling(Protocol):
    """The method of `tests.support.kernel.Kernel` that is compared."""

    def sample(self, logits: Any, columns: Any, options: Any, table: Any, *, mass: bool, keep_mask: bool) -> Any: ...


def open_kernel(
    kernel: Sampling, options: TopWOptions, table: object, logits: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> Answerer:
    """Open a kernel with one scenario's options and table. It answers a batch.

    table: None for the uniform metric.
    logits: converts float32 rows to the type that the kernel reads.
    """

    def answer(cases: list[Case]) -> list[Answer]:
        columns = {name: np.array([case.parameters[name] for case in cases]) for name in PARAMETER_NAMES}
        columns["uniform"] = np.array([case.uniform for case in cases])
        rows = logits(np.stack([case.logits for case in cases]))
        found = kernel.sample(rows, columns, options, table, mass=True, keep_mask=True)
        return [
            Answer(
                np.flatnonzero(found.keep_mask[i]),
                bool(found.certified[i]),
                STAGES[int(report["stage"])],
                False,
                int(found.next_token[i]),
                float(found.logprob[i]),
                float(found.mass[i]),
            )
            for i, report in enumerate(found.reports)
        ]

    return answer


ADAPTERS: Mapping[str, Opener] = {"torch": open_torch, "native": open_native}


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


def in_types(number: int, visit: Visit, cases: list[Case], kernel: Sampling) -> tuple[Visit, list[Case], Opener]:
    """Round the table and the logits of visit `number` to types that the kernels read, each in turn.

    One visit in ten has float16 logits, another one bfloat16. Returns the rounded visit and rows, and the kernel's
    opener, which gets the codes.
    """
    kind, table = TYPES[number % len(TYPES)], visit.table
    codes, blocks, rows = table, None, table
    if kind == "float16":
        codes = table.astype(np.float16)
        rows = codes.astype(np.float32)
    elif kind == "bfloat16":
        codes = as_bfloat16(table)
        rows = from_bfloat16(codes)
    elif kind == "8 bits" or (kind == "4 bits" and table.shape[1] % 2 == 0):
        codes, blocks, rows = quantised(table, int(kind[0]))
    geometry = visit.geometry if rows is table else geometry_of(visit.scenario.options, rows)
    stored, rounded = _LOGITS.get(number % 10, (np.asarray, np.asarray))

    def opener(rounded_visit: Visit, bound: np.ndarray | None) -> Answerer:
        kernel_table = KernelTable.from_geometry(geometry, bound)
        if kernel_table is not None:
            kernel_table = replace(kernel_table, rows=codes, blocks=blocks)
        return open_kernel(kernel, visit.scenario.options, kernel_table, stored)

    cases = [replace(case, logits=rounded(case.logits)) for case in cases]
    return replace(visit, table=rows, geometry=geometry), cases, opener


def _as_float16(row: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return row.astype(np.float16)


_LOGITS: Mapping[int, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    3: (as_bfloat16, lambda row: from_bfloat16(as_bfloat16(row))),
    7: (_as_float16, lambda row: _as_float16(row).astype(np.float32)),
}
"""Visit modulo 10 -> (how it stores logits, how it rounds them before the reference reads them)."""


@contextmanager
def emulated() -> Iterator[EmulatedKernel]:
    """Compile the CUDA kernels as C++ that runs on the CPU."""
    from tests.support.cuda_kernel import EmulatedKernel, built

    with tempfile.TemporaryDirectory() as folder:
        yield EmulatedKernel(built(Path(folder)))


def shuffle(kernel: EmulatedKernel, seed: int, number: int, visit: Visit) -> None:
    """Give the emulated device a layout and a random order of threads for visit `number`."""
    large = min(visit.scenario.options.top_m, visit.scenario.vocab_size) > _LARGE_POOL
    threads, blocks = (_LARGE_LAYOUTS if large else _LAYOUTS)[number % len(_LAYOUTS)]
    kernel.emulate(seed * 1000 + number, threads, blocks)
