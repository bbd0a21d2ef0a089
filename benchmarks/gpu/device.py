"""Call the CUDA kernels on torch tensors: through the interface of `plugins.kernel.Kernel`, or as a bound `BoundStep`.

The device may be the CPU, for emulated kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike

from benchmarks.gpu.job import Job, StepError
from tests.support.cuda_kernel import ALL_PARTS, CudaKernel, CudaShape
from tests.support.kernel import (
    COLUMNS,
    REPORT,
    TABLE_TYPES,
    BlocksStruct,
    CallInputs,
    Edits,
    InputsStruct,
    KernelSamples,
    KernelTable,
    OutputsStruct,
    Rules,
    TableStruct,
)
from topw_deploy.sampling.geometry import VARIANCE_ADDED, VARIANCE_FLOOR
from topw_deploy.sampling.parameters import TopWOptions

_OUTPUTS = {
    "next_token": torch.int64, "logprob": torch.float32, "kept": torch.int32, "certified": torch.uint8,
    "mass": torch.float32, "keep_mask": torch.uint8, "reports": torch.uint8,
}  # fmt: skip
_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
assert list(_OUTPUTS) == [field[0] for field in OutputsStruct._fields_]


class DeviceTable:
    """An embedding table [V, d] and its statistics in device memory.

    table: as for `Kernel`.
    """

    def __init__(self, table: KernelTable, device: torch.device) -> None:
        def put(array: Any) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

        blocks, described = table.blocks, BlocksStruct()
        self._kept = [put(a) for a in (table.rows, table.mean, table.inverse_std, table.neighbour_bound)]
        if blocks is not None:
            self._kept += [put(blocks.scales), put(blocks.zero_points)]
            described = BlocksStruct(
                blocks.bits, blocks.block_size, TABLE_TYPES[str(blocks.scales.dtype)], 0,
                *(address(tensor) for tensor in self._kept[4:]),
            )  # fmt: skip
        self._describe(len(table.rows), table.hidden, table.dtype, described)

    @classmethod
    def of_tensors(
        cls, rows: torch.Tensor, mean: torch.Tensor, inverse_std: torch.Tensor, bound: torch.Tensor | None = None
    ) -> Self:
        """Make a table from tensors on the device: rows [V, d], float32 statistics [d] and neighbour bounds [V]."""
        table = cls.__new__(cls)
        table._kept = [rows, mean, inverse_std, bound]
        tokens, hidden = rows.shape
        table._describe(tokens, hidden, _TYPES[rows.dtype], BlocksStruct())
        return table

    @property
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and inverse standard deviation, float32 [d]."""
        mean, inverse_std = self._kept[1:3]
        assert mean is not None
        assert inverse_std is not None
        return mean, inverse_std

    def _describe(self, tokens: int, hidden: int, dtype: str, blocks: BlocksStruct) -> None:
        rows, *statistics = (address(tensor) for tensor in self._kept[:4])
        self.structure = TableStruct(rows, tokens, hidden, TABLE_TYPES[dtype], 0, *statistics, blocks)


