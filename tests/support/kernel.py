"""The ctypes structures of native/topw.h, shared with the CUDA library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy import dtypes
from topw_deploy.sampling import Geometry, TopWParameters
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, TopWOptions

COLUMNS = ("temperature", "selection_temperature", "lam", "beta", "init_top_p", "geom_scale", "uniform")
"""Names of the parameters per row, in the order of topw_inputs."""

FLOATS = tuple(map(dtypes.array_name, dtypes.FLOATS))
"""Element types of logits and of embedding tables that are not quantised."""

TABLE_TYPES = {
    dtypes.array_name(name): dtypes.ELEMENT_TYPES[name].number for name in (*dtypes.FLOATS, "uint8", "uint4", "int4")
}
"""Name of a table's element type, as from `array_name` -> its TensorProto.DataType."""


class OptionsStruct(Structure):
    """The C structure topw_options."""

    _fields_ = (("top_m", c_int64), ("alt_iters", c_int64), ("metric", c_int32), ("knn_k", c_int32))

    @classmethod
    def of(cls, options: TopWOptions) -> OptionsStruct:
        """The C structure of `options`; `knn_k` is cut to int32."""
        return cls(options.top_m, options.alt_iters, METRICS.index(options.metric), min(options.neighbours, 2**31 - 1))


class BlocksStruct(Structure):
    """The C structure topw_blocks."""

    _fields_ = (
        ("bits", c_int32),
        ("block_size", c_int32),
        ("scale_type", c_int32),
        ("reserved", c_int32),
        ("scales", c_void_p),
        ("zero_points", c_void_p),
    )


