"""Fuse linear layers with the same input into one product, which starts threads and rounds activations only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph.editor import GraphEditor, constant_integer, fixed_size, is_op, producer

_ELEMENTWISE = {"Sigmoid", "Tanh", "Gelu", "Relu", "Erf", "Mul", "Div", "Add", "Pow", "Swish"}


def fuse_qkv(editor: GraphEditor, parts: Sequence[ir.Value]) -> ir.Value | None:
    """Fuse queries, keys and values [batch, sequence, n_i] into [batch, sequence, n]; None if impossible.

    A product that the model itself splits (Phi-3, GPT-2) is used whole. Other products need stored weights, the same
    input, and a bias in all or none of them.
    """
    return _split_source(parts) or _fuse_products(editor, parts, "qkv")


def fuse_gate_up(model: ir.Model) -> int:
    """Fuse the products of gated layers, down(act(gate(x)) * up(x)). Returns the number of pairs.

    With two threads and 4-bit weights, steps are 3 % faster; with float32 weights, they take the same time.
    """
    editor = GraphEditor(model.graph, "topw.gate")
    fused = sum(_fuse_gate(editor, node) for node in list(model.graph) if is_op(node, "Mul"))
    if fused:
        editor.finish()
        RemoveUnusedNodesPass()(model)
    return fused


def _split_source(parts: Sequence[ir.Value]) -> ir.Value | None:
    nodes = [part.producer() for part in parts]
    first = nodes[0]
    if first is None or first.domain:
        return None
    whole = first.inputs[0]
    if whole is None or whole.shape is None:
        return None
    last_axis = (-1, len(whole.shape) - 1)
    if first.op_type == "Split":
        axis = first.attributes["axis"].as_int() if "axis" in first.attributes else 0
        return whole if list(first.outputs) == list(parts) and axis in last_axis else None
    end, width = 0, whole.shape[-1]
    for part in parts:
        node = producer(part, "Slice")
        if node is None or node.inputs[0] is not whole:
            return None
        start, stop, axis, step = (constant_integer(value) for value in (*node.inputs[1:], None, None, None)[:4])
        if axis not in last_axis or step not in (None, 1) or start != end or stop is None or stop <= end:
            return None
        end = min(stop, width)
    return whole if end == width else None


def _fuse_gate(editor: GraphEditor, product: ir.Node) -> bool:
    parts = [part for part in map(_linear_behind, product.inputs) if part is not None]
    if len(parts) != 2 or parts[0] is parts[1]:
        return False
    widths = {part.shape[-1] for part in parts if part.shape is not None}
    if len(widths) != 1 or not isinstance(width := widths.pop(), int):
        return False
    whole = _fuse_products(editor, parts, "gate_up")
    if whole is None:
        return False
    sizes = editor.constant(np.array([width, width]))
    for old, new in zip(parts, editor.outputs("Split", [whole, sizes], 2, axis=-1), strict=True):
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new)
    return True


def _linear_behind(value: ir.Value | None) -> ir.Value | None:
    ends: list[ir.Value] = []
    pending = [value]
    while pending:
        value = pending.pop()
        if value is None or value.is_initializer() or any(value is end for end in ends):
            continue
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "MatMul" or (node.op_type == "Add" and _is_biased(node)):
            ends.append(value)
        elif node.op_type in _ELEMENTWISE:
            pending += node.inputs
        else:
            return None
    return ends[0] if len(ends) == 1 else None


def _is_biased(add: ir.Node) -> bool:
    nodes = [value.producer() for value in add.inputs if value is not None and not value.is_initializer()]
    return len(nodes) == 1 and nodes[0] is not None and nodes[0].op_type == "MatMul"


def _fuse_products(editor: GraphEditor, parts: Sequence[ir.Value], label: str) -> ir.Value | None:
    """One product for all `parts`. Its weight's name joins the old names, so exclude patterns still match."""
    linear = [_linear(part) for part in parts]
    if any(one is None for one in linear):
        return None
    sources, weights, biases = zip(*(one for one in linear if one is not None), strict=True)
    if any(source is not sources[0] for source in sources) or len({bias is None for bias in biases}) > 1:
        return None
    transposed = {_is_transposed(weight) for weight in weights}  # stored as [out, in]
    if len(transposed) > 1:
        return None
    stored = [weight.producer().inputs[0] if transposed == {True} else weight for weight in weights]
    axis = 0 if transposed == {True} else 1
    tensor = concatenated([value.const_value for value in stored], axis)
    weight = editor.initializer(tensor, editor.unique(_name(stored, label)))
    width = fixed_size(weight, axis)
    if transposed == {True}:
        weight = editor.op("Transpose", [weight], perm=[1, 0], dtype=parts[0].dtype)
    shape: list[int | str | None] = ["batch_size", "sequence_length", width]
    whole = editor.op("MatMul", [sources[0], weight], dtype=parts[0].dtype, shape=shape)
    if biases[0] is None:
        return whole
    terms = concatenated([bias.const_value for bias in biases])
    bias = editor.initializer(terms, editor.unique(_name(biases, label)))
    return editor.op("Add", [whole, bias], dtype=parts[0].dtype, shape=shape)


def _name(values: Sequence[ir.Value], label: str) -> str:
    return f"{'+'.join(str(value.name) for value in values)}.{label}"


def _linear(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Input, weight [in, out] and bias [out] of a linear layer, else None."""
    bias = None
    add = producer(value, "Add")
    if add is not None:
        places = [place for place, term in enumerate(add.inputs) if _is_stored(term, 1)]
        if len(places) != 1:
            return None
        bias, value = add.inputs[places[0]], add.inputs[1 - places[0]]
    product = producer(value, "MatMul")
    if product is None or None in product.inputs:
        return None
    source, weight = product.inputs
    if not _is_stored(weight, 2) and not _is_transposed(weight):
        return None
    return source, weight, bias


def _is_transposed(weight: ir.Value) -> bool:
    node = producer(weight, "Transpose")
    return node is not None and _is_stored(node.inputs[0], 2)


def _is_stored(value: ir.Value | None, rank: int) -> bool:
    return (
        value is not None
        and value.const_value is not None
        and not value.is_graph_input()
        and len(value.const_value.shape) == rank
    )


def concatenated(tensors: Sequence[ir.TensorProtocol], axis: int = -1) -> ir.TensorProtocol:
    """Concatenate `tensors` when written: weights may be large."""
    shape = [int(size) for size in tensors[0].shape]
    shape[axis] = sum(int(tensor.shape[axis]) for tensor in tensors)
    dtype = tensors[0].dtype

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=axis), dtype=dtype)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape))
