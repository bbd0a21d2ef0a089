"""The native sampler from Python: the C interface of native/topw.h with numpy arrays in and out.

For tests, benchmarks and whoever samples logits without onnxruntime. The model's own runtime calls the same code as an
operator of its graph. Needs nothing but numpy and the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.plugins.shared_library import ABI_VERSION, variable_naming
from topw_deploy.sampling.geometry import Geometry
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, TopWOptions, TopWParameters, canonical_names

COLUMNS = ("temperature", "selection_temperature", "lam", "beta", "init_top_p", "geom_scale", "uniform")
STAGES = ("invalid", "greedy", "candidates", "pool", "geometry", "literal")
TABLE_TYPES = {"float32": 1, "uint8": 2, "float16": 10, "bfloat16": 16, "uint4": 21, "int4": 22}
"""Names of element types -> ONNX TensorProto.DataType."""


class _Options(Structure):
    _fields_ = (("top_m", c_int64), ("alt_iters", c_int64), ("metric", c_int32), ("knn_k", c_int32))


class _Blocks(Structure):
    _fields_ = (
        ("bits", c_int32),
        ("block_size", c_int32),
        ("scale_type", c_int32),
        ("reserved", c_int32),
        ("scales", c_void_p),
        ("zero_points", c_void_p),
    )


class _Table(Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("tokens", c_int64),
        ("hidden", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("mean", c_void_p),
        ("inverse_std", c_void_p),
        ("neighbour_bound", c_void_p),
        ("blocks", _Blocks),
    )


class _Inputs(Structure):
    _fields_ = (
        ("batch", c_int64),
        ("vocab", c_int64),
        ("edits", c_int64),
        ("logits", c_void_p),
        ("edit_ids", c_void_p),
        ("edit_penalty", c_void_p),
        ("edit_bias", c_void_p),
        *((name, c_void_p) for name in COLUMNS),
    )


class _Outputs(Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports")
    )


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
"""How a row was answered: the last stage it needed (an index of STAGES), tokens looked at beyond the pass over the
logits, alternations, and pairs of tokens whose distance was computed or, though the literal rule asks for it, not."""


@dataclass(frozen=True)
class KernelBlocks:
    """How a table of codes is quantised: what onnxruntime's GatherBlockQuantized calls by the same names.

    bits: 4 or 8. block_size: coordinates that share a scale. scales: [V, blocks] float32 or float16.
    zero_points: packed as the codes are, uint8 [V, ceil(blocks * bits / 8)]; for `uint4` and `int4`, which pack without
    gaps, [ceil(V * blocks / 2)]; None for none. element: type of codes and zero points, uint8, uint4 or int4.
    Raises ParameterError for other types.
    """

    bits: int
    block_size: int
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None = None
    element: str = "uint8"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.element not in ("uint8", "uint4", "int4"):
            raise ParameterError(f"blocks are of {self.bits} bits in {self.element}; 4 or 8 in uint8, uint4, int4 are.")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ParameterError(f"block_size is {self.block_size}, but must be a power of two, at least 16.")
        if self.scales.dtype not in (np.float32, np.float16) or not self.scales.flags.c_contiguous:
            raise ParameterError(f"scales are {self.scales.dtype}, but must be float32 or float16, C-contiguous.")
        zeros = self.zero_points
        if zeros is not None and (zeros.dtype != np.uint8 or not zeros.flags.c_contiguous):
            raise ParameterError(f"zero points are {zeros.dtype}, but must be packed in uint8, C-contiguous.")

    def check(self, rows: NDArray[Any], hidden: int) -> None:
        """Raises ParameterError unless these blocks fit codes `rows` of a table [V, hidden]."""
        blocks = -(-hidden // self.block_size)
        if self.scales.shape != (len(rows), blocks):
            raise ParameterError(f"scales have shape {self.scales.shape}, but must be [{len(rows)}, {blocks}].")
        packed = -(-len(rows) * blocks // 2) if self.element != "uint8" else len(rows) * -(-blocks * self.bits // 8)
        if self.zero_points is not None and self.zero_points.size != packed:
            raise ParameterError(f"there are {self.zero_points.size} bytes of zero points, but must be {packed}.")


@dataclass(frozen=True)
class KernelTable:
    """The input embeddings as the kernel reads them, and their statistics.

    rows: [V, d] float32 or float16, or the bits of bfloat16 as uint16, C-contiguous (a memory map will do). With
    `blocks` the codes, uint8 [V, d * bits / 8].
    mean, inverse_std: float32 [d], of the metric (`sampling.embedding_statistics`). neighbour_bound: float32 [vocab],
    lower bounds of each token's distance to its nearest other, or None.
    Raises ParameterError for other types and shapes.
    """

    rows: NDArray[Any]
    mean: NDArray[np.float32]
    inverse_std: NDArray[np.float32]
    neighbour_bound: NDArray[np.float32] | None = None
    blocks: KernelBlocks | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or 0 in self.rows.shape or not self.rows.flags.c_contiguous:
            raise ParameterError(f"the table has shape {self.rows.shape}, but must be [V, d], both >= 1, C-contiguous.")
        if self.blocks is not None and self.rows.dtype != np.uint8:
            raise ParameterError(f"the table's codes are {self.rows.dtype}, but must be uint8.")
        if self.blocks is None and self.dtype not in ("float32", "float16", "bfloat16"):
            raise ParameterError(f"the table is {self.rows.dtype}, but must be float32, float16 or bfloat16 (uint16).")
        if self.blocks is not None:
            self.blocks.check(self.rows, self.hidden)
        for name in ("mean", "inverse_std"):
            given = getattr(self, name)
            if given.shape != (self.hidden,) or given.dtype != np.float32:
                raise ParameterError(f"{name} is {given.dtype} {given.shape}, but must be float32 [{self.hidden}].")

    @classmethod
    def from_geometry(cls, geometry: Geometry, neighbour_bound: ArrayLike | None = None) -> KernelTable | None:
        """The table of a geometry with its statistics rounded to float32, as a graph carries them; None if uniform."""
        if geometry.table is None or geometry.mean is None or geometry.inverse_std is None:
            return None
        bound = None if neighbour_bound is None else np.ascontiguousarray(neighbour_bound, dtype=np.float32)
        rows = np.ascontiguousarray(geometry.table)
        return cls(rows, geometry.mean.astype(np.float32), geometry.inverse_std.astype(np.float32), bound)

    @property
    def hidden(self) -> int:
        """Coordinates of a row."""
        packed = 8 // self.blocks.bits if self.blocks is not None else 1
        return int(self.rows.shape[1]) * packed

    @property
    def dtype(self) -> str:
        if self.blocks is not None:
            return self.blocks.element
        return "bfloat16" if self.rows.dtype == np.uint16 else str(self.rows.dtype)


@dataclass(frozen=True)
class KernelSamples:
    """What topw_sample answers, as docs/contract/graph.md names it: [B] each, keep_mask [B, V]. mass and keep_mask are
    None unless asked for; reports is a structured array of REPORT."""

    next_token: NDArray[np.int64]
    logprob: NDArray[np.float32]
    kept: NDArray[np.int32]
    certified: NDArray[np.bool_]
    mass: NDArray[np.float32] | None
    keep_mask: NDArray[np.bool_] | None
    reports: NDArray[np.void]

    @classmethod
    def empty(cls, batch: int, vocab: int, mass: bool, keep_mask: bool) -> KernelSamples:
        """Room for the answers to `batch` rows."""
        return cls(
            np.empty(batch, np.int64),
            np.empty(batch, np.float32),
            np.empty(batch, np.int32),
            np.empty(batch, np.bool_),
            np.empty(batch, np.float32) if mass else None,
            np.empty((batch, vocab), np.bool_) if keep_mask else None,
            np.empty(batch, REPORT),
        )


class Kernel:
    """The library at `path`, opened. Raises ProviderError if it does not open or speaks another version."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise ProviderError(f"{path} is not a native sampler that opens here ({error}); {_cure(path)}.") from error
        version = self._library.topw_abi_version()
        if version != ABI_VERSION:
            raise ProviderError(f"{path} has interface version {version}, but {ABI_VERSION} is needed; {_cure(path)}.")

    def _declare(self) -> None:
        library = self._library
        library.topw_workspace_create.restype = c_void_p
        library.topw_workspace_destroy.argtypes = (c_void_p,)
        library.topw_workspace_destroy.restype = None
        inputs = (POINTER(_Options), POINTER(_Table), POINTER(_Inputs))
        library.topw_sample.argtypes = (*inputs, POINTER(_Outputs))
        library.topw_sample_row.argtypes = (*inputs, c_int64, c_void_p, POINTER(_Outputs))
        library.topw_instruction_set.restype = c_char_p
        library.topw_use_instruction_set.argtypes = (c_char_p,)
        _ = library.topw_abi_version

    @property
    def instruction_set(self) -> str:
        """The one in use, for the whole process: avx512, avx2, neon or generic."""
        return str(self._library.topw_instruction_set().decode())

    def use_instruction_set(self, name: str) -> None:
        """Switch to another one. Raises ParameterError if this processor or this build has no such set."""
        if self._library.topw_use_instruction_set(name.encode()) != 0:
            raise ParameterError(
                f"instruction set {name!r} is not available here; {self.instruction_set!r} is, and so is 'generic'."
            )

    def sample(
        self,
        logits: ArrayLike,
        columns: Mapping[str, ArrayLike] | None = None,
        options: TopWOptions | None = None,
        table: KernelTable | None = None,
        edits: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
        *,
        mass: bool = False,
        keep_mask: bool = False,
    ) -> KernelSamples:
        """Every row of `logits` [B, V], in this thread.

        columns: parameters by name and `uniform`, a number for all rows or [B] each; defaults where absent, uniform 0.
        table: None for the uniform metric. edits: (ids, penalty, bias), each [B, N]. mass, keep_mask: answer these too.
        Rows that are invalid are answered as docs/contract/graph.md, section 7, says. Raises ParameterError for shapes
        that do not fit, unknown names and a missing table, MemoryError where the library runs out of memory.
        """
        call = self.prepare(logits, columns, options, table, edits, mass=mass, keep_mask=keep_mask)
        call()
        return call.samples

    def prepare(
        self,
        logits: ArrayLike,
        columns: Mapping[str, ArrayLike] | None = None,
        options: TopWOptions | None = None,
        table: KernelTable | None = None,
        edits: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
        *,
        mass: bool = False,
        keep_mask: bool = False,
    ) -> KernelCall:
        """The call that `sample` makes, to be made as often as one likes: see KernelCall."""
        rows = np.ascontiguousarray(logits, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] == 0:
            raise ParameterError(f"logits have shape {rows.shape}, but must be [B, V], V >= 1.")
        options = TopWOptions() if options is None else options
        _require_table(options, table, rows.shape[1])
        columns_given = _columns(columns or {}, len(rows))
        return KernelCall(
            self._library, rows, columns_given, options, table, _edits(edits, len(rows)),
            KernelSamples.empty(len(rows), rows.shape[1], mass, keep_mask),
        )  # fmt: skip


