"""Rotations become operators only if both halves of cos and sin are provably equal; tables are shared and small."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import CohereConfig, Ernie4_5Config, GlmConfig, LlamaConfig, Olmo2Config, PhiConfig, PreTrainedConfig

from tests.support.lowerings import attention_nodes, copy_of, difference_alone, driver_of, wanted_of
from tests.support.samples import broad
from tests.support.small_graphs import FLOAT, model_of, new_editor, operators, run
from tests.support.tiny_models import ONE_LAYER, make_model
from tests.support.traces import trace
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering import group_query
from topw_deploy.export.lowering.rotary import fuse_partial_rotary, fuse_rotary, narrow_rotary
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import Lowered, lower

HEADS, DIM = 2, 8
CONTEXT = 48
Change = Callable[[GraphEditor, ir.Value], ir.Value]


def rotation(after: Change = lambda _, value: value, split: int = DIM // 2, swapped: bool = False) -> ir.Model:
    """A graph that rotates x by angles.

    after: what it does with cosines and sines.
    split: where it splits heads for rotated(x).
    swapped: whether the operands of every sum and product are swapped.
    """
    editor = new_editor()
    x = editor.input("x", FLOAT, ["batch", HEADS, "sequence", DIM])
    angles = editor.input("angles", FLOAT, ["batch", "sequence", DIM // 2])
    both = editor.op("Concat", [angles, angles], dtype=FLOAT, shape=["batch", "sequence", DIM], axis=-1)

    def factor(function: str) -> ir.Value:
        return editor.op("Unsqueeze", [after(editor, editor.op(function, [both], dtype=FLOAT)), [1]])

    def joined(op_type: str, first: ir.Value, second: ir.Value) -> ir.Value:
        return editor.op(op_type, [second, first] if swapped else [first, second], dtype=FLOAT)

    def part(start: int, stop: int) -> ir.Value:
        return editor.op("Slice", [x, [start], [stop], [3], [1]], dtype=FLOAT)

    parts = [editor.op("Neg", [part(split, 2**63 - 1)]), part(0, split)]
    crossed = joined("Mul", editor.op("Concat", parts, shape=["batch", HEADS, "sequence", DIM], axis=-1), factor("Sin"))
    out = joined("Add", joined("Mul", x, factor("Cos")), crossed)
    out.name, out.shape = "out", x.shape
    return model_of(editor, out)


def scaled(editor: GraphEditor, value: ir.Value) -> ir.Value:
    return editor.op("Mul", [np.float32(1.25), value], dtype=FLOAT)


def scaled_one_by_one(editor: GraphEditor, value: ir.Value) -> ir.Value:
    return editor.op("Mul", [value, np.arange(DIM, dtype=np.float32)], dtype=FLOAT)


def there_and_back(editor: GraphEditor, value: ir.Value) -> ir.Value:
    double = editor.op("Cast", [value], to=ir.DataType.DOUBLE, dtype=ir.DataType.DOUBLE)
    return editor.op("Cast", [double], to=FLOAT, dtype=FLOAT)


def interleaved_rotation(*, outside: bool, odd_first: bool = False, repeats: int = 2, wide: bool = False) -> ir.Model:
    """A graph that rotates x by angles, whose pairs are interleaved.

    outside: whether it repeats the elements in the first half of cosines and sines instead of the angles.
    odd_first: whether it negates the first instead of the second element of each pair.
    repeats: how often it repeats each angle; 2 is right.
    wide: whether x is half precision, which it casts to float32 and back.
    """
    editor = new_editor()
    shape = ["batch", HEADS, "sequence", DIM]
    kind = ir.DataType.FLOAT16 if wide else FLOAT
    given = editor.input("x", kind, shape)
    angles = editor.input("angles", FLOAT, ["batch", "sequence", DIM // 2])

    def widened(value: ir.Value) -> ir.Value:
        return editor.op("Cast", [value], to=FLOAT, dtype=FLOAT, shape=value.shape) if wide else value

    def part(value: ir.Value, start: int, stop: int, step: int) -> ir.Value:
        return editor.op("Slice", [value, [start], [stop], [len(value.shape) - 1], [step]], dtype=kind)

    def repeated(value: ir.Value) -> ir.Value:
        rank = len(value.shape)
        tiled = editor.op("Tile", [editor.op("Unsqueeze", [value, [rank]]), [1] * rank + [repeats]])
        flat = [0] * (rank - 1) + [-1]
        return editor.op("Reshape", [tiled, flat], dtype=FLOAT, shape=[*value.shape[:-1], repeats * value.shape[-1]])

    def factor(function: str) -> ir.Value:
        whole = ["batch", "sequence", DIM]
        both = editor.op("Concat", [angles, angles], dtype=FLOAT, shape=whole, axis=-1) if outside else repeated(angles)
        value = editor.op(function, [both], dtype=FLOAT, shape=whole)
        value = editor.op("Unsqueeze", [value, [1]], dtype=FLOAT, shape=["batch", 1, "sequence", DIM])
        if not outside:
            return value
        half = part(value, 0, DIM // 2, 1)
        half.shape = ir.Shape(["batch", 1, "sequence", DIM // 2])
        return repeated(half)

    x = widened(given)
    ends = [part(given, start, 2**63 - 1, 2) for start in (0, 1)]
    first, second = ends if odd_first else ends[::-1]
    pair = [editor.op("Unsqueeze", [end, [-1]]) for end in (editor.op("Neg", [first]), second)]
    stacked = editor.op("Concat", pair, axis=-1, shape=["batch", HEADS, "sequence", DIM // 2, 2])
    rotated = editor.op("Reshape", [stacked, [0, 0, 0, DIM]], dtype=kind, shape=shape)
    straight = editor.op("Mul", [x, factor("Cos")], dtype=FLOAT)
    out = editor.op("Add", [straight, editor.op("Mul", [widened(rotated), factor("Sin")])], dtype=FLOAT, shape=shape)
    if wide:
        out = editor.op("Cast", [out], to=kind, dtype=kind, shape=shape)
    out.name = "out"
    return model_of(editor, out)


def rotated(model: ir.Model, width: int = DIM) -> np.ndarray:
    generator = np.random.default_rng(0)
    shapes = {"x": (3, HEADS, 4, width), "angles": (3, 4, DIM // 2)}
    types = {value.name: value.dtype.numpy() for value in model.graph.inputs if value.dtype is not None}
    return run(model, **{name: generator.standard_normal(shape).astype(types[name]) for name, shape in shapes.items()})[
        0
    ]


@pytest.mark.parametrize("after", [lambda _, value: value, scaled, there_and_back])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_rotation_becomes_one_operator_that_computes_the_same(after: Change, swapped: bool) -> None:
    plain, fused = rotation(after, swapped=swapped), rotation(after, swapped=swapped)
    assert fuse_rotary(fused) == 1
    kinds = operators(fused)
    assert kinds.count("RotaryEmbedding") == 1
    assert not {"Concat", "Slice", "Neg", "Unsqueeze"} & set(kinds)
    assert [value.name for value in fused.graph.outputs] == ["out"]
    np.testing.assert_allclose(rotated(fused), rotated(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outside", [False, True])
def test_an_interleaved_rotation_becomes_one_operator_that_computes_the_same(outside: bool) -> None:
    plain, fused = interleaved_rotation(outside=outside), interleaved_rotation(outside=outside)
    assert fuse_rotary(fused) == 1
    (node,) = [node for node in fused.graph if node.op_type == "RotaryEmbedding"]
    assert node.attributes["interleaved"].as_int() == 1
    assert not {"Concat", "Slice", "Neg", "Tile"} & set(operators(fused))
    np.testing.assert_allclose(rotated(fused), rotated(plain), rtol=1e-5, atol=1e-6)


def test_half_precision_heads_are_rotated_without_widening_them() -> None:
    plain, fused = interleaved_rotation(outside=False, wide=True), interleaved_rotation(outside=False, wide=True)
    assert fuse_rotary(fused) == 1
    np.testing.assert_allclose(rotated(fused), rotated(plain), atol=1e-3)
    assert narrow_rotary(fused) == 1
    (node,) = [node for node in fused.graph if node.op_type == "RotaryEmbedding"]
    assert node.inputs[0] is fused.graph.inputs[0]
    np.testing.assert_allclose(rotated(fused), rotated(plain), atol=4e-3)  # 11 bits
    without_casts = interleaved_rotation(outside=False)
    assert (fuse_rotary(without_casts), narrow_rotary(without_casts)) == (1, 0)


def part_of_a_head(gap: int = 0, swapped: bool = False) -> ir.Model:
    """A graph that rotates the first DIM of 2 * DIM elements of each head.

    gap: number of elements that it leaves out after these.
    swapped: whether the result has the other elements first.
    """
    editor = new_editor()
    whole = ["batch", HEADS, "sequence", 2 * DIM]
    x = editor.input("x", FLOAT, whole)
    angles = editor.input("angles", FLOAT, ["batch", "sequence", DIM // 2])

    def part(start: int, stop: int) -> ir.Value:
        return editor.op("Slice", [x, [start], [stop], [3], [1]], dtype=FLOAT, shape=[*whole[:3], DIM])

    tables = [editor.op(function, [angles], dtype=FLOAT) for function in ("Cos", "Sin")]
    rotated = editor.op("RotaryEmbedding", [part(0, DIM), *tables], num_heads=HEADS, dtype=FLOAT)
    both = [rotated, part(DIM + gap, 2**63 - 1)]
    out = editor.op("Concat", both[::-1] if swapped else both, axis=-1, dtype=FLOAT, shape=whole)
    out.name = "out"
    return model_of(editor, out)


def test_a_partial_rotation_becomes_one_operator_that_computes_the_same() -> None:
    plain, fused = part_of_a_head(), part_of_a_head()
    assert fuse_partial_rotary(fused) == 1
    assert sorted(operators(fused)) == ["Cos", "RotaryEmbedding", "Sin"]
    np.testing.assert_allclose(rotated(fused, 2 * DIM), rotated(plain, 2 * DIM), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [part_of_a_head(gap=1), part_of_a_head(swapped=True)])
def test_parts_with_a_gap_or_in_another_order_are_not_fused(model: ir.Model) -> None:
    assert fuse_partial_rotary(model) == 0


@pytest.mark.parametrize(
    "model",
    [
        rotation(scaled_one_by_one),
        rotation(split=DIM // 4),
        interleaved_rotation(outside=False, odd_first=True),
        interleaved_rotation(outside=False, repeats=1),
    ],
)
def test_a_rotation_with_different_halves_is_not_fused(model: ir.Model) -> None:
    before = len(model.graph)
    assert fuse_rotary(model) == 0
    assert len(model.graph) == before


def lowered_model(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[torch.nn.Module, TracedDecoder, Lowered]:
    model = make_model(config)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = frequencies
    decoder = copy_of(trace(model))
    return model, decoder, lower(decoder, kv="static", target="onnxruntime", context_length=CONTEXT)


def attention(config: PreTrainedConfig, dtype: torch.dtype) -> ir.Node:
    (node,) = attention_nodes(lowered_model(config, dtype)[1])
    return node


SIZES = {**ONE_LAYER, "pad_token_id": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 4.0), (torch.float16, 1.0), (torch.bfloat16, 1.0)]
)
def test_layers_share_tables_of_the_angles_of_positions_in_the_type_of_their_weights(
    dtype: torch.dtype, scale: float
) -> None:
    rope = {"rope_type": "linear", "factor": scale, "rope_theta": 10000.0}
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, rope_parameters=rope)
    first, second = attention_nodes(lowered_model(config, dtype)[1])
    assert first.attributes["do_rotary"].as_int() == 1
    assert first.inputs[1] is None  # fused projection
    angles = np.arange(CONTEXT)[:, None] / scale * 10000.0 ** -(np.arange(0, 16, 2) / 16)
    for place, function in ((7, np.cos), (8, np.sin)):
        table = first.inputs[place]
        assert table is second.inputs[place]
        assert table.dtype == first.inputs[0].dtype
        found = table.const_value.numpy().astype(np.float64)
        np.testing.assert_allclose(found, function(angles), atol=max(1e-5, torch.finfo(dtype).eps))  # float32 angles


KINDS = {  # interleaved, rotated numbers out of 32
    CohereConfig: (1, 32),
    Ernie4_5Config: (1, 32),
    GlmConfig: (1, 16),
    Olmo2Config: (0, 32),
    PhiConfig: (0, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), broad(torch.float16, 1e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_rotates_for_families_with_other_rotations_as_torch_does(
    kind: type[PreTrainedConfig], dtype: torch.dtype, bound: float
) -> None:
    config = kind(**{**SIZES, "hidden_size": 64, "head_dim": 32, "num_key_value_heads": 2})
    model, decoder, form = lowered_model(config, dtype)
    (node,) = attention_nodes(decoder)
    interleaved, width = KINDS[kind]
    assert node.attributes["do_rotary"].as_int() == 1
    assert node.attributes["rotary_interleaved"].as_int() == interleaved
    assert tuple(node.inputs[7].shape) == (CONTEXT, width // 2)
    wanted = wanted_of(model, [40], 50)
    driver = driver_of(decoder, form, "float" if dtype == torch.float32 else "float16")
    assert difference_alone(driver, wanted, [37, 1, 2]) <= bound * wanted.largest


@pytest.mark.long
def test_a_partial_rotation_that_cuda_cannot_fuse_stays_before_attention() -> None:
    node = attention(GlmConfig(**SIZES, head_dim=16, num_key_value_heads=2), torch.float32)
    assert node.attributes["do_rotary"].as_int() == 0
    assert node.inputs[0].producer().op_type == "RotaryEmbedding"
    assert node.inputs[0].producer().attributes["rotary_embedding_dim"].as_int() == 8


@pytest.mark.slow
def test_attention_scaling_is_in_the_tables() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    node = attention(LlamaConfig(**SIZES, rope_parameters=yarn), torch.float32)
    assert node.attributes["do_rotary"].as_int() == 1
    squares = [node.inputs[place].const_value.numpy() ** 2 for place in (7, 8)]
    np.testing.assert_allclose(sum(squares), (0.1 * np.log(4.0) + 1) ** 2, rtol=1e-5)


@pytest.mark.slow
def test_tables_that_are_large_beside_the_weights_are_neither_computed_nor_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of a context of 10 million tokens has gigabytes."""

    def compute(*_arguments: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(group_query, "_ALWAYS_SMALL", 0)
    monkeypatch.setattr(group_query, "_SHARE_OF_WEIGHTS", 1e-6)
    monkeypatch.setattr(group_query, "_evaluate", compute)
    _, decoder, _ = lowered_model(LlamaConfig(**SIZES), torch.float32)
    assert [node.attributes["do_rotary"].as_int() for node in attention_nodes(decoder)] == [0]
    assert sum(node.op_type == "RotaryEmbedding" for node in decoder.model.graph) == 2
