"""Rewrites of a few nodes change no value, and leave what they could change."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.small_graphs import FLOAT, model_of, new_editor, operators, run
from topw_deploy.export.lowering.rewrites import (
    cast_rows_of_norms,
    fuse_skip_norms,
    merge_reshapes,
    spell_out_exclusive_or,
)

HIDDEN = 8
SHAPE: list[int | str | None] = ["batch", "sequence", HIDDEN]


def residual(norm: str = "RMSNormalization", norms: int = 1, other: list[int | str | None] = SHAPE) -> ir.Model:
    """A graph of a + b -> norm -> out, whose sum is an output too."""
    editor = new_editor()
    a, b = editor.input("a", FLOAT, SHAPE), editor.input("b", FLOAT, other)
    total = editor.op("Add", [a, b], dtype=FLOAT, shape=SHAPE, name="total")
    weights = [editor.constant(np.linspace(0.5, 2, HIDDEN, dtype=np.float32), "scale")]
    if norm == "LayerNormalization":
        weights.append(editor.constant(np.linspace(-1, 1, HIDDEN, dtype=np.float32), "bias"))
    kind = {"axis": -1, "epsilon": 1e-3, "dtype": FLOAT, "shape": SHAPE}
    return model_of(editor, total, *(editor.op(norm, [total, *weights], name=f"out{n}", **kind) for n in range(norms)))


@pytest.mark.parametrize(
    ("norm", "operator"),
    [
        ("RMSNormalization", "SkipSimplifiedLayerNormalization"),
        ("LayerNormalization", "SkipLayerNormalization"),
    ],
)
def test_sum_and_norm_keep_their_values_and_names(norm: str, operator: str) -> None:
    plain, fused = residual(norm), residual(norm)
    assert fuse_skip_norms(fused) == 1
    assert operators(fused) == [operator]
    assert [value.name for value in fused.graph.outputs] == ["total", "out0"]
    a, b = np.random.default_rng(0).standard_normal((2, 2, 3, HIDDEN)).astype(np.float32)
    for wanted, found in zip(run(plain, a=a, b=b), run(fused, a=a, b=b), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_sum_that_broadcasts_and_norms_of_two_or_of_other_types_are_not_fused() -> None:
    mixed = residual()
    for value in (*mixed.graph.inputs, mixed.graph.outputs[0]):
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    for model in (residual(norms=2), residual(other=[HIDDEN]), mixed):
        assert fuse_skip_norms(model) == 0
        assert "com.microsoft" not in model.opset_imports


def half_precision(weights: type) -> ir.Model:
    """A graph of half-precision rows -> norm -> out, in the type `weights`."""
    editor = new_editor()
    rows = editor.input("rows", ir.DataType.FLOAT16, ["batch", HIDDEN])
    scale = editor.constant(np.linspace(0.5, 2, HIDDEN, dtype=weights))
    kind = {"axis": -1, "epsilon": 1e-3, "dtype": scale.dtype, "shape": ["batch", HIDDEN]}
    return model_of(editor, editor.op("RMSNormalization", [rows, scale], name="out", **kind))


def test_rows_are_cast_to_wider_weights_and_the_norm_is_exact() -> None:
    mixed, plain = half_precision(np.float32), half_precision(np.float16)
    assert cast_rows_of_norms(mixed) == 1
    rows = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float16)
    exact = rows.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * np.linspace(0.5, 2, HIDDEN)
    np.testing.assert_allclose(run(mixed, rows=rows)[0], exact, rtol=1e-5)
    assert cast_rows_of_norms(plain) == 0
    assert operators(plain) == ["RMSNormalization"]


def reshapes(second: list[int]) -> ir.Model:
    editor = new_editor()
    split = editor.op("Reshape", [editor.input("x", FLOAT, ["n", 6]), [0, 2, 3]], dtype=FLOAT)
    return model_of(editor, editor.op("Reshape", [split, second], name="y", dtype=FLOAT))


def test_reshapes_in_sequence_become_one_unless_the_second_copies_a_size() -> None:
    plain, merged = reshapes([-1, 3]), reshapes([-1, 3])
    assert merge_reshapes(merged) == 1
    assert operators(merged) == ["Reshape"]
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(run(merged, x=x), run(plain, x=x))
    assert merge_reshapes(reshapes([0, 0, 3])) == 0


def bits(operator: str) -> ir.Model:
    editor, kind = new_editor(), ir.DataType.INT64
    shape = ["rows", 3]
    a, b = (editor.input(name, kind, shape) for name in "ab")
    return model_of(editor, editor.op(operator, [a, b], dtype=kind, shape=shape, name="c"))


def test_the_exclusive_or_of_nonnegative_numbers_is_exact_in_every_bit() -> None:
    model, largest = bits("BitwiseXor"), 2**63 - 1
    assert spell_out_exclusive_or(model) == 1
    assert not any(name.startswith("Bitwise") for name in operators(model))
    a = np.array([[0, 1, largest], [2**62, 248_319 * (2**45 + 1), 6]])
    b = np.array([[0, largest, largest], [1, 2**61 + 12_345, 3]])
    assert np.array_equal(run(model, a=a, b=b)[0], a ^ b)
    assert spell_out_exclusive_or(bits("BitwiseAnd")) == 0
