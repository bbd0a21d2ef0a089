"""Choose how each weight is rounded: to 4 bits for a calibration text, or to 8 bits where 4 lose most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import onnx_ir as ir

from topw_deploy.export.quantise.blocks import QuantisedWeight, ReadRows, WeightBlocks, row_digest, rows_by_matrix
from topw_deploy.export.quantise.rounding import Quantisation

_MORE_BITS = 8  # of products that lose most with 4
_SLICE_ROWS = 1024


class RowFormat(NamedTuple):
    """How a row is stored: the number of weights in a block, and the bits of a code."""

    block_size: int
    bits: int


RoundedRows = dict[bytes, tuple[WeightBlocks, int]]
"""Digest of an original float row -> the rounded matrix that has it, and its row there."""


def rounded_blocks(rounded: RoundedRows, digests: Sequence[bytes]) -> WeightBlocks:
    """Return the blocks of the rows with these digests, which must have one format."""
    parts = rows_by_matrix(rounded, digests)
    order = np.argsort(np.concatenate([outputs for _, outputs, _ in parts]))

    def gather(place: int) -> np.ndarray:
        return np.concatenate([np.asarray(matrix[place])[rows] for matrix, _, rows in parts])[order]

    return WeightBlocks(gather(0), gather(1), None if parts[0][0].zero_points is None else gather(2))


class Calibration(Protocol):
    """Rounds the rows of weights for a text. `calibration.TextCalibration` implements it."""

    def effects(self, wanted: Mapping[bytes, int]) -> Mapping[bytes, float]:
        """What rounding changes, by row. wanted: the digest of each row -> its block size."""

    def round(self, wanted: Mapping[bytes, RowFormat]) -> RoundedRows:
        """Round rows. wanted: the digest of each -> its format."""


class _Candidate(NamedTuple):
    """A weight to be rounded. plain: rounded to nearest with the scheme's bits. digests: of its float rows."""

    plain: QuantisedWeight
    digests: list[bytes]


class RoundedWeights:
    """The weights of a graph that get codes of their own. See `rewrite.quantise` for the arguments.

    notices: sentences for the user; available after `settle`.
    """

    def __init__(self, scheme: Quantisation, calibration: Calibration | None, estimate: bool) -> None:
        self.notices: list[str] = []
        self._scheme, self._calibration, self._estimate = scheme, calibration, estimate
        self._candidates: dict[int, _Candidate] = {}
        self._made: dict[int, QuantisedWeight] = {}

    def add(self, value: ir.Value, plain: QuantisedWeight, read: ReadRows) -> None:
        """Add the weight of the initializer `value`. plain: rounded to nearest. read: its float rows."""
        digests: list[bytes] = []
        if self._calibration is not None and not self._estimate:
            for start in range(0, plain.outputs, _SLICE_ROWS):
                digests += map(row_digest, read(start, min(start + _SLICE_ROWS, plain.outputs)))
        self._candidates[id(value)] = _Candidate(plain, digests)
        self._made[id(value)] = plain

    def weight(self, value: ir.Value) -> QuantisedWeight | None:
        """The weight of an initializer; None if it was not added."""
        return self._made.get(id(value))

    def settle(self) -> None:
        """Round the weights for the calibration text, and choose those that get 8 bits."""
        if self._calibration is None:
            return
        effects: Mapping[bytes, float] = {}
        if not self._estimate:
            wanted = {digest: one.plain.block_size for one in self._candidates.values() for digest in one.digests}
            effects = self._calibration.effects(wanted)
        self._raise_bits(effects)
        if self._estimate:
            return
        formats = {
            digest: RowFormat(self._made[key].block_size, self._made[key].bits)
            for key, one in self._candidates.items()
            for digest in one.digests
        }
        rows = self._calibration.round(formats)
        left = 0
        for key, candidate in self._candidates.items():
            if not rows.keys() >= set(candidate.digests):
                left += 1
                continue
            compute = lambda _weight, digests=candidate.digests: rounded_blocks(rows, digests)  # noqa: E731
            self._made[key] = replace(self._made[key], compute=compute)
        if left:
            self.notices.append(
                f"{left} of {len(self._candidates)} weights were rounded without the calibration text, whose tokens do "
                "not reach them"
            )

    def _raise_bits(self, effects: Mapping[bytes, float]) -> None:
        """Give 8 bits to the weights that lose most for each byte, as long as the average stays within the budget.

        effects: see `Calibration.effects`; if they are empty, all weights count as if they lost the same.
        """
        errors = {
            key: sum(effects.get(digest, 0.0) for digest in one.digests) if effects else 1.0
            for key, one in self._candidates.items()
            if one.plain.experts is None
        }
        most, weights = self._scheme.average_bits, self._made.values()
        count = sum(weight.outputs * weight.inputs for weight in weights)
        free = most * count / 8 - sum(weight.nbytes for weight in weights)
        costs: dict[int, tuple[int, QuantisedWeight]] = {}
        for key in errors:
            plain = self._candidates[key].plain
            precise = replace(plain, bits=_MORE_BITS)
            costs[key] = precise.nbytes - plain.nbytes, precise
        raised = 0
        for key in sorted(errors, key=lambda key: -errors[key] / costs[key][0]):
            if errors[key] > 0 and costs[key][0] <= free:
                free -= costs[key][0]
                self._made[key] = costs[key][1]
                raised += 1
        bits = 8 * sum(weight.nbytes for weight in self._made.values()) / max(1, count)
        self.notices.append(
            f"{raised} of {len(self._made)} rounded weights have 8 bits; with scales and zero points, the average "
            f"is {bits:.2f} bits"
        )
