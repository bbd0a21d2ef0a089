"""The native sampler from Python: native/topw.h with numpy arrays.

For tests, benchmarks and sampling without onnxruntime, which calls the same code as a graph operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.plugins.kernel_table import KernelBlocks, KernelTable, table_struct
from topw_deploy.plugins.shared_library import ABI_VERSION, variable_selecting
from topw_deploy.plugins.structs import (
    COLUMNS,
    REPORT,
    InputsStruct,
    OptionsStruct,
    OutputsStruct,
    TableStruct,
    address,
)
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWOptions, TopWParameters, canonical_names
from topw_deploy.sampling.row import mask_words

__all__ = ["COLUMNS", "REPORT", "STAGES", "Kernel", "KernelBlocks", "KernelCall", "KernelSamples", "KernelTable"]

STAGES = ("invalid", "greedy", "candidates", "pool", "geometry", "literal")

Edits = tuple[ArrayLike, ArrayLike, ArrayLike]
"""(ids, penalty, bias), each [B, N]."""
EditsAndMask = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]
"""(ids, penalty, bias, allowed): the edits, [B, N] each, and the mask [B, words]."""
Rules = tuple[ArrayLike, ArrayLike]
"""(codes, values) of the sampling rules: one code or [B], and (v0, v1), [2] or [B, 2]."""
RuleArrays = tuple[NDArray[np.int32], NDArray[np.float32]]
"""`Rules` as int32 [B] and float32 [B, 2]."""


@dataclass(frozen=True)
class KernelSamples:
    """The outputs of docs/contract/graph.md, [B] each, except keep_mask [B, V].

    mass, keep_mask: None if they were not requested.
    reports: the work for each row, dtype REPORT.
    """

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


class Kernel:
    """The library at `path`. Raises ProviderError if it does not load or has another interface version."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise ProviderError(f"{path} cannot be loaded as the native sampler ({error}); {_remedy(path)}.") from error
        version = self._library.topw_abi_version()
        if version != ABI_VERSION:
            raise ProviderError(
                f"{path} has interface version {version}, but {ABI_VERSION} is needed; {_remedy(path)}."
            )

    def _declare(self) -> None:
        library = self._library
        library.topw_workspace_create.restype = c_void_p
        library.topw_workspace_destroy.argtypes = (c_void_p,)
        library.topw_workspace_destroy.restype = None
        inputs = (POINTER(OptionsStruct), POINTER(TableStruct), POINTER(InputsStruct))
        library.topw_sample.argtypes = (*inputs, POINTER(OutputsStruct))
        library.topw_sample_row.argtypes = (*inputs, c_int64, c_void_p, POINTER(OutputsStruct))
        library.topw_instruction_set.restype = c_char_p
        library.topw_use_instruction_set.argtypes = (c_char_p,)
        _ = library.topw_abi_version

    @property
    def instruction_set(self) -> str:
        """The instruction set in use in this process: avx512, avx2, neon or generic."""
        return str(self._library.topw_instruction_set().decode())

    def use_instruction_set(self, name: str) -> None:
        """Switch this process to another instruction set. Raises ParameterError if it is not available."""
        if self._library.topw_use_instruction_set(name.encode()) != 0:
            raise ParameterError(
                f"instruction set {name!r} is not available here; use {self.instruction_set!r} or 'generic'."
            )

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
        """Sample every row of `logits` [B, V] in this thread.

        columns: parameters and `uniform` by name, a number or [B] each; missing ones get defaults (`uniform`: 0).
        table: None for the uniform metric.
        allowed: int32 [B, ceil(V / 32)], a bit per token, the lowest first; None or [B, 0] allows every token.
        rules: the rows' rules and their values; None for Top-W. A row with an unknown code or with a value out of its
            interval is invalid.
        mass, keep_mask: whether to compute these outputs.

        For invalid rows see docs/contract/graph.md, section 7. Raises ParameterError for a wrong name, type or shape,
        and MemoryError.
        """
        call = self.prepare(
            logits, columns, options, table, edits, allowed=allowed, rules=rules, mass=mass, keep_mask=keep_mask
        )
        call()
        return call.samples

    def prepare(
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
    ) -> KernelCall:
        """Prepare a call with the arguments of `sample`, for repeated use."""
        rows = np.ascontiguousarray(logits, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] == 0:
            raise ParameterError(f"logits have shape {rows.shape}, but must be [B, V], V >= 1.")
        options = TopWOptions() if options is None else options
        check_table(options, table, rows.shape[1])
        columns_given = parameter_columns(columns or {}, len(rows))
        return KernelCall(
            self._library, rows, columns_given, options, table,
            (*edit_arrays(edits, len(rows)), mask_array(allowed, *rows.shape)), rule_arrays(rules, len(rows)),
            KernelSamples.empty(len(rows), rows.shape[1], mass, keep_mask),
        )  # fmt: skip


