"""The ctypes structures of native/topw.h, shared with the CUDA library."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

from numpy.typing import NDArray

from topw_deploy import dtypes
from topw_deploy.sampling.parameters import METRICS, TopWOptions

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
