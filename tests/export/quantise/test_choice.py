"""Weights that lose most get 8 bits, within a budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.export.quantise import Quantisation
from topw_deploy.export.quantise.blocks import QuantisedWeight, WeightBlocks, row_digest
from topw_deploy.export.quantise.choice import RoundedWeights

RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal((rows, 128)).astype(np.float32) for name, rows in (("a", 64), ("b", 32), ("c", 64))
}
ERRORS = {"a": 0.2, "b": 0.2, "c": 0.01}
UNREACHED = RNG.standard_normal((16, 128)).astype(np.float32)


class Rows:
    """Rounded rows with the errors of ERRORS."""

    def __init__(self, scheme: Quantisation) -> None:
        self._scheme = scheme

    def find(self, digests: list[bytes]) -> tuple[WeightBlocks, float] | None:
        for name, weight in WEIGHTS.items():
            if digests == [row_digest(row) for row in weight]:
                read = lambda start, stop, weight=weight: weight[start:stop]  # noqa: E731
                scheme = self._scheme
                return QuantisedWeight.rounded(read, weight.shape, weight.dtype, 128, scheme).data(), ERRORS[name]
        return None


def settle(average_bits: float, *, estimate: bool = False) -> tuple[dict[str, int], RoundedWeights]:
    """The bits of each weight, and the weights."""
    scheme = Quantisation(bits=4, table_bits=4, average_bits=average_bits)
    wanted: list[Mapping[bytes, int]] = []

    def calibrate(rows: Mapping[bytes, int]) -> Rows:
        wanted.append(rows)
        return Rows(scheme)

    rounded = RoundedWeights(scheme, calibrate, estimate)
    values = {name: ir.Value(name=name) for name in (*WEIGHTS, "unreached")}
    for name, value in values.items():
        weight = WEIGHTS.get(name, UNREACHED)
        read = lambda start, stop, weight=weight: weight[start:stop]  # noqa: E731
        rounded.add(value, read, weight.shape, weight.dtype, 128)
    rounded.settle()
    assert len(wanted) == (not estimate)
    if wanted:
        assert set(wanted[0].values()) == {128}
        assert len(wanted[0]) == 176
    made = {name: rounded.weight(value) for name, value in values.items()}
    return {name: weight.bits for name, weight in made.items() if weight is not None}, rounded


@pytest.mark.parametrize(
    ("budget", "eight"),
    [(4.2, ""), (5.0, ""), (5.1, "b"), (6.4, "b"), (6.5, "ab"), (7.9, "ab"), (8.0, "abc")],
)
def test_the_weights_that_lose_most_for_each_byte_get_8_bits_first(budget: float, eight: str) -> None:
    bits, rounded = settle(budget)
    # With scale and zero point, 4 bits take 4.3125, b in 8 bits 5.04 on average, a too 6.49, and c too 7.95.
    assert {name for name, found in bits.items() if found == 8} == set(eight)
    total = sum(
        8
        * QuantisedWeight.rounded(
            lambda *_: np.empty(0), (rows, 128), np.dtype(np.float32), 128, Quantisation(bits=b)
        ).nbytes
        for rows, b in ((len(WEIGHTS.get(name, UNREACHED)), found) for name, found in bits.items())
    )
    average = total / (176 * 128)
    assert average <= max(budget, 4.3125)
    assert f"the average is {average:.2f} bits" in rounded.notices[-1]


def test_a_weight_that_the_text_does_not_reach_is_rounded_to_nearest_with_a_notice() -> None:
    bits, rounded = settle(5.0)
    assert bits["unreached"] == 4
    assert "1 of 4 weights were rounded without the calibration text" in rounded.notices[0]


def test_an_estimate_fills_the_budget_without_reading_weights() -> None:
    bits, _ = settle(6.0, estimate=True)
    assert set(bits.values()) == {4, 8}
