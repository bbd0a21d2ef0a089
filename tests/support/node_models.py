"""Graphs whose only node is the sampler's operator, without the function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.kernel import COLUMNS
from topw_deploy.sampling import TopWOptions

INPUTS = {
    "logits": TensorProto.FLOAT,
    "edit_ids": TensorProto.INT64,
    "edit_penalty": TensorProto.FLOAT,
    "edit_bias": TensorProto.FLOAT,
    "allowed": TensorProto.INT32,
    **dict.fromkeys(COLUMNS, TensorProto.FLOAT),
    "rule": TensorProto.INT32,
    "rule_values": TensorProto.FLOAT,
}
OUTPUTS = {
    "next_token": TensorProto.INT64,
    "logprob": TensorProto.FLOAT,
    "kept": TensorProto.INT32,
    "certified": TensorProto.BOOL,
    "mass": TensorProto.FLOAT,
    "keep_mask": TensorProto.BOOL,
}


def node_model(
    options: TopWOptions, types: Mapping[str, int] | None = None, omitted: Sequence[str] = ()
) -> onnx.ModelProto:
    """The operator with the metric `uniform`. types: other element types of inputs; omitted: inputs to leave out."""
    kinds = {name: kind for name, kind in {**INPUTS, **(types or {})}.items() if name not in omitted}
    inputs = [
        helper.make_tensor_value_info(name, kind, ["batch"] if name in (*COLUMNS, "rule") else ["batch", f"n_{name}"])
        for name, kind in kinds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, kind, ["batch"] if name != "keep_mask" else ["batch", "vocab"])
        for name, kind in OUTPUTS.items()
    ]
    attributes = {"top_m": options.top_m, "alt_iters": options.alt_iters, "metric": "uniform", "knn_k": 0}
    node = helper.make_node("TopWSample", list(kinds), list(OUTPUTS), domain="topw", table_form="", **attributes)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("topw", 1)]
    return helper.make_model(helper.make_graph([node], "node", inputs, outputs), opset_imports=opsets, ir_version=10)


def no_rules(rows: int) -> dict[str, np.ndarray]:
    """The inputs `rule` and `rule_values` of Top-W for every row."""
    return {"rule": np.zeros(rows, np.int32), "rule_values": np.zeros((rows, 2), np.float32)}
