"""Experts as onnxruntime's MoE.

The operator chooses the k experts with the largest softmax of its router input, and uses that softmax as weights. So
the router input is the logarithm of the given weights, and the output is multiplied by their sum. This is exact for any
positive weights, whatever router computed them.

Weights that may be negative, and weights in half precision, whose logarithms are too coarse, take another form: each
row (a token with one of its experts) becomes a token with a single expert, and its output is multiplied by the weight.

The CPU kernel (1.23 to 1.31)
- supports interleaved gates only;
- returns zeros in float16, unless quantised;
- clears its output before it reads its input, although onnxruntime gives both the same memory if their shapes are
  equal. So the output's rows have another dimension name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, fixed_size, required
from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.lowering.experts_weights import interleaved, stored_stack, stored_value
from topw_deploy.export.trace.experts import GATED

DOMAIN = "com.microsoft"
OPERATOR = "MoE"
_LEAST = 1e-37  # smallest weight, also that of experts not chosen: its logarithm is finite
_FAR = 100.0  # exp(-_FAR) is negligible beside 1
_UNLIMITED = float(np.finfo(np.float32).max)
_ROWS = "routed_tokens"  # no input has a dimension of this name
_WIDTH = 32  # two of the smallest blocks of quantised weights
# Operators whose output is never negative.
_POSITIVE = {"Softmax", "Sigmoid", "Exp", "Softplus", "Relu", "Abs", "Sqrt", "ReduceL1", "ReduceL2"}
# Operators whose output is not negative if the first input is not.
_OF_FIRST = {
    *("TopK", "Gather", "GatherElements", "GatherND", "Slice", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Transpose"),
    *("Identity", "Expand", "Split", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "Flatten", "Pow"),
}
# Operators whose output is not negative if no input is.
_OF_ALL = {"Mul", "Div", "Add", "Max", "Min", "Concat", "Sum"}


def refusal(marker: ir.Node, stacks: list[LazyWeight | None], *, quantised: bool) -> str | None:
    """Why MoE cannot replace an `Experts` marker, or None if it can."""
    hidden = marker.inputs[0]
    if hidden is None or None in stacks or any(stored_stack(bias) is None for bias in marker.inputs[5:]):
        return "its matrices are computed"
    sizes = [int(stack.shape[2]) for stack in stacks if stack is not None]
    if hidden.dtype != ir.DataType.FLOAT and not (quantised and all(size % _WIDTH == 0 for size in sizes)):
        return f"it computes in {hidden.dtype}"
    return None


def experts_of(editor: GraphEditor, marker: ir.Node, stacks: list[LazyWeight]) -> ir.Value:
    """The output of an `Experts` marker, [tokens, D]; stacks: [E, N, D] and [E, D, I]. `refusal` must be None."""
    op, constant = editor.op, editor.constant
    hidden, ids, weights = (required(value) for value in marker.inputs[:3])
    experts, count = int(stacks[0].shape[0]), fixed_size(ids, 1)
    chosen = op("Equal", [op("Unsqueeze", [ids, constant(np.array([2]))]), constant(np.arange(experts))])
    if hidden.dtype == ir.DataType.FLOAT and is_positive(weights):
        spread = op("Where", [chosen, op("Unsqueeze", [weights, constant(np.array([2]))]), constant(np.float32(0))])
        dense = op("ReduceSum", [spread, constant(np.array([1]))], keepdims=0)  # [tokens, E]
        router = op("Log", [op("Max", [dense, constant(np.float32(_LEAST))])], dtype=hidden.dtype)
        mixed = _operator(editor, marker, stacks, hidden, router, count)
        return op("Mul", [mixed, op("ReduceSum", [weights, constant(np.array([1]))], keepdims=1)])
    kind = hidden.dtype.numpy() if hidden.dtype is not None else np.float32
    flags = op("Cast", [chosen], to=hidden.dtype)
    table = op("Reshape", [op("Mul", [flags, constant(np.array(_FAR, kind))]), constant(np.array([-1, experts]))])
    width = fixed_size(hidden, 1)
    repeats = op("Concat", [op("Shape", [ids]), constant(np.array([width]))], axis=0)
    wide = op("Expand", [op("Unsqueeze", [hidden, constant(np.array([1]))]), repeats])  # [tokens, k, D]
    rows = op("Reshape", [wide, constant(np.array([-1, width]))], dtype=hidden.dtype, shape=["rows", width])
    outputs = op("Reshape", [_operator(editor, marker, stacks, rows, table, 1), repeats])
    weighted = op("Mul", [outputs, op("Unsqueeze", [weights, constant(np.array([2]))])])
    return op("ReduceSum", [weighted, constant(np.array([1]))], keepdims=0)


def is_positive(value: ir.Value | None) -> bool:
    """Whether no element of `value` can be negative, by the operators behind it."""
    if value is None or value.is_graph_input():
        return False
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.size <= 1 << 16 and bool((tensor.numpy() >= 0).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _POSITIVE:
        return True
    if node.op_type == "Where":
        return all(map(is_positive, node.inputs[1:]))
    if node.op_type in _OF_FIRST:
        return value is node.outputs[0] and is_positive(node.inputs[0])
    if node.op_type == "ScatterElements":
        return is_positive(node.inputs[0]) and is_positive(node.inputs[2])
    return node.op_type in _OF_ALL and all(map(is_positive, node.inputs))


def _operator(
    editor: GraphEditor, marker: ir.Node, stacks: list[LazyWeight], rows: ir.Value, router: ir.Value, count: int
) -> ir.Value:
    attributes: dict[str, Any] = {"k": count, "normalize_routing_weights": 0}
    attributes["activation_type"] = activation = marker.attributes["activation"].as_string()
    if activation == GATED:
        limit = marker.attributes["limit"].as_float()
        attributes |= {"swiglu_fusion": 1, "swiglu_limit": limit or _UNLIMITED}
        attributes |= {f"activation_{name}": marker.attributes[name].as_float() for name in ("alpha", "beta")}
    pair = activation == GATED and not marker.attributes["interleaved"].as_int()
    up, down, up_bias, down_bias = [*marker.inputs[3:], None, None][:4]
    inputs: list[ir.Value | None] = [rows, router]
    for value, stack, changes in ((up, stacks[0], pair), (up_bias, stored_stack(up_bias), pair)):
        inputs.append(_kept(editor, value, stack, interleave=changes))
    for value, stack in ((down, stacks[1]), (down_bias, stored_stack(down_bias))):
        inputs.append(_kept(editor, value, stack, interleave=False))
    while inputs[-1] is None:
        inputs.pop()
    shape: list[int | str | None] = [_ROWS, fixed_size(rows, 1)]
    return editor.op(OPERATOR, inputs, domain=DOMAIN, dtype=rows.dtype, shape=shape, **attributes)


def _kept(
    editor: GraphEditor, value: ir.Value | None, stack: LazyWeight | None, *, interleave: bool
) -> ir.Value | None:
    if value is None or stack is None:
        return None
    return stored_value(editor, value, interleaved(stack) if interleave else stack)
