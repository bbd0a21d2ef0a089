"""Weights that lose most get 8 bits, within a budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.export.quantise import Quantisation
from topw_deploy.export.quantise.blocks import QuantisedWeight, row_digest
from topw_deploy.export.quantise.choice import RoundedRows, RoundedWeights, RowFormat

RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal((rows, 128)).astype(np.float32) for name, rows in (("a", 64), ("b", 32), ("c", 64))
}
ERRORS = {"a": 0.2, "b": 0.2, "c": 0.01}
UNREACHED = RNG.standard_normal((16, 128)).astype(np.float32)


class Text:
    """A calibration with the effects of ERRORS."""

    def __init__(self) -> None:
        self.wanted: Mapping[bytes, int] = {}
        self.formats: Mapping[bytes, RowFormat] = {}

    def effects(self, wanted: Mapping[bytes, int]) -> Mapping[bytes, float]:
        self.wanted = wanted
        return {row_digest(row): ERRORS[name] / len(weight) for name, weight in WEIGHTS.items() for row in weight}

    def round(self, wanted: Mapping[bytes, RowFormat]) -> RoundedRows:
        self.formats = wanted
        rows: RoundedRows = {}
        for weight in WEIGHTS.values():
            names = [row_digest(row) for row in weight]
            scheme = Quantisation(bits=wanted[names[0]].bits)
            read = lambda start, stop, weight=weight: weight[start:stop]  # noqa: E731
            made = QuantisedWeight.rounded(read, weight.shape, weight.dtype, 128, scheme).data()
            rows |= {name: (made, row) for row, name in enumerate(names)}
        return rows


def settle(average_bits: float, *, estimate: bool = False) -> tuple[dict[str, int], RoundedWeights]:
    """The bits of each weight, and the weights."""
    scheme = Quantisation(bits=4, table_bits=4, average_bits=average_bits)
    text = Text()
    rounded = RoundedWeights(scheme, text, estimate)
    values = {name: ir.Value(name=name) for name in (*WEIGHTS, "unreached")}
    for name, value in values.items():
        weight = WEIGHTS.get(name, UNREACHED)
        read = lambda start, stop, weight=weight: weight[start:stop]  # noqa: E731
        rounded.add(value, QuantisedWeight.rounded(read, weight.shape, weight.dtype, 128, scheme), read)
    rounded.settle()
    made = {name: weight for name, value in values.items() if (weight := rounded.weight(value)) is not None}
    assert len(text.wanted) == len(text.formats) == (0 if estimate else 176)
    assert set(text.wanted.values()) <= {128}
    for name, weight in WEIGHTS.items() if not estimate else ():
        assert {text.formats[row_digest(row)] for row in weight} == {RowFormat(128, made[name].bits)}
        assert made[name].data().codes.shape == made[name].codes_shape
    return {name: weight.bits for name, weight in made.items()}, rounded


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
    assert f"the average is {average:.2f} bits" in rounded.notices[0]


def test_a_weight_that_the_text_does_not_reach_is_rounded_to_nearest_with_a_notice() -> None:
    bits, rounded = settle(5.0)
    assert bits["unreached"] == 4
    assert "1 of 4 weights were rounded without the calibration text" in rounded.notices[1]


def test_an_estimate_fills_the_budget_without_reading_weights() -> None:
    bits, _ = settle(6.0, estimate=True)
    assert set(bits.values()) == {4, 8}
