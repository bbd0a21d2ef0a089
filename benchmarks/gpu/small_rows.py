"""Rows of every kind over a small vocabulary, for compute-sanitizer: `python -m benchmarks.gpu.small_rows LIBRARY`.

It does not import torch or transformers, which are slow under the tools. Device blocks have exact sizes and scratch
memory is uninitialised, to expose overruns and uninitialised reads. Answers are compared with the reference.

It prints READY after the first allocation and copy, and ANSWERED at the end, and exits with 1 for a wrong answer.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_size_t, c_uint64, c_void_p
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.implementations import Answer, as_bfloat16, from_bfloat16
from fuzz.sampler import differences
from tests.support.cuda_kernel import CudaKernel, CudaShape
from tests.support.kernel import (
    COLUMNS,
    STAGES,
    TABLE_TYPES,
    BlocksStruct,
    CallInputs,
    InputsStruct,
    KernelSamples,
    KernelTable,
    OutputsStruct,
    TableStruct,
)
from tests.support.rows import explanation
from topw_deploy.errors import PluginError
from topw_deploy.plugins import library
from topw_deploy.sampling import FLOAT32_TIES, Geometry, pack_mask, sample_row
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWOptions
from topw_deploy.sampling.row import mask_words

READY, ANSWERED = "READY", "ANSWERED"
VOCAB, HIDDEN, BATCH, EDITS = 3_001, 24, 8, 3
UNCERTIFIED = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0, "geom_scale": 0.6}
_OPTIONS = TopWOptions(metric="cosine", top_m=200, alt_iters=9)


class DeviceMemory:
    """Uninitialised device allocations of exact size, through the driver."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL(library.DRIVER_NAME)
        except OSError as error:
            raise PluginError(f"there is no NVIDIA driver ({error}).") from None

    def allocate(self, size: int) -> int:
        memory = c_uint64()
        self._check("cuMemAlloc", self._driver.cuMemAlloc_v2(byref(memory), c_size_t(size)))
        return memory.value

    def write(self, address: int, array: np.ndarray) -> None:
        code = self._driver.cuMemcpyHtoD_v2(c_uint64(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        self._check("cuMemcpyHtoD", code)

    def read(self, address: int, array: np.ndarray) -> None:
        code = self._driver.cuMemcpyDtoH_v2(c_void_p(array.ctypes.data), c_uint64(address), c_size_t(array.nbytes))
        self._check("cuMemcpyDtoH", code)

    def _check(self, call: str, code: int) -> None:
        if code:
            raise PluginError(f"{call} answered with CUDA error {code}.")


class HostMemory:
    """Host memory, for the emulated kernels."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def allocate(self, size: int) -> int:
        room = np.empty(size + 256, np.uint8)
        self._kept.append(room)
        return int(room.ctypes.data) + -room.ctypes.data % 256

    def write(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)


Memory = DeviceMemory | HostMemory


def rows(seed: int, scale: float) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Logits, parameters, and edits with masks of BATCH rows.

    In order: certified, open, edited, edited and open, invalid, greedy, repelled by geometry, flat. Masks of every
    second row forbid half of the tokens, among them NaN.
    """
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, VOCAB)) * scale).astype(np.float32)
    logits[[0, 2, 5], 7:12] += 12
    logits[4, VOCAB - 1] = np.nan
    columns: dict[str, Any] = {name: np.full(BATCH, value) for name, value in UNCERTIFIED.items()}
    columns["lam"][[0, 2]], columns["init_top_p"][[0, 2]] = 2.2, 0.999
    columns["temperature"][5], columns["geom_scale"][6] = 0.0, -0.3
    columns["lam"][7], columns["init_top_p"][7], columns["temperature"][7] = 0.3, 0.999, 1.0
    columns["uniform"] = rng.random(BATCH, dtype=np.float32)
    ids = np.full((BATCH, EDITS), -1, np.int64)
    ids[2:4] = [7, VOCAB - 1, 64], [63, VOCAB - 1, 2_000]
    penalty, bias = np.ones((BATCH, EDITS), np.float32), np.zeros((BATCH, EDITS), np.float32)
    penalty[2:4, 0], bias[2:4, 1], bias[2:4, 2] = 1.5, 2.0, -np.inf
    allowed = np.ones((BATCH, VOCAB), np.bool_)
    allowed[1::2] = rng.random((BATCH // 2, VOCAB)) < 0.5
    allowed[1::2, [7, VOCAB - 2]], logits[1::2, VOCAB - 2] = [True, False], np.nan
    return logits, CallInputs.of(logits, columns).columns, (ids, penalty, bias, pack_mask(allowed))


def copy_to(memory: Memory, array: np.ndarray) -> int:
    address = memory.allocate(array.nbytes)
    memory.write(address, np.ascontiguousarray(array))
    return address


def table_in(memory: Memory, table: KernelTable) -> TableStruct:
    statistics = (copy_to(memory, array) for array in (table.rows, table.mean, table.inverse_std))
    rows_at, mean, inverse_std = statistics
    return TableStruct(rows_at, *table.rows.shape, TABLE_TYPES[table.dtype], 0, mean, inverse_std, None, BlocksStruct())


def launch_twice(
    kernel: CudaKernel, memory: Memory, stored: np.ndarray, columns: dict[str, np.ndarray],
    changes: tuple[np.ndarray, ...], table: TableStruct,
) -> KernelSamples:  # fmt: skip
    """Launch the kernels twice over the same memory. Returns the answers of the second launch, with every output."""
    kind = "bfloat16" if stored.dtype == np.uint16 else str(stored.dtype)
    shape = CudaShape(_OPTIONS, BATCH, VOCAB, EDITS, kind, table)
    samples = KernelSamples.empty(BATCH, VOCAB, mass=True, keep_mask=True)
    places = {field.name: memory.allocate(getattr(samples, field.name).nbytes) for field in fields(samples)}
    inputs = InputsStruct(
        BATCH, VOCAB, EDITS, mask_words(VOCAB), *(copy_to(memory, array) for array in (stored, *changes)),
        *(copy_to(memory, columns[name]) for name in COLUMNS),
    )  # fmt: skip
    control = kernel.allocate(kernel.control_bytes(shape))
    workspace = memory.allocate(kernel.workspace_bytes(shape))
    for _ in range(2):  # the second launch reuses memory
        kernel.launch(shape, table, inputs, OutputsStruct(*places.values()), control, workspace)
    for name, place in places.items():
        memory.read(place, getattr(samples, name))
    kernel.release(control)
    return samples


def compare_row(
    samples: KernelSamples, row: int, logits: np.ndarray, columns: Mapping[str, np.ndarray],
    changes: Sequence[Any], options: TopWOptions, geometry: Geometry,
) -> list[tuple[str, str | None]]:  # fmt: skip
    """Compare a row of a batch with the reference. Returns (difference, the tie that explains it, or None) of each.

    changes: ids, penalties and biases of edits, and masks or None.
    """
    assert samples.mass is not None
    assert samples.keep_mask is not None
    parameters = {name: float(columns[name][row]) for name in PARAMETER_NAMES}
    ids, penalty, bias = (array[row] for array in changes[:3])
    allowed = None if changes[3] is None else changes[3][row]
    uniform = float(columns["uniform"][row])
    wanted = sample_row(logits[row], parameters, options, geometry, uniform, (ids, penalty, bias), allowed)
    found = Answer(
        np.flatnonzero(samples.keep_mask[row]), bool(samples.certified[row]), ordered=False,
        next_token=int(samples.next_token[row]), logprob=float(samples.logprob[row]), mass=float(samples.mass[row]),
    )  # fmt: skip
    tokens = f"wanted token {wanted.next_token} of {wanted.kept} kept, found {found.next_token} of {len(found.kept)}"
    reasons = {each: explanation(each, wanted, FLOAT32_TIES, pool_cut=False) for each in differences(wanted, found)}
    return [(each if reason else f"{each}; {tokens}", reason) for each, reason in reasons.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path, help="the library of the CUDA kernels")
    parser.add_argument("--emulated", action="store_true", help="the library emulates a GPU in this process's memory")
    given = parser.parse_args()
    kernel = CudaKernel(given.kernels)
    kernel.release(kernel.allocate(256))  # makes the device's context current
    memory = HostMemory() if given.emulated else DeviceMemory()
    embeddings = np.random.default_rng(3).standard_normal((VOCAB, HIDDEN)).astype(np.float16)
    geometry = Geometry.from_embeddings(embeddings, _OPTIONS.metric)
    described = KernelTable.from_geometry(geometry)
    assert described is not None
    table = table_in(memory, described)
    print(READY, flush=True)
    types: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "float32": (np.asarray, np.asarray),
        "float16": (lambda row: row.astype(np.float16), lambda row: row.astype(np.float32)),
        "bfloat16": (as_bfloat16, from_bfloat16),
    }
    stages: Counter[str] = Counter()
    wrong: list[str] = []
    for seed, (name, (store, read)) in enumerate(types.items()):
        logits, columns, changes = rows(seed, 1.6)
        stored = store(logits)
        samples = launch_twice(kernel, memory, stored, columns, changes, table)
        stages.update(STAGES[int(stage)] for stage in samples.reports["stage"])
        for row in range(BATCH):
            found = compare_row(samples, row, read(stored), columns, changes, _OPTIONS, geometry)
            wrong += [f"{name}, row {row}: {difference}" for difference, reason in found if reason is None]
    print("\n".join(wrong))
    print(ANSWERED, ", ".join(f"{stage} {count}" for stage, count in sorted(stages.items())), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
