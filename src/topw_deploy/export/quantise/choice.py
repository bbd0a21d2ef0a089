"""Choose how each weight is rounded: to 4 bits for a calibration text, or to 8 bits where 4 lose most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from topw_deploy.export.quantise.blocks import QuantisedWeight, ReadRows, WeightBlocks, row_digest
from topw_deploy.export.quantise.rounding import Quantisation

_MORE_BITS = 8  # of products that lose most with 4
_SLICE_ROWS = 1024


class FoundRows(Protocol):
    """Rounded rows of a model, see `calibration.CalibratedRows`."""

    def find(self, digests: list[bytes]) -> tuple[WeightBlocks, float] | None: ...


Calibrate = Callable[[Mapping[bytes, int]], FoundRows]
"""Rounds rows for a text. Argument: the digest of each row -> its block size."""


@dataclass(frozen=True)
class _Candidate:
    """A weight to be rounded. plain: rounded to nearest with the scheme's bits. read: its float rows."""

    plain: QuantisedWeight
    read: ReadRows
    digests: list[bytes]


class RoundedWeights:
    """The weights of a graph that get codes of their own. See `rewrite.quantise` for the arguments.

    notices: sentences for the user; available after `settle`.
    """

    def __init__(self, scheme: Quantisation, calibrate: Calibrate | None, estimate: bool) -> None:
        self.notices: list[str] = []
        self._scheme, self._calibrate, self._estimate = scheme, calibrate, estimate
        self._candidates: dict[int, _Candidate] = {}
        self._made: dict[int, QuantisedWeight] = {}

    def add(
        self,
        value: ir.Value,
        read: ReadRows,
        sizes: tuple[int, int],
        dtype: np.dtype[Any],
        block_size: int,
        experts: int | None = None,
    ) -> None:
        """Add the weight of the initializer `value`. See QuantisedWeight.rounded for the other arguments."""
        plain = QuantisedWeight.rounded(read, sizes, dtype, block_size, self._scheme, experts)
        digests: list[bytes] = []
        if self._calibrate is not None and not self._estimate:
            for start in range(0, sizes[0], _SLICE_ROWS):
                digests += map(row_digest, read(start, min(start + _SLICE_ROWS, sizes[0])))
        self._candidates[id(value)] = _Candidate(plain, read, digests)
        self._made[id(value)] = plain

    def weight(self, value: ir.Value) -> QuantisedWeight | None:
        """The weight of an initializer; None if it was not added."""
        return self._made.get(id(value))

    def settle(self) -> None:
        """Round the weights for the calibration text, and choose those that get 8 bits."""
        if self._calibrate is None:
            return
        if self._estimate:
            self._raise_bits({key: 1.0 for key, one in self._candidates.items() if one.plain.experts is None})
            return
        wanted = {
            digest: candidate.plain.block_size
            for candidate in self._candidates.values()
            for digest in candidate.digests
        }
        rows = self._calibrate(wanted)
        errors: dict[int, float] = {}
        for key, candidate in self._candidates.items():
            found = rows.find(candidate.digests)
            if found is None:
                continue
            error = found[1]
            del found
            compute = lambda _weight, digests=candidate.digests: rows.find(digests)[0]  # type: ignore[index]  # noqa: E731
            self._made[key] = replace(candidate.plain, compute=compute)
            if candidate.plain.experts is None:
                errors[key] = error
        left = len(self._candidates) - sum(self._made[key] is not one.plain for key, one in self._candidates.items())
        if left:
            self.notices.append(
                f"{left} of {len(self._candidates)} weights were rounded without the calibration text, whose tokens do "
                "not reach them"
            )
        self._raise_bits(errors)

    def _raise_bits(self, errors: dict[int, float]) -> None:
        """Give 8 bits to the weights that lose most for each byte, as long as the average stays within the budget."""
        most, weights = self._scheme.average_bits, self._made.values()
        count = sum(weight.outputs * weight.inputs for weight in weights)
        free = most * count / 8 - sum(weight.nbytes for weight in weights)
        more = replace(self._scheme, bits=_MORE_BITS, table_bits=None)
        costs: dict[int, tuple[int, QuantisedWeight]] = {}
        for key in errors:
            plain = self._candidates[key].plain
            sizes = (plain.outputs, plain.inputs)
            precise = QuantisedWeight.rounded(
                self._candidates[key].read, sizes, plain.scale_type, plain.block_size, more
            )
            costs[key] = precise.nbytes - plain.nbytes, precise
        raised = 0
        for key in sorted(errors, key=lambda key: -errors[key] / costs[key][0]):
            if costs[key][0] <= free:
                free -= costs[key][0]
                self._made[key] = costs[key][1]
                raised += 1
        bits = 8 * sum(weight.nbytes for weight in self._made.values()) / max(1, count)
        self.notices.append(
            f"{raised} of {len(self._made)} rounded weights have 8 bits; with scales and zero points, the average "
            f"is {bits:.2f} bits"
        )
