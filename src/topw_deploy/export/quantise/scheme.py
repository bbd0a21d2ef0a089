"""The parameters of a quantised export."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from topw_deploy.errors import ParameterError

DTYPE_BITS = {"int4": 4, "int8": 8}
"""Value of --dtype -> bits of a weight."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
_TABLE_BITS = 8
_SMALLEST_BLOCK = BLOCK_SIZES[0]


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How weights are rounded: in blocks along the inputs of each output, with one scale per block.

    bits: 4 or 8.
    block_size: weights per scale.
    table_bits: bits of the token table and head, `bits` or 8; None for 8.
    symmetric: whether all zero points are 2 ** (bits - 1).
    accuracy_level: MatMulNBits' least precise activation type: 0 unset, 1 float32, 2 float16, 3 bfloat16, 4 int8.
    exclude: file-name patterns of nodes or weights to leave float.

    Raises ParameterError for a value out of range.
    """

    bits: int
    block_size: int = 128
    table_bits: int | None = None
    symmetric: bool = False
    accuracy_level: int = 4
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (
            ("bits", tuple(DTYPE_BITS.values())),
            ("block_size", BLOCK_SIZES),
            ("accuracy_level", ACCURACY_LEVELS),
        ):
            if getattr(self, name) not in known:
                choices = ", ".join(map(str, known))
                raise ParameterError(f"{name} is {getattr(self, name)!r}, but must be one of {choices}.", name)
        if self.table_bits not in (None, self.bits, _TABLE_BITS):
            raise ParameterError(
                f"table_bits is {self.table_bits!r}, but must be {self.bits} (as the other weights) or {_TABLE_BITS}.",
                "table_bits",
            )

    @property
    def dtype(self) -> str:
        """`int4` or `int8`."""
        return f"int{self.bits}"

    @property
    def table_scheme(self) -> Quantisation:
        """The scheme of the token table and head."""
        return replace(self, bits=self.table_bits or _TABLE_BITS)

    def as_dict(self) -> dict[str, Any]:
        """The fields for the manifest, with defaults resolved."""
        resolved = {"table_bits": self.table_scheme.bits, "exclude": list(self.exclude)}
        return {**asdict(self), **resolved}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `as_dict`."""
        return cls(**{**data, "exclude": tuple(data["exclude"])})

    def excludes(self, *names: str | None) -> bool:
        """Whether a pattern of `exclude` matches one of the names."""
        return any(name and fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.exclude)

    def table_block_size(self, width: int) -> int | None:
        """Return the largest block size up to `block_size` for a table with rows of `width` weights, or None.

        Rows must be whole blocks: a tied head shares them, and onnxruntime's CUDA provider counts blocks across rows.
        Asymmetric 4-bit rows need an even number of blocks: onnxruntime 1.24, and on CUDA up to 1.31, looks up rows
        with an odd number wrongly.
        """
        return self._largest_block([width], even=self.table_scheme.bits == 4 and not self.symmetric)

    def experts_block_size(self, widths: Collection[int]) -> int | None:
        """Return the largest block size up to `block_size` for experts with rows of `widths` weights, or None.

        As in a table, rows must be whole blocks. Asymmetric rows need an even number of blocks.
        """
        return self._largest_block(widths, even=not self.symmetric) if widths else None

    def _largest_block(self, widths: Collection[int], *, even: bool) -> int | None:
        """Return the largest block size that divides all `widths`, with `even` into an even number of blocks."""
        size = self.block_size
        while size >= _SMALLEST_BLOCK:
            if all(width % (2 * size if even else size) == 0 for width in widths):
                return size
            size //= 2
        return None
