"""The weights of a written graph are put into the torch model, whatever rows the graph joins and reorders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.tiny_models import make_model
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.quantise import Quantisation, quantise
from topw_deploy.export.verification.dequantise import dequantise_model
from topw_deploy.manifest import MODEL_NAME

SCHEME = Quantisation(bits=4, block_size=16)


def write_products(folder: Path, weights: dict[str, np.ndarray]) -> Path:
    """A quantised graph in `folder` with the product of `x` and each weight [outputs, inputs], by name."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="products")
    editor = GraphEditor(graph, "test")
    x = editor.input("x", ir.DataType.FLOAT, ["rows", 32])
    for name, weight in weights.items():
        product = editor.op(
            "MatMul", [x, editor.constant(np.ascontiguousarray(weight.T), name)], dtype=ir.DataType.FLOAT
        )
        graph.outputs.append(product)
    model = ir.Model(graph, ir_version=11)
    quantise(model, SCHEME)
    ir.save(model, folder / MODEL_NAME)
    return folder


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama_tied")


def names_of(model: PreTrainedModel, *parts: str) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name, value) for name, value in model.named_parameters() if "layers.0" in name and name.split(".")[-2] in parts
    ]


@pytest.mark.parametrize("shuffled", [False, True])
def test_parts_of_a_joined_product_get_its_rows(model: PreTrainedModel, tmp_path: Path, shuffled: bool) -> None:
    parts = names_of(model, "q_proj", "k_proj", "v_proj")
    whole = np.concatenate([value.detach().numpy() for _, value in parts])
    order = np.random.default_rng(0).permutation(len(whole)) if shuffled else np.arange(len(whole))
    folder = write_products(tmp_path, {"+".join(name for name, _ in parts) + ".qkv_0": whole[order]})
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    check, note = dequantise_model(model, folder, SCHEME)
    assert check.passed
    assert "3 matrices" in check.detail
    assert note.text == "6.25 in products"  # 4, 32 / 16 and 4 / 16
    assert 0.2 < check.difference < 0.4  # rounding to nearest gives 0.29
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name, _ in parts}
    for name, value in parts:
        lost = (value - before[name]).norm() / before[name].norm()
        assert 0.01 < lost < 0.1


def change_graph(folder: Path, ending: str, change: object) -> None:
    graph_model = ir.load(folder / MODEL_NAME)
    for name, value in graph_model.graph.initializers.items():
        if str(name).endswith(ending) and value.const_value is not None:
            value.const_value = ir.tensor(change(value.const_value.numpy()), name=name)  # type: ignore[operator]
    ir.save(graph_model, folder / MODEL_NAME)


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("_zero_points", lambda zeros: zeros ^ 0x11),
        ("_scales", lambda scales: scales * np.float32(1.5)),
        ("_Q4", lambda codes: (codes << 4) | (codes >> 4)),
    ],
    ids=["zero points off by one", "scales too large", "the codes of a byte swapped"],
)
def test_wrong_codes_in_the_file_fail_the_check_or_stay_out_of_the_model(
    model: PreTrainedModel, tmp_path: Path, ending: str, change: object
) -> None:
    ((name, value),) = names_of(model, "o_proj")
    folder = write_products(tmp_path, {name: value.detach().numpy()})
    change_graph(folder, ending, change)
    before = value.detach().clone()
    check, _ = dequantise_model(model, folder, SCHEME)
    assert not check.passed or torch.equal(value, before)  # the model's logits then differ from the graph's


def test_rows_of_zeros_and_matrices_in_float_keep_their_values(model: PreTrainedModel, tmp_path: Path) -> None:
    """A padding token's row is zero, as may be any other."""
    ((name, value),) = names_of(model, "up_proj")
    with torch.no_grad():
        value[0] = 0.0
        value[5] = 0.0
    folder = write_products(tmp_path, {name: value.detach().numpy()})
    down = names_of(model, "down_proj")[0][1].detach().clone()
    check, _ = dequantise_model(model, folder, SCHEME)
    assert check.passed
    assert not value[[0, 5]].any()
    assert torch.equal(names_of(model, "down_proj")[0][1], down)
