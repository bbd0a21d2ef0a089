"""Experts as onnxruntime's MoE, and their matrices as stored tensors that can be read one expert at a time.

The operator chooses the k experts with the largest softmax of its router input, and uses that softmax as weights. So
the router input is the logarithm of the given weights, and the output is multiplied by their sum. This is exact for all
positive weights, whatever router computed them.

Two kinds of weights take another form: those that may be negative, and those in half precision, whose logarithms are
too coarse. Each row (a token with one of its experts) then becomes a token with a single expert, and its output is
multiplied by the weight.

The CPU kernel (onnxruntime 1.27 to 1.31)
- supports interleaved gates only;
- returns zeros in float16, unless the matrices are quantised;
- clears its output before it reads its input, although onnxruntime gives both the same memory if their shapes are
  equal. So the dimension of the output's rows has another name than that of the input's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph import (
    CONTRIB_DOMAIN,
    ROUTER_PROPERTY,
    GraphEditor,
    LazyWeight,
    Read,
    constant_integer,
    derive_weight,
    fixed_size,
    is_op,
    required_node_input,
)
from topw_deploy.export.trace.experts import EXPERTS_OP, GATED, PRODUCT_OP
from topw_deploy.export.trace.placeholders import PLACEHOLDER_DOMAIN

OPERATOR = "MoE"
_SMALLEST_WEIGHT = 1e-37  # replaces smaller weights and those of experts not chosen: its logarithm is finite
_CHOSEN_LOGIT = 100.0  # the router input of a row's only expert; others have 0, and exp(-100) is negligible beside 1
_NO_LIMIT = float(np.finfo(np.float32).max)
_OUTPUT_ROWS = "routed_tokens"  # a dimension name that no input has
_Change = Callable[[np.ndarray], np.ndarray]
_WIDTH_MULTIPLE = 32  # two of the smallest blocks of quantised weights
# Operators whose output is never negative.
_NEVER_NEGATIVE = {"Softmax", "Sigmoid", "Exp", "Softplus", "Relu", "Abs", "Sqrt", "ReduceL1", "ReduceL2"}
# Operators whose output is not negative if the first input is not.
_NONNEGATIVE_IF_FIRST_IS = {
    *("TopK", "Gather", "GatherElements", "GatherND", "Slice", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Transpose"),
    *("Identity", "Expand", "Split", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "Flatten", "Pow"),
}
# Operators whose output is not negative if no input is.
_NONNEGATIVE_IF_ALL_ARE = {"Mul", "Div", "Add", "Max", "Min", "Concat", "Sum"}


def operator_refusal(placeholder: ir.Node, stacks: list[LazyWeight | None], *, quantised: bool) -> str | None:
    """The reason why MoE cannot replace an `Experts` placeholder; None if it can.

    stacks: `stored_stack` of the placeholder's two matrices.
    quantised: the matrices will be quantised.
    """
    hidden = placeholder.inputs[0]
    if hidden is None or None in stacks or any(stored_stack(bias) is None for bias in placeholder.inputs[5:]):
        return "its matrices are computed"
    sizes = [int(stack.shape[2]) for stack in stacks if stack is not None]
    if hidden.dtype != ir.DataType.FLOAT and not (quantised and all(size % _WIDTH_MULTIPLE == 0 for size in sizes)):
        return f"it computes in {hidden.dtype}"
    return None


def add_moe(editor: GraphEditor, placeholder: ir.Node, stacks: list[LazyWeight]) -> ir.Value:
    """Compute an `Experts` placeholder by MoE; `refusal` must return None for it. Returns [tokens, D].

    stacks: up (and gate) [E, N, D] and down [E, D, I].
    """
    op = editor.op
    hidden, ids, weights = (required_node_input(value) for value in placeholder.inputs[:3])
    experts, count = int(stacks[0].shape[0]), fixed_size(ids, 1)
    chosen = op("Equal", [op("Unsqueeze", [ids, [2]]), np.arange(experts)])
    if hidden.dtype == ir.DataType.FLOAT and is_nonnegative(weights):
        weights_by_expert = op("Where", [chosen, op("Unsqueeze", [weights, [2]]), np.float32(0)])
        dense = op("ReduceSum", [weights_by_expert, [1]], keepdims=0)  # [tokens, E]
        router = op("Log", [op("Max", [dense, np.float32(_SMALLEST_WEIGHT)])], dtype=hidden.dtype)
        mixed = _add_operator(editor, placeholder, stacks, hidden, router, count)
        return op("Mul", [mixed, op("ReduceSum", [weights, [1]], keepdims=1)])
    kind = hidden.dtype.numpy() if hidden.dtype is not None else np.float32
    flags = op("Cast", [chosen], to=hidden.dtype)
    table = op("Reshape", [op("Mul", [flags, np.array(_CHOSEN_LOGIT, kind)]), [-1, experts]])
    width = fixed_size(hidden, 1)
    repeats = op("Concat", [op("Shape", [ids]), [width]], axis=0)
    wide = op("Expand", [op("Unsqueeze", [hidden, [1]]), repeats])  # [tokens, k, D]
    rows = op("Reshape", [wide, [-1, width]], dtype=hidden.dtype, shape=["routed", width])
    outputs = op("Reshape", [_add_operator(editor, placeholder, stacks, rows, table, 1), repeats])
    weighted = op("Mul", [outputs, op("Unsqueeze", [weights, [2]])])
    return op("ReduceSum", [weighted, [1]], keepdims=0)


def is_nonnegative(value: ir.Value | None) -> bool:
    """Whether the operators that compute `value` prove that no element is negative."""
    if value is None or value.is_graph_input():
        return False
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.size <= 1 << 16 and bool((tensor.numpy() >= 0).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _NEVER_NEGATIVE:
        return True
    if node.op_type == "Where":
        return all(map(is_nonnegative, node.inputs[1:]))
    if node.op_type in _NONNEGATIVE_IF_FIRST_IS:
        return value is node.outputs[0] and is_nonnegative(node.inputs[0])
    if node.op_type == "ScatterElements":
        return is_nonnegative(node.inputs[0]) and is_nonnegative(node.inputs[2])
    return node.op_type in _NONNEGATIVE_IF_ALL_ARE and all(map(is_nonnegative, node.inputs))


def _add_operator(
    editor: GraphEditor, placeholder: ir.Node, stacks: list[LazyWeight], rows: ir.Value, router: ir.Value, count: int
) -> ir.Value:
    """Add a MoE with the placeholder's activation, matrices and biases. Returns [R, D].

    rows: its tokens, [R, D].
    router: logits of the experts, [R, E].
    count: number of experts that it chooses for each row.
    """
    attributes: dict[str, Any] = {"k": count, "normalize_routing_weights": 0}
    attributes["activation_type"] = activation = placeholder.attributes["activation"].as_string()
    if activation == GATED:
        limit = placeholder.attributes["limit"].as_float()
        attributes |= {"swiglu_fusion": 1, "swiglu_limit": limit or _NO_LIMIT}
        attributes |= {f"activation_{name}": placeholder.attributes[name].as_float() for name in ("alpha", "beta")}
    interleave = activation == GATED and not placeholder.attributes["interleaved"].as_int()
    up, down, up_bias, down_bias = [*placeholder.inputs[3:], None, None][:4]
    inputs: list[ir.Value | None] = [rows, router]
    biases = stored_stack(up_bias), stored_stack(down_bias)
    for value, stack in zip((up, up_bias, down, down_bias), (stacks[0], biases[0], stacks[1], biases[1]), strict=True):
        if stack is not None and interleave and len(inputs) < 4:
            stack = interleave_rows(stack)
        inputs.append(None if value is None or stack is None else stored_value(editor, value, stack))
    while inputs[-1] is None:
        inputs.pop()
    shape: list[int | str | None] = [_OUTPUT_ROWS, fixed_size(rows, 1)]
    return editor.op(OPERATOR, inputs, domain=CONTRIB_DOMAIN, dtype=rows.dtype, shape=shape, **attributes)


def stored_stack(value: ir.Value | None) -> LazyWeight | None:
    """The tensor of `value`, with experts in the first axis, if its nodes only rearrange stored weights; else None."""
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if node is None:
        if value.const_value is not None and not isinstance(value.const_value, LazyWeight):
            value.const_value = _lazy(value.const_value)
        return value.const_value
    if is_op(node, "Concat") and node.attributes["axis"].as_int() in (1, -2):
        return _join_rows([stored_stack(part) for part in node.inputs])
    source = stored_stack(node.inputs[0]) if node.op_type in ("Reshape", "Slice", "Transpose") else None
    shape = None if value.shape is None else [size for size in value.shape if isinstance(size, int)]
    if source is None or node.domain or shape is None or len(shape) != 3:
        return None
    if is_op(node, "Transpose"):
        swaps = "perm" in node.attributes and list(node.attributes["perm"].as_ints()) == [0, 2, 1]
        return change_stack(source, lambda experts: experts.swapaxes(1, 2), "transposed") if swaps else None
    if is_op(node, "Reshape"):
        return _split_experts(source, shape)
    return _first_experts(source, node, shape)


def stored_value(editor: GraphEditor, value: ir.Value | None, stack: LazyWeight | None) -> ir.Value:
    """An initializer with the weights `stack`, so that no run rearranges them.

    Returns `value` itself if it has them already, or if `stack` is None.
    """
    value = required_node_input(value)
    if stack is None or (value.const_value is stack and value.producer() is None):
        return value
    return editor.initializer(stack, editor.unique(str(stack.name)))


def change_stack(stack: LazyWeight, change: _Change, label: str) -> LazyWeight:
    """Apply `change` to `stack` whenever it is read.

    change: takes and returns the matrices [n, N, K] of any number of experts.
    label: ends the name of the changed tensor.
    """
    one = change(np.empty((1, *_sizes(stack)[1:]), np.int8))
    shape = (_sizes(stack)[0], *one.shape[1:])
    return derive_weight(stack, shape, change, lambda source, index: change(source(index)), label)


def interleave_rows(stack: LazyWeight) -> LazyWeight:
    """Reorder the rows [gates; ups] of matrices [E, N, K] or biases [E, N] to [gate 0, up 0, gate 1, ...]."""
    order = np.arange(_sizes(stack)[1]).reshape(2, -1).T.reshape(-1)
    return change_stack(stack, lambda rows: rows[:, order], "interleaved")


def _lazy(tensor: ir.TensorProtocol) -> LazyWeight:
    """`tensor` as a LazyWeight, which can be read one expert at a time."""
    shape = tuple(int(size) for size in tensor.shape)
    read = lambda index: tensor.numpy()[index]  # noqa: E731
    return LazyWeight(id(tensor), tensor.dtype, shape, lambda: tensor, read, tensor.name)


def _sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


def _split_experts(stack: LazyWeight, shape: list[int]) -> LazyWeight | None:
    """[E * N, K] -> [E, N, K], which is `shape`; None if the sizes do not agree."""
    experts, rows, columns = shape
    if _sizes(stack) != (experts * rows, columns):
        return None

    def read(source: Read, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(experts)
        return source(slice(start * rows, stop * rows)).reshape(-1, rows, columns)

    whole_shape = (experts, rows, columns)
    return derive_weight(stack, whole_shape, lambda whole: whole.reshape(whole_shape), read, f"split_{experts}")


def _first_experts(stack: LazyWeight, node: ir.Node, shape: list[int]) -> LazyWeight | None:
    """The first experts of `stack`, as the Slice `node` takes them; None if it takes something else."""
    start, axis = (constant_integer(node.inputs[place]) for place in (1, 3)) if len(node.inputs) > 3 else (None, None)
    if start != 0 or axis != 0 or _sizes(stack)[1:] != tuple(shape[1:]) or shape[0] > _sizes(stack)[0]:
        return None
    count = shape[0]
    read: Callable[[Read, slice], np.ndarray] = lambda source, index: source(slice(*index.indices(count)))  # noqa: E731
    return derive_weight(stack, tuple(shape), lambda whole: whole[:count], read, f"first_{count}")


def _join_rows(stacks: list[LazyWeight | None]) -> LazyWeight | None:
    """Join the matrices [E, N_i, K] of each expert to [E, N, K]; None if one is None or has another rank."""
    found = [stack for stack in stacks if stack is not None]
    if len(found) < len(stacks) or any(len(stack.shape) != 3 for stack in found):
        return None
    shape = (_sizes(found[0])[0], sum(_sizes(stack)[1] for stack in found), _sizes(found[0])[2])

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([stack.numpy() for stack in found], axis=1), dtype=found[0].dtype)

    reads = [stack.read for stack in found if stack.read is not None]
    read = None
    if len(reads) == len(found):
        read = lambda index: np.concatenate([one(index) for one in reads], axis=1)  # noqa: E731
    key = tuple(stack.key for stack in found)
    return LazyWeight(key, found[0].dtype, shape, whole, read, "+".join(str(stack.name) for stack in found))


_PREFIX = "topw.experts"


def lower_experts(model: ir.Model, *, operator: bool, quantised: bool = False) -> int:
    """Replace every placeholder of experts in `model` in place. Returns the number of placeholders.

    operator: use onnxruntime's MoE where it can replace the placeholder.
    quantised: the matrices will be quantised, for which MoE supports half precision.
    """
    placeholders = [
        node for node in model.graph if node.domain == PLACEHOLDER_DOMAIN and node.op_type in (EXPERTS_OP, PRODUCT_OP)
    ]
    if not placeholders:
        return 0
    lowering = _Lowering(model, operator=operator, quantised=quantised)
    for placeholder in placeholders:
        _mark_router(placeholder)
        lowering.replace(placeholder)
    RemoveUnusedNodesPass()(model)
    lowering.editor.finish()
    return len(placeholders)


class _Lowering:
    def __init__(self, model: ir.Model, *, operator: bool, quantised: bool) -> None:
        self.editor = GraphEditor(model.graph, _PREFIX)
        self._model, self._operator, self._quantised = model, operator, quantised
        self._blocks: dict[int, ExpertBlocks] = {}

    def replace(self, placeholder: ir.Node) -> None:
        old = placeholder.outputs[0]
        made = self._product(placeholder) if placeholder.op_type == PRODUCT_OP else self._experts(placeholder)
        made.type, made.shape = old.type, old.shape
        self.editor.replace(placeholder, made)

    def _experts(self, placeholder: ir.Node) -> ir.Value:
        matrices = placeholder.inputs[3:5]
        stacks = [stored_stack(value) for value in matrices]
        reason = operator_refusal(placeholder, stacks, quantised=self._quantised)
        if self._operator and reason is None:
            self._model.opset_imports[CONTRIB_DOMAIN] = 1
            return add_moe(self.editor, placeholder, [stack for stack in stacks if stack is not None])
        flat = self.editor.op("Reshape", [placeholder.inputs[1], [-1]])
        blocks = self._blocks_of(placeholder.inputs[1], flat, fixed_size(required_node_input(matrices[0]), 0))
        weights = [stored_value(self.editor, *pair) for pair in zip(matrices, stacks, strict=True)]
        return _experts_in_blocks(self.editor, placeholder, blocks, weights)

    def _product(self, placeholder: ir.Node) -> ir.Value:
        rows, ids, weight, bias = [*placeholder.inputs, None][:4]
        blocks = self._blocks_of(ids, ids, fixed_size(required_node_input(weight), 0))
        matrices = stored_value(self.editor, weight, stored_stack(weight))
        products = blocks.product(blocks.columns(required_node_input(rows)), matrices, bias)
        return blocks.rows(products, fixed_size(required_node_input(weight), 1))

    def _blocks_of(self, key: ir.Value | None, ids: ir.Value | None, experts: int) -> ExpertBlocks:
        """The blocks of `ids`. Placeholders with the same `key` share them.

        experts: number of experts.
        """
        if id(key) not in self._blocks:
            self._blocks[id(key)] = ExpertBlocks(self.editor, required_node_input(ids), experts)
        return self._blocks[id(key)]


def _mark_router(placeholder: ir.Node) -> None:
    """Mark the products that compute a placeholder's ids and weights, so that quantisation leaves them.

    Rounding their weights would change which experts are chosen.
    """
    pending = list(placeholder.inputs[1 : 2 if placeholder.op_type == PRODUCT_OP else 3])
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type in ("MatMul", "Gemm"):
            node.metadata_props[ROUTER_PROPERTY] = "yes"
        elif node.domain == "":
            pending += node.inputs


class ExpertBlocks:
    """The rows of one placeholder, grouped into blocks by expert.

    ids: each row's expert, int64 [R].
    experts: number of experts, E.
    count: number of blocks, B; int64 [1].
    height: number of rows in a block, H; int64 [1].
    """

    def __init__(self, editor: GraphEditor, ids: ir.Value, experts: int) -> None:
        self._editor, self.experts = editor, experts
        op = editor.op
        rows = op("Shape", [ids])
        self.height = op("Div", [op("Add", [rows, [experts - 1]]), [experts]])
        most_experts = op("Min", [rows, [experts]])  # experts that can have rows
        self.count = op("Min", [rows, op("Add", [op("Div", [rows, self.height]), most_experts])])
        self._slot_of_row, self._expert_of_block = self._assign_slots(ids, rows)
        # The row of each slot, int64 [B * H]. Unused slots have row 0; no row reads their results.
        empty = op("Expand", [[0], op("Mul", [self.count, self.height])])
        numbers = op("Range", [0, op("Squeeze", [rows]), 1])
        self._row_of_slot = op("ScatterElements", [empty, self._slot_of_row, numbers], axis=0)

    def _assign_slots(self, ids: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The slot of each row in the blocks, int64 [R], and the expert of each block, int64 [B].

        Sums are in float32, as TensorRT needs, and exact up to 2**24 rows.
        """
        op = self._editor.op
        of_expert = op("Equal", [op("Unsqueeze", [ids, [1]]), np.arange(self.experts)])
        chosen = op("Cast", [of_expert], to=ir.DataType.FLOAT)  # [R, E]
        earlier = op("Mul", [op("CumSum", [chosen, 0], exclusive=1), chosen])
        place = op("ReduceSum", [earlier, [1]], keepdims=0)  # [R], of a row among its expert's rows
        height = op("Cast", [self.height], to=ir.DataType.FLOAT)
        filled = op("ReduceSum", [chosen, [0]], keepdims=0)  # [E]
        blocks = op("Ceil", [op("Div", [filled, height])])
        ends = op("CumSum", [blocks, 0])  # [E]
        starts = op("ReduceSum", [op("Mul", [chosen, op("Sub", [ends, blocks])]), [1]], keepdims=0)  # [R]
        slots = op("Cast", [op("Add", [op("Mul", [starts, height]), place])], to=ir.DataType.INT64)
        numbers = op("Range", [0, op("Squeeze", [self.count]), 1])
        begun = op(
            "GreaterOrEqual", [op("Unsqueeze", [op("Cast", [numbers], to=ir.DataType.FLOAT), [1]]), ends]
        )  # [B, E]
        before = op("ReduceSum", [op("Cast", [begun], to=ir.DataType.FLOAT), [1]], keepdims=0)
        inside = op("Min", [before, np.float32(self.experts - 1)])  # for unused blocks at the end
        return slots, op("Cast", [inside], to=ir.DataType.INT64)

    def columns(self, source: ir.Value, repeated: int = 1) -> ir.Value:
        """The rows of `source` as the columns of the blocks, [B, K, H].

        source: [R / repeated, K].
        repeated: number of experts of each row of `source`.
        """
        op = self._editor.op
        index = self._row_of_slot
        if repeated > 1:
            index = op("Div", [index, [repeated]])
        shape = op("Concat", [self.count, self.height, [fixed_size(source, 1)]], axis=0)
        blocks = op("Reshape", [op("Gather", [source, index], axis=0, dtype=source.dtype), shape])
        return op("Transpose", [blocks], perm=[0, 2, 1], dtype=source.dtype)

    def product(self, columns: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Multiply each block with its expert's matrix, and add its bias. Returns [B, N, H].

        columns: [B, K, H].
        weight: [E, N, K].
        bias: [E, N] or None.
        """
        op = self._editor.op
        copies = op("Gather", [weight, self._expert_of_block], axis=0, dtype=columns.dtype)  # [B, N, K]
        products = op("MatMul", [copies, columns], dtype=columns.dtype)
        if bias is None:
            return products
        terms = op("Gather", [bias, self._expert_of_block], axis=0)
        terms = op("Unsqueeze", [terms, [2]])
        return op("Add", [products, terms], dtype=columns.dtype)

    def rows(self, columns: ir.Value, width: int) -> ir.Value:
        """The columns of the blocks [B, width, H] as rows [R, width], in the order of `ids`."""
        op = self._editor.op
        flat = op("Reshape", [op("Transpose", [columns], perm=[0, 2, 1]), [-1, width]])
        return op("Gather", [flat, self._slot_of_row], axis=0, dtype=columns.dtype, shape=["routed", width])


def _experts_in_blocks(
    editor: GraphEditor, placeholder: ir.Node, blocks: ExpertBlocks, matrices: list[ir.Value]
) -> ir.Value:
    """Compute an `Experts` placeholder in `blocks`. Returns [tokens, D].

    matrices: up (and gate) [E, N, D] and down [E, D, I].
    """
    op = editor.op
    hidden, ids, weights = placeholder.inputs[:3]
    biases = [*placeholder.inputs[5:], None, None][:2]
    count, width = fixed_size(ids, 1), fixed_size(hidden, 1)
    up = blocks.product(blocks.columns(hidden, count), matrices[0], biases[0])
    down = blocks.product(_activate(editor, up, placeholder), matrices[1], biases[1])
    outputs = op("Reshape", [blocks.rows(down, width), [-1, count, width]])  # [tokens, k, D]
    weighted = op("Mul", [outputs, op("Unsqueeze", [weights, [2]])])
    return op("ReduceSum", [weighted, [1]], keepdims=0)


def _activate(editor: GraphEditor, up: ir.Value, placeholder: ir.Node) -> ir.Value:
    """Apply the placeholder's activation to `up` [B, N, H]. Returns [B, I, H]."""
    op = editor.op
    name = placeholder.attributes["activation"].as_string()
    if name == "identity":
        return up
    if name in ("relu", "gelu"):
        extra = {"approximate": "tanh"} if name == "gelu" else {}
        return op(name.capitalize(), [up], dtype=up.dtype, **extra)
    if name == "silu":
        return op("Mul", [up, op("Sigmoid", [up])], dtype=up.dtype)
    alpha, beta, limit = (placeholder.attributes[key].as_float() for key in ("alpha", "beta", "limit"))
    if placeholder.attributes["interleaved"].as_int():  # rows are [gate 0, up 0, gate 1, ...]
        end = np.iinfo(np.int64).max
        gate, linear = (op("Slice", [up, [start], [end], [1], [2]], dtype=up.dtype) for start in (0, 1))
    else:
        gate, linear = editor.outputs("Split", [up], 2, axis=1, num_outputs=2)
    kind = up.dtype.numpy().type if up.dtype is not None else np.float32
    if limit:
        gate = op("Min", [gate, kind(limit)])
        linear = op("Clip", [linear, kind(-limit), kind(limit)])
    scaled = gate if math.isclose(alpha, 1.0) else op("Mul", [gate, kind(alpha)])
    linear = op("Add", [linear, kind(beta)]) if beta else linear
    return op("Mul", [op("Mul", [gate, op("Sigmoid", [scaled])]), linear], dtype=up.dtype)