class KernelCall:
    """A call of the sampler with bound arguments.

    Calling the object fills `samples`. It owns its workspace, so only one thread at a time may call it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        logits: NDArray[np.float32],
        columns: dict[str, NDArray[np.float32]],
        options: TopWOptions,
        table: KernelTable | None,
        changes: EditsAndMask,
        rules: RuleArrays | None,
        samples: KernelSamples,
    ) -> None:
        self.samples = samples
        self._library = library
        self._referenced = (logits, columns, table, changes, rules)  # keeps alive what the structures below point into
        self._batch = range(len(logits))
        self._options = OptionsStruct.of(options)
        self._table = table_struct(table)
        self._inputs = inputs_struct(logits, columns, changes, rules)
        self._outputs = samples.struct()
        self._workspace = library.topw_workspace_create()
        if not self._workspace:
            raise MemoryError("there is no memory for the sampler's workspace")
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


def _remedy(path: str | Path) -> str:
    named = variable_selecting(Path(path))
    return f"{named} selects it: unset it, or give a library of this version" if named else "build it again"


def inputs_struct(
    logits: NDArray[Any],
    columns: Mapping[str, NDArray[np.float32]],
    changes: EditsAndMask,
    rules: RuleArrays | None = None,
) -> InputsStruct:
    edits, words = changes[0].shape[1], changes[3].shape[1]
    return InputsStruct(
        *logits.shape, edits, words, *map(address, (logits, *changes)), *(address(columns[n]) for n in COLUMNS),
        *map(address, rules or (None, None)),
    )  # fmt: skip


def check_table(options: TopWOptions, table: KernelTable | None, vocab: int) -> None:
    """Raises ParameterError unless `table` fits the metric and `vocab`."""
    if options.metric == "uniform":
        return
    if table is None:
        raise ParameterError(f"the metric {options.metric} needs a table, but none was given; pass KernelTable(...).")
    if len(table.rows) < vocab:
        raise ParameterError(f"the table has {len(table.rows)} rows, but needs one for each of the {vocab} tokens.")
    bound = table.neighbour_bound
    if bound is not None and (bound.ndim != 1 or len(bound) < vocab or bound.dtype != np.float32):
        raise ParameterError(f"neighbour_bound is {bound.dtype} {bound.shape}, but must be float32 [{vocab}].")


def parameter_columns(given: Mapping[str, ArrayLike], batch: int) -> dict[str, NDArray[np.float32]]:
    """Every one of COLUMNS as float32 [batch], with defaults for missing names.

    Raises ParameterError for an unknown name and a value that is neither a number nor numbers [batch].
    """
    chosen = canonical_names(given, (*PARAMETER_NAMES, "uniform"))
    values = {name: getattr(TopWParameters(), name) for name in PARAMETER_NAMES} | {"uniform": 0.0} | chosen
    result = {}
    for name, value in values.items():
        given_values = np.asarray(value)
        if given_values.dtype.kind not in "fiu":
            raise ParameterError(f"{name} is {value!r:.60}, but must be one number or numbers [{batch}].", name)
        with np.errstate(over="ignore"):
            column = given_values.astype(np.float32)
        if column.shape not in ((), (batch,)):
            raise ParameterError(f"{name} has shape {column.shape}, but must be one number or [{batch}].")
        result[name] = np.ascontiguousarray(np.broadcast_to(column, (batch,)))
    return result


def edit_arrays(given: Edits | None, batch: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """The edits as C-contiguous arrays [batch, N]; N is 0 for None. Raises ParameterError for another shape."""
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


def mask_array(given: ArrayLike | None, batch: int, vocab: int) -> NDArray[np.int32]:
    """The mask as C-contiguous int32 [batch, words]; words is 0 for None. Raises ParameterError for another one."""
    mask = np.ascontiguousarray(np.zeros((batch, 0), np.int32) if given is None else given)
    words = mask_words(vocab)
    if mask.dtype != np.int32 or mask.shape not in ((batch, 0), (batch, words)):
        raise ParameterError(
            f"allowed is {mask.dtype} {list(mask.shape)}, but must be int32 [{batch}, {words}], or [{batch}, 0] to "
            "allow every token."
        )
    return mask


def rule_arrays(given: Rules | None, batch: int) -> RuleArrays | None:
    """The rules as C-contiguous int32 [batch] and float32 [batch, 2]; None for None.

    A code beyond int32 becomes -1, which is no rule. Raises ParameterError for another type or shape.
    """
    if given is None:
        return None
    with np.errstate(over="ignore"):
        codes, values = np.asarray(given[0]), np.asarray(given[1]).astype(np.float32)
    if codes.dtype.kind not in "iu" or codes.shape not in ((), (batch,)) or values.shape not in ((2,), (batch, 2)):
        raise ParameterError(
            f"rules are {codes.dtype} {list(codes.shape)} with values {list(values.shape)}, but must be integers, one "
            f"or [{batch}], with values [2] or [{batch}, 2]."
        )
    known = np.where((codes >= 0) & (codes <= np.iinfo(np.int32).max), codes, -1).astype(np.int32)
    return np.ascontiguousarray(np.broadcast_to(known, (batch,))), np.ascontiguousarray(
        np.broadcast_to(values, (batch, 2))
    )
