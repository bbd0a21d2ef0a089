"""Cache, context length and missing inputs of other exporters' decoders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.foreign import Window, applies_window, load_decoder, lost_soft_cap, sequence_limit, window_of
from topw_deploy.export.graph import Decoder, GraphEditor

VOCAB, HIDDEN, HEADS, DIM = 40, 16, 2, 8


def decoder(
    layers: int = 2,
    *,
    windows: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_rows: int = 64,
    cache: ir.DataType = ir.DataType.FLOAT,
    extra_input: str = "",
) -> ir.Model:
    """Inputs, outputs and attention as onnxruntime-genai's builder writes them, without layers."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="decoder")
    editor = GraphEditor(graph, "made")
    ids = editor.input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
    mask = editor.input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
    if extra_input:
        editor.input(extra_input, ir.DataType.INT64, ["batch_size"])
    table = editor.constant(np.zeros((VOCAB, HIDDEN), np.float32), "table")
    cos = editor.constant(np.zeros((rotary_rows, DIM // 2), np.float32), "cos_cache")
    hidden = editor.op("Gather", [table, ids])
    lengths = editor.op("Cast", [editor.op("ReduceSum", [mask, editor.constant(np.array([1]))])], to=ir.DataType.INT32)
    presents = []
    for layer in range(layers):
        pasts = [
            editor.input(f"past_key_values.{layer}.{kind}", cache, ["batch_size", HEADS, "past_sequence_length", DIM])
            for kind in ("key", "value")
        ]
        node = ir.node(
            "GroupQueryAttention",
            [hidden, hidden, hidden, *pasts, lengths, lengths, cos, cos],
            attributes={"num_heads": 2, "kv_num_heads": 2, "local_window_size": windows[layer], "softcap": softcap},
            domain="com.microsoft",
            num_outputs=3,
            name=f"attention_{layer}",
        )
        graph.append(node)
        hidden = node.outputs[0]
        for value, kind in zip(node.outputs[1:], ("key", "value"), strict=True):
            value.name, value.type, value.shape = f"present.{layer}.{kind}", ir.TensorType(cache), pasts[0].shape
            presents.append(value)
    logits = editor.op("MatMul", [hidden, editor.constant(np.zeros((HIDDEN, VOCAB), np.float32), "head")])
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch_size", "sequence_length", VOCAB])
    graph.outputs.extend([logits, *presents])
    return ir.Model(graph, ir_version=10)


def read(folder: Path, model: ir.Model, **config: object) -> Decoder:
    """The decoder that is read of the model's file beside a configuration."""
    ir.save(model, folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "model_type": "made", **config}))
    return load_decoder(folder / "model.onnx", folder)


def test_a_cache_that_only_group_query_attention_reads_is_shared(tmp_path: Path) -> None:
    info = read(tmp_path, decoder()).info
    assert (info.kv_form, info.attention) == ("shared", "GroupQueryAttention")
    assert not info.left_padding
    assert not info.ragged_chunks


def test_an_operator_that_keeps_only_a_window_sets_the_shortest_buffer(tmp_path: Path) -> None:
    model = decoder(windows=(16, -1))
    node = next(node for node in model.graph if node.name == "attention_0")
    assert read(tmp_path, model).info.buffer_least == 0
    node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
    assert read(tmp_path, model).info.buffer_least == 16


def lose_the_window(node: ir.Node) -> None:
    node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
    del node.attributes["local_window_size"]


def give_an_infinite_window(node: ir.Node) -> None:
    node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
    node.attributes["local_window_size"] = ir.AttrFloat32("local_window_size", float("inf"))


def lose_inputs(node: ir.Node) -> None:
    node.resize_inputs(5)


def become_a_softmax_without_inputs(node: ir.Node) -> None:
    node.domain, node.op_type = "", "Softmax"
    node.resize_inputs(0)


@pytest.mark.parametrize(
    "damage", [lose_the_window, give_an_infinite_window, lose_inputs, become_a_softmax_without_inputs]
)
def test_a_damaged_operator_counts_as_one_without_the_feature(
    tmp_path: Path, damage: Callable[[ir.Node], None]
) -> None:
    model = decoder(softcap=50.0)
    for node in [node for node in model.graph if node.domain == "com.microsoft"]:
        damage(node)
    found = read(tmp_path, model, attn_logit_softcapping=50.0)
    assert found.info.buffer_least == 0


def test_rows_may_be_padded_on_the_right_unless_a_node_caches_a_window(tmp_path: Path) -> None:
    model = decoder()
    assert read(tmp_path, model).info.right_padding
    node = next(node for node in model.graph if node.name == "attention_1")
    node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 16)
    assert not read(tmp_path, model).info.right_padding


def test_a_cache_with_other_readers_is_concatenated(tmp_path: Path) -> None:
    model = decoder()
    past = next(value for value in model.graph.inputs if value.name == "past_key_values.1.value")
    editor = GraphEditor(model.graph, "other")
    editor.op("Shape", [past])
    editor.finish()
    assert read(tmp_path, model).info.kv_form == "concat"