class KernelCall:
    """One call of the library with everything bound: calling it costs what the C function costs, and fills `samples`.

    It keeps a workspace of its own, so calls of different objects may run in different threads.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        logits: NDArray[np.float32],
        columns: dict[str, NDArray[np.float32]],
        options: TopWOptions,
        table: KernelTable | None,
        edits: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
        samples: KernelSamples,
    ) -> None:
        self.samples = samples
        self._library = library
        self._borrowed = (logits, columns, table, edits)  # the structures below point into them
        batch, vocab = logits.shape
        self._batch = range(batch)
        self._options = _Options(
            options.top_m, options.alt_iters, METRICS.index(options.metric), min(options.neighbours, 2**31 - 1)
        )
        self._table = _table(table)
        self._inputs = _Inputs(
            batch, vocab, edits[0].shape[1], *map(_address, (logits, *edits)), *(_address(columns[n]) for n in COLUMNS)
        )
        self._outputs = _Outputs(*(_address(getattr(samples, f.name)) for f in fields(samples)))
        self._workspace = library.topw_workspace_create()
        if not self._workspace:
            raise MemoryError("no memory for the sampler's workspace")
        self._arguments = (byref(self._options), byref(self._table) if self._table is not None else None)

    def __call__(self) -> None:
        for row in self._batch:
            if self._library.topw_sample_row(
                *self._arguments, byref(self._inputs), row, self._workspace, byref(self._outputs)
            ):
                raise MemoryError("the sampler ran out of memory")

    def __del__(self) -> None:
        if getattr(self, "_workspace", None):
            self._library.topw_workspace_destroy(self._workspace)


def _cure(path: str | Path) -> str:
    named = variable_naming(Path(path))
    return f"{named} names it: unset that, or name a library of this topw_deploy" if named else "build it again"


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _require_table(options: TopWOptions, table: KernelTable | None, vocab: int) -> None:
    if options.metric == "uniform":
        return
    if table is None:
        raise ParameterError(f"the metric {options.metric} needs a table, but none was given; pass KernelTable(...).")
    if len(table.rows) < vocab:
        raise ParameterError(f"the table has {len(table.rows)} rows, but needs one for each of the {vocab} tokens.")
    bound = table.neighbour_bound
    if bound is not None and (bound.shape[0] < vocab or bound.dtype != np.float32 or bound.ndim != 1):
        raise ParameterError(f"neighbour_bound is {bound.dtype} {bound.shape}, but must be float32 [{vocab}].")


def _columns(given: Mapping[str, ArrayLike], batch: int) -> dict[str, NDArray[np.float32]]:
    chosen = canonical_names(given, (*PARAMETER_NAMES, "uniform"))
    values = {name: getattr(TopWParameters(), name) for name in PARAMETER_NAMES} | {"uniform": 0.0} | chosen
    result = {}
    for name, value in values.items():
        with np.errstate(over="ignore"):
            column = np.asarray(value).astype(np.float32)
        if column.shape not in ((), (batch,)):
            raise ParameterError(f"{name} has shape {column.shape}, but must be one number or [{batch}].")
        result[name] = np.ascontiguousarray(np.broadcast_to(column, (batch,)))
    return result


def _edits(
    given: tuple[ArrayLike, ArrayLike, ArrayLike] | None, batch: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    none = np.zeros((batch, 0))
    ids, penalty, bias = (none, none, none) if given is None else given
    arrays = (
        np.ascontiguousarray(ids, dtype=np.int64),
        np.ascontiguousarray(penalty, dtype=np.float32),
        np.ascontiguousarray(bias, dtype=np.float32),
    )
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or arrays[0].ndim != 2 or len(arrays[0]) != batch:
        raise ParameterError(f"edits have shapes {[a.shape for a in arrays]}, but must be [{batch}, N] each.")
    return arrays


def _table(table: KernelTable | None) -> _Table | None:
    if table is None:
        return None
    blocks, described = table.blocks, _Blocks()
    if blocks is not None:
        described = _Blocks(
            blocks.bits, blocks.block_size, TABLE_TYPES[str(blocks.scales.dtype)], 0,
            _address(blocks.scales), _address(blocks.zero_points),
        )  # fmt: skip
    return _Table(
        table.rows.ctypes.data, len(table.rows), table.hidden, TABLE_TYPES[table.dtype], 0,
        *map(_address, (table.mean, table.inverse_std, table.neighbour_bound)), described,
    )  # fmt: skip
