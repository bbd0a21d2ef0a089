"""The embedding table as the kernels read it, float or quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.plugins.structs import FLOATS, TABLE_TYPES, BlocksStruct, TableStruct, address
from topw_deploy.sampling.geometry import Geometry


@dataclass(frozen=True)
class KernelBlocks:
    """Block quantisation, as in onnxruntime's GatherBlockQuantized.

    bits: 4 or 8.
    scales: [V, blocks] float32 or float16, one per `block_size` coordinates.
    zero_points: packed in uint8 [V, ceil(blocks * bits / 8)], or [ceil(V * blocks / 2)] for uint4 and int4; None for
        the default zero point.
    element: type of codes and zero points: uint8, uint4 or int4.

    Raises ParameterError for other types and block sizes.
    """

    bits: int
    block_size: int
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None = None
    element: str = "uint8"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.element not in ("uint8", "uint4", "int4"):
            raise ParameterError(
                f"blocks have {self.bits} bits in {self.element}, but must have 4 or 8 bits in uint8, uint4 or int4."
            )
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ParameterError(f"block_size is {self.block_size}, but must be a power of two, at least 16.")
        if self.scales.dtype not in (np.float32, np.float16) or not self.scales.flags.c_contiguous:
            raise ParameterError(f"scales are {self.scales.dtype}, but must be float32 or float16, C-contiguous.")
        zeros = self.zero_points
        if zeros is not None and (zeros.dtype != np.uint8 or not zeros.flags.c_contiguous):
            raise ParameterError(f"zero points are {zeros.dtype}, but must be packed in uint8, C-contiguous.")

    def check(self, rows: NDArray[Any], hidden: int) -> None:
        """Raises ParameterError unless the blocks fit the codes `rows` of a table [V, hidden]."""
        blocks = -(-hidden // self.block_size)
        if self.scales.shape != (len(rows), blocks):
            raise ParameterError(f"scales have shape {self.scales.shape}, but must be [{len(rows)}, {blocks}].")
        packed = -(-len(rows) * blocks // 2) if self.element != "uint8" else len(rows) * -(-blocks * self.bits // 8)
        if self.zero_points is not None and self.zero_points.size != packed:
            raise ParameterError(f"zero points have {self.zero_points.size} bytes, but must have {packed}.")


@dataclass(frozen=True)
class KernelTable:
    """The input embeddings and their statistics.

    rows: [V, d] float32, float16 or uint16 (bits of bfloat16), C-contiguous; with `blocks` uint8 [V, d * bits / 8].
    mean, inverse_std: float32 [d], see `sampling.embedding_statistics`.
    neighbour_bound: float32 [vocab], lower bounds of distances to the nearest neighbour, or None.

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
        if self.blocks is None and self.dtype not in FLOATS:
            raise ParameterError(f"the table is {self.rows.dtype}, but must be float32, float16 or bfloat16 (uint16).")
        if self.blocks is not None:
            self.blocks.check(self.rows, self.hidden)
        for name in ("mean", "inverse_std"):
            given = getattr(self, name)
            if given.shape != (self.hidden,) or given.dtype != np.float32:
                raise ParameterError(f"{name} is {given.dtype} {given.shape}, but must be float32 [{self.hidden}].")

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
        packed = 8 // self.blocks.bits if self.blocks is not None else 1
        return int(self.rows.shape[1]) * packed

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