class TableStruct(Structure):
    """The C structure topw_table."""

    _fields_ = (
        ("rows", c_void_p),
        ("tokens", c_int64),
        ("hidden", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("mean", c_void_p),
        ("inverse_std", c_void_p),
        ("neighbour_bound", c_void_p),
        ("blocks", BlocksStruct),
    )


class InputsStruct(Structure):
    """The C structure topw_inputs."""

    _fields_ = (
        ("batch", c_int64),
        ("vocab", c_int64),
        ("edits", c_int64),
        ("words", c_int64),
        ("logits", c_void_p),
        ("edit_ids", c_void_p),
        ("edit_penalty", c_void_p),
        ("edit_bias", c_void_p),
        ("allowed", c_void_p),
        *((name, c_void_p) for name in COLUMNS),
        ("rule", c_void_p),
        ("rule_values", c_void_p),
    )


class OutputsStruct(Structure):
    """The C structure topw_outputs."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports")
    )


def address(array: NDArray[Any] | None) -> int | None:
    """The address of the array's data; None for None."""
    return None if array is None else array.ctypes.data


STAGES = ("invalid", "greedy", "candidates", "pool", "geometry", "literal")

REPORT = np.dtype(
    [
        ("stage", np.int32),
        ("candidates", np.int32),
        ("steps", np.int32),
        ("reserved", np.int32),
        ("distances", np.int64),
        ("distances_avoided", np.int64),
    ]
)
"""topw_report, the work a row took.

stage: the last stage reached (an index of STAGES).
candidates: tokens visited after the pass over the logits.
steps: alternations.
distances, distances_avoided: token pairs of the literal rule whose distance was and was not computed.
"""

Edits = tuple[ArrayLike, ArrayLike, ArrayLike]
"""(ids, penalty, bias), each [B, N]."""
Rules = tuple[ArrayLike, ArrayLike]
"""(codes, values) of the sampling rules: one code or [B], and (v0, v1), [2] or [B, 2]."""
RuleArrays = tuple[NDArray[np.int32], NDArray[np.float32]]
"""`Rules` as int32 [B] and float32 [B, 2]."""


@dataclass(frozen=True)
class KernelBlocks:
    """Block quantisation, as in onnxruntime's GatherBlockQuantized.

    bits: 4 or 8.
    scales: [V, blocks] float32 or float16, one per `block_size` coordinates.
    zero_points: packed in uint8; None for the default zero point.
    element: type of codes and zero points: uint8, uint4 or int4.
    """

    bits: int
    block_size: int
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None = None
    element: str = "uint8"


@dataclass(frozen=True)
class KernelTable:
    """The input embeddings and their statistics; all C-contiguous.

    rows: [V, d] float32, float16 or uint16 (bits of bfloat16); with `blocks` uint8 [V, d * bits / 8].
    mean, inverse_std: float32 [d].
    neighbour_bound: float32 [vocab], lower bounds of distances to the nearest neighbour, or None.
    """

    rows: NDArray[Any]
    mean: NDArray[np.float32]
    inverse_std: NDArray[np.float32]
    neighbour_bound: NDArray[np.float32] | None = None
    blocks: KernelBlocks | None = None

    @classmethod
    def from_geometry(cls, geometry: Geometry, neighbour_bound: ArrayLike | None = None) -> KernelTable | None:
        """A geometry's table, with statistics rounded to float32 as in a graph; None for the uniform metric."""
        if geometry.table is None or geometry.mean is None or geometry.inverse_std is None:
            return None
        bound = None if neighbour_bound is None else np.ascontiguousarray(neighbour_bound, dtype=np.float32)
        rows = np.ascontiguousarray(geometry.table)
        return cls(rows, geometry.mean.astype(np.float32), geometry.inverse_std.astype(np.float32), bound)

    @property
    def hidden(self) -> int:
        """The number of coordinates of a row."""
        return int(self.rows.shape[1]) * (8 // self.blocks.bits if self.blocks is not None else 1)

    @property
    def dtype(self) -> str:
        if self.blocks is not None:
            return self.blocks.element
        return "bfloat16" if self.rows.dtype == np.uint16 else str(self.rows.dtype)


def table_struct(table: KernelTable | None) -> TableStruct | None:
    """The C structure of `table`, which points into its arrays; None for None."""
    if table is None:
        return None
    blocks, blocks_struct = table.blocks, BlocksStruct()
    if blocks is not None:
        blocks_struct = BlocksStruct(
            blocks.bits, blocks.block_size, TABLE_TYPES[str(blocks.scales.dtype)], 0,
            address(blocks.scales), address(blocks.zero_points),
        )  # fmt: skip
    return TableStruct(
        table.rows.ctypes.data, len(table.rows), table.hidden, TABLE_TYPES[table.dtype], 0,
        *map(address, (table.mean, table.inverse_std, table.neighbour_bound)), blocks_struct,
    )  # fmt: skip


@dataclass(frozen=True)
class KernelSamples:
    """The outputs of docs/contract/graph.md, [B] each, except keep_mask [B, V]; reports have the dtype REPORT."""

    next_token: NDArray[np.int64]
    logprob: NDArray[np.float32]
    kept: NDArray[np.int32]
    certified: NDArray[np.bool_]
    mass: NDArray[np.float32] | None
    keep_mask: NDArray[np.bool_] | None
    reports: NDArray[np.void]

    @classmethod
    def empty(cls, batch: int, vocab: int, mass: bool, keep_mask: bool) -> KernelSamples:
        return cls(
            np.empty(batch, np.int64),
            np.empty(batch, np.float32),
            np.empty(batch, np.int32),
            np.empty(batch, np.bool_),
            np.empty(batch, np.float32) if mass else None,
            np.empty((batch, vocab), np.bool_) if keep_mask else None,
            np.empty(batch, REPORT),
        )

    def struct(self) -> OutputsStruct:
        return OutputsStruct(*(address(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class CallInputs:
    """The inputs of a call as C-contiguous arrays with a row for each row of `logits`.

    changes: edits (ids, penalty, bias), [B, N] each, and the mask int32 [B, words]; N and words are 0 for None.
    """

    logits: NDArray[Any]
    columns: dict[str, NDArray[np.float32]]
    changes: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]
    rules: RuleArrays | None

    @classmethod
    def of(
        cls, logits: NDArray[Any], columns: Mapping[str, ArrayLike] | None = None, edits: Edits | None = None,
        allowed: ArrayLike | None = None, rules: Rules | None = None,
    ) -> CallInputs:  # fmt: skip
        """columns: parameters and `uniform` by name, a number or [B] each; missing ones get defaults (`uniform`: 0)."""
        batch = len(logits)
        none = np.zeros((batch, 0))
        ids, penalty, bias = (none, none, none) if edits is None else edits
        defaults = {name: getattr(TopWParameters(), name) for name in PARAMETER_NAMES} | {"uniform": 0.0}
        with np.errstate(over="ignore"):
            named = {
                name: np.ascontiguousarray(np.broadcast_to(np.asarray(value).astype(np.float32), (batch,)))
                for name, value in (defaults | dict(columns or {})).items()
            }
        changes = (
            np.ascontiguousarray(ids, np.int64),
            np.ascontiguousarray(penalty, np.float32),
            np.ascontiguousarray(bias, np.float32),
            np.ascontiguousarray(none if allowed is None else allowed, np.int32),
        )
        return cls(logits, named, changes, _rule_arrays(rules, batch))

    def struct(self) -> InputsStruct:
        return InputsStruct(
            *self.logits.shape, self.changes[0].shape[1], self.changes[3].shape[1],
            *map(address, (self.logits, *self.changes)), *(address(self.columns[name]) for name in COLUMNS),
            *map(address, self.rules or (None, None)),
        )  # fmt: skip


def _rule_arrays(given: Rules | None, batch: int) -> RuleArrays | None:
    """A code beyond int32 becomes -1, which is no rule."""
    if given is None:
        return None
    with np.errstate(over="ignore"):
        codes, values = np.asarray(given[0]), np.asarray(given[1]).astype(np.float32)
    known = np.where((codes >= 0) & (codes <= np.iinfo(np.int32).max), codes, -1).astype(np.int32)
    return (
        np.ascontiguousarray(np.broadcast_to(known, (batch,))),
        np.ascontiguousarray(np.broadcast_to(values, (batch, 2))),
    )


class Kernel:
    """The library at `path`."""

    def __init__(self, path: str | Path) -> None:
        library = self._library = ctypes.CDLL(str(path))
        library.topw_workspace_create.restype = c_void_p
        library.topw_workspace_destroy.argtypes = (c_void_p,)
        library.topw_workspace_destroy.restype = None
        inputs = (POINTER(OptionsStruct), POINTER(TableStruct), POINTER(InputsStruct))
        library.topw_sample_row.argtypes = (*inputs, c_int64, c_void_p, POINTER(OutputsStruct))
        library.topw_instruction_set.restype = c_char_p
        library.topw_use_instruction_set.argtypes = (c_char_p,)

    @property
    def instruction_set(self) -> str:
        """The instruction set in use in this process: avx512, avx2, neon or generic."""
        return str(self._library.topw_instruction_set().decode())

    def use_instruction_set(self, name: str) -> bool:
        """Switch this process to another instruction set. Returns whether it is available."""
        return bool(self._library.topw_use_instruction_set(name.encode()) == 0)

    def sample(self, *arguments: Any, **named: Any) -> KernelSamples:
        """Sample every row in this thread. The arguments are those of `prepare`."""
        call = self.prepare(*arguments, **named)
        call()
        return call.samples

    def prepare(
        self, logits: ArrayLike, columns: Mapping[str, ArrayLike] | None = None, options: TopWOptions | None = None,
        table: KernelTable | None = None, edits: Edits | None = None, *, allowed: ArrayLike | None = None,
        rules: Rules | None = None, mass: bool = False, keep_mask: bool = False,
    ) -> KernelCall:  # fmt: skip
        """Prepare a call on logits [B, V], for repeated use.

        columns, edits, allowed, rules: see `CallInputs.of`. table: None for the uniform metric.
        mass, keep_mask: whether to compute these outputs.
        """
        inputs = CallInputs.of(np.ascontiguousarray(logits, np.float32), columns, edits, allowed, rules)
        samples = KernelSamples.empty(len(inputs.logits), inputs.logits.shape[1], mass, keep_mask)
        return KernelCall(self._library, inputs, options or TopWOptions(), table, samples)


class KernelCall:
    """A call of the sampler with bound arguments, which fills `samples`. One thread at a time may call it."""

    def __init__(
        self, library: ctypes.CDLL, inputs: CallInputs, options: TopWOptions, table: KernelTable | None,
        samples: KernelSamples,
    ) -> None:  # fmt: skip
        self.samples = samples
        self._library, self._batch = library, range(len(inputs.logits))
        self._kept_alive = (inputs, table)  # the structures point into them
        described, self._outputs = table_struct(table), samples.struct()
        self._workspace = library.topw_workspace_create()
        self._structures = (
            byref(OptionsStruct.of(options)), None if described is None else byref(described), byref(inputs.struct())
        )  # fmt: skip

    def __call__(self) -> None:
        for row in self._batch:
            if self._library.topw_sample_row(*self._structures, row, self._workspace, byref(self._outputs)):
                raise MemoryError("the sampler ran out of memory")

    def __del__(self) -> None:
        self._library.topw_workspace_destroy(self._workspace)
