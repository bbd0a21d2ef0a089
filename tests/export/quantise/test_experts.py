"""Quantised experts give the sum of their dequantised matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.experts import (
    HIDDEN,
    INNER,
    Mixture,
    inputs_of,
    literal,
    mixture_graph,
    random_mixture,
    run,
)
from tests.support.samples import thinned
from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.lowering.experts import lower_experts
from topw_deploy.export.quantise import Quantisation, quantise
from topw_deploy.export.quantise.blocks import QuantisedWeight
from topw_deploy.export.quantise.rewrite import least_onnxruntime

EXACT = 1e-4  # of outputs up to 30, as unquantised; measured: 2e-5
INT8_ACTIVATIONS = 0.03  # of the largest output; measured: 0.011
SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "block_size": 32, "accuracy_level": 1},
    "int4 of odd blocks": {"bits": 4, "block_size": 16, "accuracy_level": 1},
    "int4 without a level": {"bits": 4, "block_size": 16, "accuracy_level": 0},
    "int4 symmetric": {"bits": 4, "block_size": 32, "symmetric": True, "accuracy_level": 1},
    "int4 of one block": {"bits": 4, "block_size": 256, "symmetric": True, "accuracy_level": 1},
}


def round_mixture(mixture: Mixture, scheme: Quantisation, dtype: Any = np.float32) -> Mixture:
    """Its matrices as the quantiser stores them."""
    size = scheme.experts_block_size({HIDDEN, INNER})
    assert size is not None
    found = {}
    for name in ("up", "down"):
        rows = getattr(mixture, name).astype(dtype).reshape(-1, getattr(mixture, name).shape[2])
        read = lambda start, stop, rows=rows: rows[start:stop]  # noqa: E731
        made = QuantisedWeight.rounded(read, rows.shape, rows.dtype, size, scheme)
        found[name] = made.values().reshape(getattr(mixture, name).shape)
    return replace(mixture, **found)


def quantise_mixture(
    mixture: Mixture, scheme: Quantisation, *, operator: bool, dtype: ir.DataType = ir.DataType.FLOAT
) -> Any:
    model = mixture_graph(mixture, positive=True, dtype=dtype)
    lower_experts(model, operator=operator, quantised=True)
    model.opset_imports.pop("topw.trace")
    return model, quantise(model, scheme)


@pytest.mark.parametrize("operator", [True, False], ids=["operator", "blocks"])
@pytest.mark.parametrize("settings", thinned(SCHEMES.values(), 2), ids=list(SCHEMES))
def test_products_are_those_of_the_dequantised_matrices(settings: dict[str, Any], operator: bool) -> None:
    scheme, mixture = Quantisation(**settings), random_mixture(biases=True)
    model, notices = quantise_mixture(mixture, scheme, operator=operator)
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("QMoE"), kinds.count("GatherBlockQuantized")) == ((1, 0) if operator else (0, 2))
    assert least_onnxruntime(model.graph) == ("1.30" if operator else "")
    assert all("experts.up_bias" in notice for notice in notices)  # 1 % of so small a model
    for tokens in (1, 2, 37):
        inputs = inputs_of(tokens)
        np.testing.assert_allclose(run(model, *inputs), literal(round_mixture(mixture, scheme), *inputs), atol=EXACT)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_8_bit_activations_are_near_the_exact_ones(bits: int) -> None:
    scheme, mixture = Quantisation(bits=bits), random_mixture()
    model, notices = quantise_mixture(mixture, scheme, operator=True)
    assert notices == []
    assert least_onnxruntime(model.graph) == "1.31"
    inputs = inputs_of(37)
    wanted = literal(round_mixture(mixture, scheme), *inputs)
    np.testing.assert_allclose(run(model, *inputs), wanted, atol=INT8_ACTIVATIONS * np.abs(wanted).max())


def test_8_bit_products_are_exact_with_the_environment_variable_of_the_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORT_QMOE_CPU_QNBIT_GEMM", "fp32")
    scheme, mixture = Quantisation(bits=8, accuracy_level=1), random_mixture()
    model, _ = quantise_mixture(mixture, scheme, operator=True)
    inputs = inputs_of(5)
    np.testing.assert_allclose(run(model, *inputs), literal(round_mixture(mixture, scheme), *inputs), atol=EXACT)


def test_experts_of_half_precision_are_near_their_dequantised_matrices() -> None:
    scheme, mixture = Quantisation(bits=4, block_size=32, accuracy_level=1), random_mixture()
    model, _ = quantise_mixture(mixture, scheme, operator=True, dtype=ir.DataType.FLOAT16)
    assert "QMoE" in [node.op_type for node in model.graph]
    inputs = inputs_of(9)
    wanted = literal(round_mixture(mixture, scheme, np.float16), *inputs)
    np.testing.assert_allclose(run(model, *inputs), wanted, atol=2e-2 * np.abs(wanted).max())  # float16 has 11 bits


def test_excluded_experts_stay_float_but_not_in_half_precision() -> None:
    scheme = Quantisation(bits=4, exclude=("experts.*",))
    model = mixture_graph(random_mixture(), positive=True)
    lower_experts(model, operator=True, quantised=True)
    with pytest.raises(UnsupportedModelError, match="no product"):
        quantise(model, replace(scheme, exclude=("*experts.*",)))
    half = mixture_graph(random_mixture(), positive=True, dtype=ir.DataType.FLOAT16)
    lower_experts(half, operator=True, quantised=True)
    with pytest.raises(ParameterError, match="exclude them"):
        quantise(half, replace(scheme, exclude=("*experts.*",)))


def test_a_width_without_whole_blocks_leaves_experts_float() -> None:
    assert Quantisation(bits=4).experts_block_size({64, 24}) is None
    assert Quantisation(bits=4).experts_block_size({64, 96}) == 32 // 2
    assert Quantisation(bits=4, symmetric=True).experts_block_size({64, 96}) == 32
    assert Quantisation(bits=4).experts_block_size({2048, 768}) == 128