@pytest.mark.parametrize("cache", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_precision_caches_are_described(tmp_path: Path, cache: ir.DataType) -> None:
    assert read(tmp_path, decoder(cache=cache)).info.kv_dtype == cache.name.lower()


def test_a_quantised_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"int8.*without a quantised cache"):
        read(tmp_path, decoder(cache=ir.DataType.INT8))


@pytest.mark.parametrize(
    ("name", "advice"), [("key_cache.0", "--static-cache"), ("block_table", "use_paged_attention")]
)
def test_unsupported_layouts_are_named_in_the_refusal(tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(UnsupportedModelError, match=advice):
        read(tmp_path, decoder(extra_input=name))


def test_a_rotary_table_shorter_than_the_context_limits_sequences(tmp_path: Path) -> None:
    found = read(tmp_path, decoder(rotary_rows=48))
    assert found.info.context_length == 48
    assert "48 rows, fewer than the context of 64 tokens" in found.notices[0]


def test_a_table_of_position_embeddings_limits_sequences() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="decoder")
    editor = GraphEditor(graph, "made")
    positions = editor.input("position_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
    flat = editor.op("Reshape", [positions, editor.constant(np.array([-1]))])
    editor.op("Gather", [editor.constant(np.zeros((30, 8), np.float32)), flat])
    assert sequence_limit(graph, 64, None)[0] == 30
    assert sequence_limit(graph, 20, None)[0] == 20


def test_a_window_that_the_graph_ignores_limits_sequences(tmp_path: Path) -> None:
    found = read(tmp_path, decoder(), sliding_window=16)
    assert found.info.context_length == 16
    assert "ignores the model's sliding window" in found.notices[0]


@pytest.mark.parametrize(
    ("windows", "config", "tokens"),
    [
        ((16, 16), {"sliding_window": 16}, 64),
        ((16, -1), {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, 64),
        ((16, -1), {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}, 16),
        ((32, 32), {"sliding_window": 16}, 16),
        ((-1, -1), {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 64),
        ((-1, -1), {"sliding_window": 16, "use_sliding_window": False}, 64),
        ((-1, -1), {"sliding_window": None}, 64),
        ((-1, -1), {"sliding_window": 4096}, 64),
    ],
)
def test_as_many_layers_must_have_the_window_as_the_configuration_states(
    tmp_path: Path, windows: tuple[int, int], config: dict[str, object], tokens: int
) -> None:
    assert read(tmp_path, decoder(windows=windows), **config).info.context_length == tokens


def test_the_window_comes_from_genai_config_without_a_config_json() -> None:
    assert window_of({}, {"sliding_window": {"window_size": 16, "layers": []}}) == Window(16, None)
    assert window_of({}, {"sliding_window": {"window_size": 16, "layers": [0, 2]}}) == Window(16, 2)
    assert window_of({}, {"sliding_window": {"window_size": -1, "layers": []}}) is None
    assert window_of({"model_type": "llama"}, {"sliding_window": {"window_size": 16}}) is None


@pytest.mark.parametrize(("number", "found"), [(16, True), (-16, True), (15, True), (17, True), (64, False)])
def test_a_window_in_plain_operators_is_a_number_in_a_comparison(number: int, found: bool) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="decoder")
    editor = GraphEditor(graph, "made")
    distance = editor.input("distance", ir.DataType.INT64, ["sequence_length"])
    editor.op("Greater", [distance, editor.constant(np.int64(number))])
    editor.op("Reshape", [distance, editor.constant(np.array([16]))])  # a size, not a comparison
    assert applies_window(graph, Window(16, None)) is found


@pytest.mark.parametrize(("softcap", "lost"), [(50.0, None), (0.0, 50.0), (30.0, 50.0)])
def test_a_missing_soft_cap_is_stated(tmp_path: Path, softcap: float, lost: float | None) -> None:
    model = decoder(softcap=softcap)
    assert lost_soft_cap(model.graph, {"attn_logit_softcapping": 50.0}) == lost
    assert lost_soft_cap(model.graph, {"attn_logit_softcapping": None}) is None
    notices = read(tmp_path, model, attn_logit_softcapping=50.0).notices
    assert ["does not apply the soft cap of 50" in notice for notice in notices] == ([True] if lost else [])


@pytest.mark.parametrize("capped", [True, False])
def test_a_soft_cap_in_plain_operators_is_a_tanh_before_the_softmax(capped: bool) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="decoder")
    editor = GraphEditor(graph, "made")
    scores = editor.input("scores", ir.DataType.FLOAT, ["n", "m"])
    value = editor.op("Tanh", [scores]) if capped else scores
    editor.op("Softmax", [editor.op("Add", [editor.op("Mul", [value, value]), scores])])
    assert (lost_soft_cap(graph, {"attn_logit_softcapping": 50.0}) is None) is capped
