"""Weights as pairs of float32 against numpy's longest floats; kernels with fast doubles."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fuzz.sampler import fuzz_kernel
from tests.plugins.cuda.test_emulator import address
from tests.support.emulated import EmulatedKernel, built
from tests.support.sampler_cases import SMALL

OF_LOG = 2.0**-45  # relative: a few roundings of 47 bits
OF_EXPONENTIAL = 2.0**-42  # relative: 16 times that, by squaring, plus the series' error
LEAST = np.exp(-60.0)


def weights(
    probes: ctypes.CDLL, logits: np.ndarray, top: float, temperature: float, bounded: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    logs, found = np.empty(len(logits)), np.empty(len(logits))
    probes.probe_weights(
        address(logits), len(logits), ctypes.c_float(top), ctypes.c_double(temperature), int(bounded), address(logs),
        address(found),
    )  # fmt: skip
    return logs, found


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.7, 30.0])
@pytest.mark.parametrize("spread", [1e-4, 0.3, 5.0, 90.0])
def test_weights_and_their_logarithms_have_42_bits(probes: ctypes.CDLL, temperature: float, spread: float) -> None:
    rng = np.random.default_rng(int(spread * 10))
    top = np.float32(rng.normal(0, 10))
    logits = (top - np.abs(rng.normal(0, spread, 20_000))).astype(np.float32)
    exact = (logits.astype(np.longdouble) - top) / np.longdouble(temperature)
    logs, found = weights(probes, logits, top, temperature)
    assert (np.abs(logs - exact) <= OF_LOG * np.abs(exact)).all()
    relative = OF_EXPONENTIAL + OF_LOG * np.abs(exact)
    wanted = np.exp(np.maximum(exact, -60))
    assert (np.abs(found - wanted) <= relative * wanted).all()
    _, unbounded = weights(probes, logits, top, temperature, bounded=False)
    wanted = np.exp(exact)
    assert (np.abs(unbounded - wanted) <= relative * wanted + 1e-300).all()


def test_numbers_that_float32_cannot_hold_are_weighed_in_double(probes: ctypes.CDLL) -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([largest, 0, -1, -largest, -np.inf], np.float32)
    for bounded in (True, False):
        logs, found = weights(probes, logits, largest, 1e-5, bounded)
        assert logs[0] == 0
        assert logs[1:].max() < -1e40
        assert np.array_equal(found, [1, *[LEAST if bounded else 0] * 4])
    logs, found = weights(probes, np.array([3, 2], np.float32), 3.0, 1e-44)
    assert logs[0] == 0
    assert found.tolist() == [1, LEAST]
    assert np.isfinite(logs[1])


@pytest.mark.long
def test_kernels_that_weigh_in_double_answer_as_the_reference(request: pytest.FixtureRequest) -> None:
    """As compiled for sm_80, 90 and 100."""
    assert request.config.cache is not None
    kernel = EmulatedKernel(built(request.config.cache.mkdir("emulated"), ["-DTOPW_FAST_DOUBLES=1"]))
    outcome = fuzz_kernel(kernel, 600, 8, lambda number, _: kernel.emulate(number, 64, 3), SMALL)
    (side,) = outcome.sides.values()
    assert side.unexplained == []
    assert {stage for _, stage in side.stages} >= {"geometry", "candidates"}
