"""Products with 4- and 8-bit weights: the native operator, and the function that it replaces."""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.native_functions import call_functions
from topw_deploy.export.quantise.blocks import WeightBlocks, decode_blocks, unpack_codes
from topw_deploy.export.quantise.rewrite import OFFSETS

PRODUCTS = ("amx", "avx512_vnni", "avx_vnni", "avx2", "dotprod", "generic")


class Weight(NamedTuple):
    outputs: int
    inputs: int
    bits: int
    block_size: int
    blocks: WeightBlocks
    bias: np.ndarray | None


def random_weight(rng: np.random.Generator, outputs: int, inputs: int, bits: int, size: int, kind: str) -> Weight:
    """kind: any of the letters z (zero points), o (offsets) and b (bias)."""
    count = -(-inputs // size)
    codes = rng.integers(0, 256, (outputs, count, size * bits // 8), dtype=np.uint8)
    scales = rng.uniform(0.01, 1, (outputs, count)).astype(np.float32)
    zeros = rng.integers(0, 256, (outputs, -(-count * bits // 8)), dtype=np.uint8) if "z" in kind else None
    offsets = rng.standard_normal((outputs, count)).astype(np.float32) if "o" in kind else None
    bias = rng.standard_normal(outputs).astype(np.float32) if "b" in kind else None
    return Weight(outputs, inputs, bits, size, WeightBlocks(codes, scales, zeros, offsets), bias)


def product_model(weight: Weight, *, calls: bool = True) -> ir.Model:
    """A model x [batch, rows, inputs] -> y, as the exporter writes it, or with onnxruntime's own MatMulNBits."""
    x = ir.val("x", ir.DataType.FLOAT, ["batch", "rows", weight.inputs])
    arrays = {
        "codes": weight.blocks.codes,
        "scales": weight.blocks.scales,
        "zeros": weight.blocks.zero_points,
        "bias": weight.bias,
        "offsets": weight.blocks.offsets,
    }
    values = {name: ir.val(name, const_value=ir.tensor(a, name=name)) for name, a in arrays.items() if a is not None}
    inputs = [x, values["codes"], values["scales"], values.get("zeros"), None, values.get("bias")]
    while inputs[-1] is None:
        inputs.pop()
    sizes = {"K": weight.inputs, "N": weight.outputs, "bits": weight.bits, "block_size": weight.block_size}
    nodes = [ir.node("MatMulNBits", inputs, attributes=sizes | {"accuracy_level": 4}, domain="com.microsoft")]
    initializers = list(values.values())
    if "offsets" in values:
        shape = ir.val("shape", const_value=ir.tensor([0, 0, -1, weight.block_size], name="shape"))
        axis = ir.val("axis", const_value=ir.tensor([-1], name="axis"))
        initializers += [shape, axis]
        nodes.append(ir.node("Reshape", [x, shape]))
        nodes.append(ir.node("ReduceSum", [nodes[-1].outputs[0], axis], attributes={"keepdims": 0}))
        factors = [nodes[-1].outputs[0], values["offsets"]]
        nodes.append(ir.node("FusedMatMul", factors, attributes={"transB": 1}, domain="com.microsoft"))
        nodes.append(ir.node("Add", [nodes[0].outputs[0], nodes[-1].outputs[0]]))
        nodes[0].meta[OFFSETS] = values["offsets"]
    y = nodes[-1].outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    y.shape = ir.Shape(["batch", "rows", weight.outputs])
    imports = {"": 21, "com.microsoft": 1}
    graph = ir.Graph([x], [y], nodes=nodes, initializers=initializers, opset_imports=imports, name="product")
    model = ir.Model(graph, ir_version=10)
    if calls:
        call_functions(model, 21)
        expected = "MatMulNBitsWithOffsets" if "offsets" in values else "MatMulNBits"
        assert [(node.domain, node.op_type) for node in model.graph] == [("topw", expected)]
    return model


def open_session(model: ir.Model, library: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    (found,) = session.run(["y"], {"x": x})
    return np.asarray(found)


def rounded_product(weight: Weight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64, and the sum of its terms' magnitudes."""
    size, scales, offsets = weight.block_size, weight.blocks.scales, weight.blocks.offsets
    count = scales.shape[1]
    padded = np.pad(x, ((0, 0), (0, 0), (0, count * size - weight.inputs))).reshape(*x.shape[:2], count, size)
    largest = np.abs(padded).max(axis=-1)
    factors = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(padded * factors[..., None]).astype(np.float64)
    steps = (largest / np.float32(127)).astype(np.float64)
    plain = decode_blocks(weight.blocks._replace(scales=np.ones_like(scales), offsets=None), weight.bits, count * size)
    integers = np.einsum("brks,nks->brnk", codes, plain.reshape(weight.outputs, count, size).astype(np.float64))
    terms = integers * scales * steps[:, :, None]
    if offsets is not None:
        terms = np.concatenate([terms, padded.sum(axis=-1, dtype=np.float64)[:, :, None] * offsets], axis=-1)
    if weight.bias is not None:
        bias = np.broadcast_to(weight.bias[:, None], (*terms.shape[:3], 1))
        terms = np.concatenate([terms, bias], axis=-1)
    return terms.sum(axis=-1), np.abs(terms).sum(axis=-1)


SHAPES = [
    (outputs, inputs, bits, size, kind)
    for size in (16, 32, 64, 128, 256)
    for bits in (4, 8)
    for outputs, inputs, kind in (
        (1, 1, ""),
        (37, 2 * size + 5, "z"),
        (640, 64, "b"),
        (200, 2500, "ob"),
        (48, 700, "zb"),
    )
]


@pytest.fixture
def library(native_library: Path) -> Any:
    """The library, whose best products are restored."""
    handle = ctypes.CDLL(str(native_library))
    yield handle
    handle.topw_use_product(None)


@pytest.mark.parametrize(("outputs", "inputs", "bits", "size", "kind"), SHAPES)
def test_products_are_the_definition_with_the_same_bits_in_any_batch_and_on_any_instruction_set(
    native_library: Path, library: Any, outputs: int, inputs: int, bits: int, size: int, kind: str
) -> None:
    rng = np.random.default_rng(outputs + inputs + bits + size)
    weight = random_weight(rng, outputs, inputs, bits, size, kind)
    session = open_session(product_model(weight), native_library, threads=2)
    x = (rng.standard_normal((2, 20, inputs)) * 10.0 ** rng.integers(-3, 3, (2, 20, 1))).astype(np.float32)
    found = run(session, x)
    expected, magnitude = rounded_product(weight, x)
    blocks = weight.blocks.scales.shape[1]
    # Each block adds at most three roundings of 2^-24 relative to its term, and one to the sum so far.
    np.testing.assert_array_less(np.abs(found - expected), (blocks + 4) * 2.0**-23 * magnitude + 1e-30)
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 13, 20):
        np.testing.assert_array_equal(run(session, x[:1, :count]), found[:1, :count], err_msg=f"{count} rows")
    for name in PRODUCTS:
        if library.topw_use_product(name.encode()) == 0:
            for count in (1, 3, 4, 7, 9, 16, 20):
                np.testing.assert_array_equal(run(session, x[:, :count]), found[:, :count], err_msg=name)


@pytest.mark.parametrize("kind", ["", "z", "b", "ob"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_function_and_the_operator_compute_what_matmulnbits_computes(
    native_library: Path, bits: int, kind: str
) -> None:
    rng = np.random.default_rng(bits)
    weight = random_weight(rng, 96, 256, bits, 32, kind)
    x = rng.standard_normal((1, 12, 256)).astype(np.float32)
    plain = run(open_session(product_model(weight, calls=False)), x)
    np.testing.assert_array_equal(run(open_session(product_model(weight)), x), plain)
    _, magnitude = rounded_product(weight, x)
    # MatMulNBits rounds activations by another method, so each differs by up to a step of a 254th of the largest.
    assert np.abs(run(open_session(product_model(weight), native_library), x) - plain).max() < 4e-3 * magnitude.max()


@pytest.mark.parametrize("rows", [3, 20])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other_row_is(native_library: Path, rows: int) -> None:
    rng = np.random.default_rng(rows)
    session = open_session(product_model(random_weight(rng, 40, 96, 4, 32, "")), native_library)
    x = rng.standard_normal((1, rows, 96)).astype(np.float32)
    clean = run(session, x)
    x[0, 1, 40], x[0, 2, 95] = np.nan, -np.inf
    found = run(session, x)
    assert np.isnan(found[0, 1:3]).all()
    np.testing.assert_array_equal(np.delete(found, (1, 2), axis=1), np.delete(clean, (1, 2), axis=1))


def test_empty_batches_and_rows_of_zeros_are_answered(native_library: Path) -> None:
    weight = random_weight(np.random.default_rng(0), 40, 96, 8, 32, "zb")
    session = open_session(product_model(weight), native_library)
    assert run(session, np.zeros((2, 0, 96), np.float32)).shape == (2, 0, 40)
    zeros = run(session, np.full((1, 1, 96), 1e-40, np.float32))
    np.testing.assert_array_equal(zeros[0, 0], weight.bias)


def test_codes_at_their_ends_are_summed_without_overflow(native_library: Path, library: Any) -> None:
    """The largest sums of products, of which AVX2 holds eight in 16 bits."""
    weight = random_weight(np.random.default_rng(0), 16, 512, 8, 256, "z")
    for code, zero in ((255, 0), (0, 255)):
        blocks = weight.blocks._replace(
            codes=np.full_like(weight.blocks.codes, code), zero_points=np.full((16, 2), zero, np.uint8)
        )
        session = open_session(product_model(weight._replace(blocks=blocks)), native_library)
        for name in PRODUCTS:
            library.topw_use_product(name.encode())
            for rows, sign in itertools.product((1, 16), (1, -1)):
                found = run(session, np.full((1, rows, 512), sign, np.float32))
                expected = sign * (code - zero) * 256.0 * blocks.scales.sum(axis=1)
                np.testing.assert_allclose(found[0], np.tile(expected, (rows, 1)), rtol=1e-5, err_msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_products_of_every_instruction_set_that_the_processor_names_can_be_chosen(library: Any) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for name, flag in {"amx": "amx_int8", "avx512_vnni": "avx512_vnni", "avx_vnni": "avx_vnni", "avx2": "avx2"}.items():
        assert (library.topw_use_product(name.encode()) == 0) == (flag in flags), name
    assert library.topw_use_product(b"sse9") == 1


def test_nodes_that_the_operator_cannot_compute_are_refused(native_library: Path) -> None:
    weight = random_weight(np.random.default_rng(0), 16, 64, 4, 32, "")
    changes = {"accuracy_level": (1, "accuracy level 1"), "bits": (2, "has 2 bits"), "N": (17, "input 1 .* size")}
    for name, (value, message) in changes.items():
        model = product_model(weight)
        node = next(iter(model.graph))
        node.attributes[name] = ir.AttrInt64(name, value)
        with pytest.raises(Exception, match=message):
            open_session(model, native_library)


def test_products_in_half_precision_or_with_float_activations_stay_onnxruntimes() -> None:
    weight = random_weight(np.random.default_rng(0), 16, 64, 4, 32, "")
    model = product_model(weight, calls=False)
    next(iter(model.graph)).attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    call_functions(model, 21)
    assert [node.domain for node in model.graph] == ["com.microsoft"]
    assert not model.functions
    assert unpack_codes(np.array([[0x21]], np.uint8), 4).tolist() == [[1, 2]]
