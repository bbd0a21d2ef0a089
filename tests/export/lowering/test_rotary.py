"""Rotations that the tracer spells out become operators, and only those whose halves are provably equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from tiny_models import make_model
from transformers import LlamaConfig

from topw_deploy.export.editor import GraphEditor
from topw_deploy.export.lowering import lower
from topw_deploy.export.lowering.rotary import fuse_rotary
from topw_deploy.export.trace import trace

HEADS, DIM = 2, 8
FLOAT = ir.DataType.FLOAT
Change = Callable[[GraphEditor, ir.Value], ir.Value]


def rotation(after: Change = lambda _, value: value, split: int = DIM // 2, swapped: bool = False) -> ir.Model:
    """x and angles -> out. after: what becomes of cosines and sines; swapped: every sum and product the other way."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    x = editor.input("x", FLOAT, ["batch", HEADS, "sequence", DIM])
    angles = editor.input("angles", FLOAT, ["batch", "sequence", DIM // 2])
    numbers = {number: editor.constant(np.array([number])) for number in (0, 1, 3, split, 2**63 - 1)}
    both = editor.op("Concat", [angles, angles], dtype=FLOAT, shape=["batch", "sequence", DIM], axis=-1)

    def factor(function: str) -> ir.Value:
        return editor.op("Unsqueeze", [after(editor, editor.op(function, [both], dtype=FLOAT)), numbers[1]])

    def joined(op_type: str, first: ir.Value, second: ir.Value) -> ir.Value:
        return editor.op(op_type, [second, first] if swapped else [first, second], dtype=FLOAT)

    def part(start: int, stop: int) -> ir.Value:
        return editor.op("Slice", [x, numbers[start], numbers[stop], numbers[3], numbers[1]], dtype=FLOAT)

    parts = [editor.op("Neg", [part(split, 2**63 - 1)]), part(0, split)]
    crossed = joined("Mul", editor.op("Concat", parts, shape=["batch", HEADS, "sequence", DIM], axis=-1), factor("Sin"))
    out = joined("Add", joined("Mul", x, factor("Cos")), crossed)
    out.name, out.shape = "out", x.shape
    graph.outputs.append(out)
    return ir.Model(graph, ir_version=10)


def scaled(editor: GraphEditor, value: ir.Value) -> ir.Value:
    return editor.op("Mul", [editor.constant(np.float32(1.25)), value], dtype=FLOAT)


def scaled_one_by_one(editor: GraphEditor, value: ir.Value) -> ir.Value:
    return editor.op("Mul", [value, editor.constant(np.arange(DIM, dtype=np.float32))], dtype=FLOAT)


def there_and_back(editor: GraphEditor, value: ir.Value) -> ir.Value:
    double = editor.op("Cast", [value], to=ir.DataType.DOUBLE, dtype=ir.DataType.DOUBLE)
    return editor.op("Cast", [double], to=FLOAT, dtype=FLOAT)


def run(model: ir.Model) -> np.ndarray:
    generator = np.random.default_rng(0)
    feeds = {"x": (3, HEADS, 4, DIM), "angles": (3, 4, DIM // 2)}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (out,) = session.run(
        None, {name: generator.standard_normal(shape).astype(np.float32) for name, shape in feeds.items()}
    )
    return out


@pytest.mark.parametrize("after", [lambda _, value: value, scaled, there_and_back])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_rotation_becomes_one_operator_that_computes_the_same(after: Change, swapped: bool) -> None:
    plain, fused = rotation(after, swapped=swapped), rotation(after, swapped=swapped)
    assert fuse_rotary(fused) == 1
    kinds = [node.op_type for node in fused.graph]
    assert kinds.count("RotaryEmbedding") == 1
    assert not {"Concat", "Slice", "Neg", "Unsqueeze"} & set(kinds)
    assert [value.name for value in fused.graph.outputs] == ["out"]
    np.testing.assert_allclose(run(fused), run(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [rotation(scaled_one_by_one), rotation(split=DIM // 4)])
def test_what_treats_the_halves_differently_is_left_alone(model: ir.Model) -> None:
    before = len(model.graph)
    assert fuse_rotary(model) == 0
    assert len(model.graph) == before


def attention(config: LlamaConfig, dtype: torch.dtype) -> ir.Node:
    model = make_model(config)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = frequencies  # which stay float32 in a model that is loaded
    traced = trace(model)
    decoder = replace(traced, model=traced.model.clone())
    lower(decoder, kv="static", target="onnxruntime", context_length=48)
    (node,) = [node for node in decoder.model.graph if node.op_type == "GroupQueryAttention"]
    return node


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_turned_inside_attention_from_tables_of_its_own_type(dtype: torch.dtype) -> None:
    node = attention(LlamaConfig(**SIZES), dtype)
    assert node.attributes["do_rotary"].as_int() == 1
    assert node.inputs[1] is None  # queries, keys and values are one product
    cos = node.inputs[7]
    assert cos.dtype == node.inputs[0].dtype != FLOAT
    angles = np.arange(48)[:, None] * 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(cos.const_value.numpy().astype(np.float64), np.cos(angles), atol=torch.finfo(dtype).eps)


def test_attention_scaling_is_in_the_tables() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    node = attention(LlamaConfig(**SIZES, rope_parameters=yarn), torch.float32)
    assert node.attributes["do_rotary"].as_int() == 1
    squares = [node.inputs[place].const_value.numpy() ** 2 for place in (7, 8)]
    np.testing.assert_allclose(sum(squares), (0.1 * np.log(4.0) + 1) ** 2, rtol=1e-5)  # YaRN's factor
