"""The table of supported operators, one graph per rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from topw_deploy.tensorrt.model_file import read_model
from topw_deploy.tensorrt.operators import refusal_reason
from topw_deploy.tensorrt.scope import walk_nodes

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64


def refusals(folder: Path, nodes: Sequence[NodeProto], inputs: dict[str, tuple[int, list[int | str]]]) -> list[str]:
    values = [helper.make_tensor_value_info(name, *given) for name, given in inputs.items()]
    stored = [numpy_helper.from_array(np.array([4000]), "many"), numpy_helper.from_array(np.array([64]), "few")]
    graph = helper.make_graph(list(nodes), "g", values, [], [*stored, numpy_helper.from_array(np.uint8([1]), "bytes")])
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    found = (refusal_reason(node, scope) for node, scope in walk_nodes(read_model(folder / "model.onnx").graph))
    return [each for each in found if each is not None]


def branch(*nodes: NodeProto) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "branch", [], [helper.make_empty_tensor_value_info("y")])


def attention(*names: str, outputs: tuple[str, ...] = ("y",), **attributes: object) -> NodeProto:
    return helper.make_node("Attention", list(names), list(outputs), **attributes)


HEADS = {name: (HALF, ["b", 4, "s", 16]) for name in "qkv"}
NARROW = {name: (HALF, ["b", 4, "s", 8]) for name in "qkv"}
FULL = {name: (FLOAT, ["b", 4, "s", 16]) for name in "qkv"}
X = {"x": (FLOAT, ["b", 9])}
CACHE = {"new": (HALF, ["b", 2, "s", 16]), "at": (INT64, ["b"])}
SCATTER = helper.make_node("TensorScatter", ["cache", "new", "at"], ["y"], axis=2)
IF = helper.make_node("If", ["x"], ["y"], then_branch=branch(), else_branch=branch())
NESTED = helper.make_node("If", ["x"], ["y"], then_branch=branch(IF), else_branch=branch())
LOOPING = helper.make_node(
    "If", ["x"], ["y"], then_branch=branch(helper.make_node("Loop", ["few", ""], [], body=branch())),
    else_branch=branch(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("node", "inputs", "reason"),
    [
        (helper.make_node("Unique", ["x"], ["y"]), X, "no such operator"),
        (helper.make_node("NonZero", ["x"], ["y"]), X, "depends on values"),
        (helper.make_node("GroupQueryAttention", ["x"], ["y"], domain="com.microsoft"), X, "com.microsoft"),
        (helper.make_node("TopK", ["x", "many"], ["y", "i"]), X, "selects 4000"),
        (helper.make_node("ScatterElements", ["x", "few", "x"], ["y"], reduction="add"), X, "only without a reduction"),
        (helper.make_node("Gather", ["bytes", "few"], ["y"]), {}, "reads uint8"),
        (helper.make_node("ReduceSum", ["x", "axes"], ["y"]), {**X, "axes": (INT64, [1])}, "axes must be stored"),
        (attention("q", "k", "v", outputs=("y", "present")), HEADS, "one output"),
        (attention("q", "k", "v", "", "k", "v"), HEADS, "past keys"),
        (attention("q", "k", "v", "", "", "", "k"), HEADS, "nonpad_kv_seqlen"),
        (attention("q", "k", "v", softcap=2.0), HEADS, "softcap"),
        (attention("q", "k", "v"), NARROW, "this one is 8"),
        (attention("q", "k", "v"), FULL, "only in half precision"),
        (SCATTER, {**CACHE, "cache": (HALF, ["b", 2, "max_length", 16])}, "'max_length'"),
        (NESTED, X, "If inside another"),
        (LOOPING, X, "Loop inside an If"),
    ],
)  # fmt: skip
def test_what_tensorrt_does_not_take_is_named_with_the_reason(
    node: NodeProto, inputs: dict[str, tuple[int, list[int | str]]], reason: str, tmp_path: Path
) -> None:
    (found,) = refusals(tmp_path, [node], inputs)
    assert reason in found


@pytest.mark.parametrize(
    ("node", "inputs"),
    [
        (helper.make_node("TopK", ["x", "few"], ["y", "i"]), X),
        (helper.make_node("DequantizeLinear", ["bytes", "x"], ["y"]), X),
        (attention("q", "k", "v"), HEADS),
        (attention("q", "k", "v", "", "", "", outputs=("y", "", "")), HEADS),
        (SCATTER, {**CACHE, "cache": (HALF, ["b", 2, 128, 16])}),
        (IF, X),
    ],
)
def test_a_node_that_tensorrt_takes_has_no_refusal(
    node: NodeProto, inputs: dict[str, tuple[int, list[int | str]]], tmp_path: Path
) -> None:
    assert refusals(tmp_path, [node], inputs) == []


def test_types_follow_from_the_nodes_before(tmp_path: Path) -> None:
    widened = [helper.make_node("Cast", [name], [f"{name}32"], to=FLOAT) for name in "qkv"]
    scaled = helper.make_node("Mul", ["q32", "q32"], ["scaled"])
    found = refusals(tmp_path, [*widened, scaled, attention("scaled", "k32", "v32")], HEADS)
    assert found == ["TensorRT supports this operator only in half precision"]
