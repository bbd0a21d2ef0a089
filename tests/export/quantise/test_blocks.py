"""Quantised blocks, as onnxruntime reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from topw_deploy.errors import ExportError
from topw_deploy.export.quantise import blocks as module
from topw_deploy.export.quantise.blocks import QuantisedWeight, unpack_codes
from topw_deploy.export.quantise.rounding import Quantisation

OUTPUTS, INPUTS = 24, 80  # 80: the last block of 32 is half empty; 80 / 16 = 5 blocks is odd
WEIGHT = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)


def rounded(scheme: Quantisation, weight: np.ndarray = WEIGHT) -> QuantisedWeight:
    sizes = (weight.shape[0], weight.shape[1])
    return QuantisedWeight.rounded(
        lambda start, stop: weight[start:stop], sizes, weight.dtype, scheme.block_size, scheme
    )


def multiply(x: np.ndarray, weight: QuantisedWeight) -> np.ndarray:
    """x @ weight^T by MatMulNBits in float32."""
    data = weight.data()
    feeds = {"x": x, "codes": data.codes, "scales": data.scales}
    feeds |= {} if data.zero_points is None else {"zeros": data.zero_points}
    attributes = {"K": weight.inputs, "N": weight.outputs, "bits": weight.bits, "block_size": weight.block_size}
    node = onnx.helper.make_node(
        "MatMulNBits", list(feeds), ["y"], domain="com.microsoft", accuracy_level=1, **attributes
    )
    types = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_tensor_value_info("x", types["x"], [None, weight.inputs])],
        [onnx.helper.make_tensor_value_info("y", types["x"], None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in feeds.items() if name != "x"],
    )
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantised_blocks_are_the_weights_that_the_operator_multiplies_with(
    bits: int, block_size: int, symmetric: bool
) -> None:
    scheme = Quantisation(bits=bits, block_size=block_size, symmetric=symmetric)
    made = rounded(scheme)
    weight = made.values()
    x = np.random.default_rng(1).standard_normal((5, INPUTS)).astype(np.float32)
    np.testing.assert_allclose(multiply(x, made), x @ weight.T, atol=2e-5)
    # A step is at most the range / (2^bits - 2). Rounding is off by half a step, and the search moves both ends.
    assert np.abs(weight - WEIGHT).max() <= 2 * np.abs(WEIGHT).max() / (2**bits - 2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_slices_of_outputs_give_the_same_blocks_as_the_whole(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Quantisation(bits=4, block_size=16, symmetric=symmetric)
    whole = rounded(scheme).data()
    monkeypatch.setattr(module, "_SLICE_VALUES", 7 * INPUTS)
    for expected, sliced in zip(whole, rounded(scheme).data(), strict=True):
        np.testing.assert_array_equal(expected, sliced)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_zeros_stay_zeros(symmetric: bool) -> None:
    made = rounded(Quantisation(bits=4, symmetric=symmetric), np.zeros((4, 64), np.float32))
    np.testing.assert_array_equal(made.values(), 0)


@pytest.mark.parametrize("draw", [np.random.Generator.standard_normal, lambda rng, size: rng.standard_t(5, size)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_search_has_a_smaller_error_than_rounding_to_nearest(
    block_size: int, bits: int, draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
) -> None:
    weight = draw(np.random.default_rng(4), (64, 1024)).astype(np.float32)

    def error(symmetric: bool) -> float:
        scheme = Quantisation(bits=bits, block_size=block_size, symmetric=symmetric)
        return float(np.square(rounded(scheme, weight).values() - weight).sum())

    blocks = weight.reshape(64, -1, block_size)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert error(False) < error(True) < float(np.square(np.rint(blocks / step) * step - blocks).sum())


def test_search_reproduces_weights_that_codes_can_represent() -> None:
    rng = np.random.default_rng(5)
    codes, zeros = rng.integers(0, 16, (32, 4, 32)), rng.integers(0, 16, (32, 4, 1))
    codes[..., 0], codes[..., 1] = 0, 15  # the whole range
    scales = rng.uniform(0.5, 2.0, (32, 4, 1))
    weight = ((codes - zeros) * scales).reshape(32, 128).astype(np.float32)
    made = rounded(Quantisation(bits=4, block_size=32), weight)
    np.testing.assert_allclose(made.values(), weight, rtol=1e-5, atol=1e-6)


def test_search_rounds_codes_with_the_float16_scale() -> None:
    weight = WEIGHT.astype(np.float16) * np.float16(1e-3)  # near float16's smallest normal
    made = rounded(Quantisation(bits=4, block_size=16), weight)
    packed, scales, zero_points, _ = made.data()
    assert zero_points is not None
    zeros = unpack_codes(zero_points, 4)[:, : made.blocks, None].astype(np.float32)
    steps = weight.reshape(OUTPUTS, made.blocks, 16).astype(np.float32) / scales.astype(np.float32)[..., None]
    nearest = np.clip(np.rint(steps + zeros), 0, 15)
    codes = unpack_codes(packed.reshape(OUTPUTS, -1), 4).reshape(nearest.shape)
    assert (codes != nearest).mean() < 0.002  # ties


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(wrong: float) -> None:
    weight = WEIGHT.copy()
    weight[3, 5] = wrong
    with pytest.raises(ExportError, match="NaN or infinity"):
        rounded(Quantisation(bits=4), weight).data()