class BoundStep:
    """A bound call on device tensors; every `launch` reads `logits`, `columns`, `allowed` and `rules` again.

    logits: float32, float16 or bfloat16 [B, V].
    memory: a step of the same shape and stream whose memory this one shares.
    """

    def __init__(
        self,
        kernel: CudaKernel,
        logits: torch.Tensor,
        columns: Mapping[str, ArrayLike] | None = None,
        options: TopWOptions | None = None,
        table: DeviceTable | None = None,
        edits: Edits | None = None,
        *,
        allowed: ArrayLike | None = None,
        rules: Rules | None = None,
        mass: bool = False,
        keep_mask: bool = False,
        reports: bool = True,
        memory: BoundStep | None = None,
    ) -> None:
        batch, vocab = logits.shape
        device = logits.device
        self._kernel, self.logits = kernel, logits
        given = CallInputs.of(np.empty((batch, 0)), columns, edits, allowed, rules)
        self.columns = {name: torch.tensor(column, device=device) for name, column in given.columns.items()}
        self._changes = [torch.from_numpy(array).to(device) for array in given.changes]
        self.allowed = self._changes[3]
        self.rules = [torch.tensor(array, device=device) for array in given.rules or ()]
        wanted = {"mass": mass, "keep_mask": keep_mask, "reports": reports}
        width = {"keep_mask": (vocab,), "reports": (REPORT.itemsize,)}
        self.outputs = {
            name: torch.zeros((batch, *width.get(name, ())), dtype=kind, device=device)
            for name, kind in _OUTPUTS.items()
            if wanted.get(name, True)
        }
        self._rows, self._table = table, None if table is None else table.structure
        slots, words = self._changes[0].shape[1], self._changes[3].shape[1]
        self.shape = CudaShape(options or TopWOptions(), batch, vocab, slots, _TYPES[logits.dtype], self._table)
        if memory is None:
            self.control = torch.zeros(kernel.control_bytes(self.shape), dtype=torch.uint8, device=device)
            self.workspace = torch.empty(kernel.workspace_bytes(self.shape), dtype=torch.uint8, device=device)
        else:
            self.control, self.workspace = memory.control, memory.workspace
        self._inputs = InputsStruct(
            batch, vocab, slots, words, *(address(t) for t in (logits, *self._changes)),
            *(address(self.columns[name]) for name in COLUMNS), *map(address, self.rules),
        )  # fmt: skip
        self._outputs = OutputsStruct(*(address(self.outputs.get(name)) for name in _OUTPUTS))

    def launch(self, parts: int = ALL_PARTS) -> None:
        """Enqueue the call on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream if self.logits.is_cuda else 0
        memory = address(self.control) or 0, address(self.workspace) or 0
        self._kernel.launch(self.shape, self._table, self._inputs, self._outputs, *memory, stream, parts)

    def samples(self) -> KernelSamples:
        """Copy the outputs of the last launch to the host; `reports` is empty if they were not requested.

        Asserts that the control bytes are zero.
        """
        if self.logits.is_cuda:
            torch.cuda.synchronize()
        assert not bool(self.control.any()), "control bytes are not zero after the launch"
        found = {name: tensor.cpu().numpy().copy() for name, tensor in self.outputs.items()}
        keep_mask, reports = found.get("keep_mask"), found.get("reports")
        return KernelSamples(
            found["next_token"],
            found["logprob"],
            found["kept"],
            found["certified"].astype(np.bool_),
            found.get("mass"),
            None if keep_mask is None else keep_mask.astype(np.bool_),
            np.empty(0, REPORT) if reports is None else reports.view(REPORT).reshape(-1),
        )


def open_kernel(job: Job) -> DeviceKernel:
    """Open the job's library of kernels, on the GPU or in a rehearsal on the CPU.

    Raises StepError without a library or GPU, PluginError for an unusable library.
    """
    if job.rehearse:
        return DeviceKernel(job.kernels(), torch.device("cpu"))
    if not torch.cuda.is_available():
        why = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        raise StepError(f"torch {torch.__version__} {why}, so this step cannot run.")
    return DeviceKernel(job.kernels(), torch.device("cuda"))


class DeviceKernel(CudaKernel):
    """Has the interface of `Kernel`, with numpy arrays as inputs and outputs."""

    def __init__(self, path: Path, device: torch.device) -> None:
        super().__init__(path)
        self.device = device

    def sample(
        self,
        logits: ArrayLike,
        columns: Mapping[str, ArrayLike] | None = None,
        options: TopWOptions | None = None,
        table: KernelTable | None = None,
        edits: Edits | None = None,
        *,
        allowed: ArrayLike | None = None,
        rules: Rules | None = None,
        mass: bool = False,
        keep_mask: bool = False,
    ) -> KernelSamples:
        """Like Kernel.sample; logits may also be float16, or bfloat16 bits as uint16."""
        rows = torch.from_numpy(np.ascontiguousarray(logits))
        if rows.dtype == torch.uint16:
            rows = rows.view(torch.bfloat16)
        elif rows.dtype != torch.float16:
            rows = rows.float()
        chosen = TopWOptions() if options is None else options
        on_device = None if table is None else DeviceTable(table, self.device)
        step = BoundStep(self, rows.to(self.device), columns, chosen, on_device, edits, allowed=allowed, rules=rules,
                    mass=mass, keep_mask=keep_mask)  # fmt: skip
        step.launch()
        return step.samples()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_BLOCK = 8_192  # rows per pass
_SLACK = 1e-3  # relative: far above float32's error on random points


def random_rows(vocab: int, hidden: int, device: torch.device) -> torch.Tensor:
    """float16 [vocab, hidden], normal, fixed seed."""
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.empty((vocab, hidden), dtype=torch.float16, device=device)
    for start in range(0, vocab, _BLOCK):
        block = rows[start : start + _BLOCK]
        block.copy_(torch.randn(block.shape, device=device, generator=generator))
    return rows


def statistics(rows: torch.Tensor, metric: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 mean and inverse standard deviation [d], as by `sampling.embedding_statistics`."""
    count = len(rows)
    zero = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    mean = sum((block.sum(0) for block in _blocks(rows, metric)), zero) / count
    variance = sum(((block - mean).square().sum(0) for block in _blocks(rows, metric)), zero) / count
    added = variance + VARIANCE_ADDED if metric == "mahalanobis" else variance.clamp(min=VARIANCE_FLOOR)
    return mean.float(), added.rsqrt().float()


def _blocks(rows: torch.Tensor, metric: str) -> Iterator[torch.Tensor]:
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].double()
        yield torch.nn.functional.normalize(block, dim=1) if metric == "mahalanobis" else block


def table_of(rows: torch.Tensor, metric: str, bounded: torch.Tensor | None = None) -> DeviceTable:
    """Make the table of `rows` with its statistics.

    bounded: token ids that get neighbour bounds; None for no bounds.
    """
    mean, inverse_std = statistics(rows, metric)
    bound = None if bounded is None else nearest_bound(rows, metric, mean, inverse_std, bounded)
    return DeviceTable.of_tensors(rows, mean, inverse_std, bound)


def nearest_bound(
    rows: torch.Tensor, metric: str, mean: torch.Tensor, inverse_std: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float32 [V]: lower bounds of the nearest-neighbour distances of the tokens `ids`; 0 for all others."""

    def points(block: torch.Tensor) -> torch.Tensor:
        if metric == "mahalanobis":
            return (torch.nn.functional.normalize(block.float(), dim=1) - mean) * inverse_std
        return torch.nn.functional.normalize((block.float() - mean) * inverse_std, dim=1)

    bound = torch.zeros(len(rows), device=rows.device)
    for some in ids.split(_BLOCK):
        mine = points(rows[some])  # [n, d]
        nearest = torch.full((len(some),), torch.inf, device=rows.device)
        for start in range(0, len(rows), _BLOCK):
            others = points(rows[start : start + _BLOCK])
            found = 1 - mine @ others.T if metric == "cosine" else torch.cdist(mine, others)
            within = (some >= start) & (some < start + len(others))
            found[within.nonzero().flatten(), some[within] - start] = torch.inf
            nearest = torch.minimum(nearest, found.amin(1))
        bound[some] = torch.where(nearest > _SLACK, nearest * (1 - _SLACK), 0)
    return bound
