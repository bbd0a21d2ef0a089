"""One matrix product for queries, keys and values instead of three.

A decode step reads each weight once, so three products cost what one does plus two more starts of all threads. Where
the trace split one product into three parts (Phi-3, GPT-2), it is taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from topw_deploy.export.editor import GraphEditor

Parts = tuple[ir.Value, ir.Value | None, ir.Value | None]


def packed(editor: GraphEditor, parts: Sequence[ir.Value]) -> Parts | None:
    """The three `parts` [batch, sequence, n_i] as one value [batch, sequence, n] and two Nones; None if they are not
    products of one value with weights of the file, each with a bias or each without."""
    whole = _split_before(parts) or _joined(editor, parts)
    return None if whole is None else (whole, None, None)


def _split_before(parts: Sequence[ir.Value]) -> ir.Value | None:
    """The value that `parts` are consecutive slices of, leaving nothing out."""
    nodes = [part.producer() for part in parts]
    first = nodes[0]
    if first is None or first.domain:
        return None
    whole = first.inputs[0]
    if whole is None or whole.shape is None:
        return None
    if first.op_type == "Split":
        axis = first.attributes["axis"].as_int() if "axis" in first.attributes else 0
        return whole if list(first.outputs) == list(parts) and axis in (-1, len(whole.shape) - 1) else None
    end = 0
    for node in nodes:
        if node is None or node.op_type != "Slice" or node.domain or node.inputs[0] is not whole:
            return None
        start, stop, axis, step = (_number(value) for value in (*node.inputs[1:], None, None, None)[:4])
        plain = axis in (-1, len(whole.shape) - 1) and step in (None, 1)
        if not plain or start != end or stop is None or stop <= end:
            return None
        end = min(stop, whole.shape[-1])  # type: ignore[type-var]
    return whole if end == whole.shape[-1] else None


def _number(value: ir.Value | None) -> int | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return int(value.const_value.numpy().reshape(-1)[0])


def _joined(editor: GraphEditor, parts: Sequence[ir.Value]) -> ir.Value | None:
    """One product with the weights side by side, and one sum with the biases."""
    linear = [_linear(part) for part in parts]
    if any(one is None for one in linear):
        return None
    sources, weights, biases = zip(*(one for one in linear if one is not None), strict=True)
    if any(source is not sources[0] for source in sources) or len({bias is None for bias in biases}) > 1:
        return None
    turned = {_is_turned(weight) for weight in weights}  # stored as [out, in], with a Transpose in the graph
    if len(turned) > 1:
        return None
    stored = [weight.producer().inputs[0] if turned == {True} else weight for weight in weights]
    axis = 0 if turned == {True} else 1
    weight = editor.initializer(
        side_by_side([value.const_value for value in stored], axis), editor.unique(f"{stored[0].name}.qkv")
    )
    width = int(weight.shape[axis])  # type: ignore[arg-type,index]
    if turned == {True}:
        weight = editor.op("Transpose", [weight], perm=[1, 0], dtype=parts[0].dtype)
    shape: list[int | str | None] = ["batch_size", "sequence_length", width]
    whole = editor.op("MatMul", [sources[0], weight], dtype=parts[0].dtype, shape=shape)
    if biases[0] is None:
        return whole
    joined = side_by_side([bias.const_value for bias in biases])
    bias = editor.initializer(joined, editor.unique(f"{biases[0].name}.qkv"))
    return editor.op("Add", [whole, bias], dtype=parts[0].dtype, shape=shape)


def _linear(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Source, weight [in, out] and bias [out] or None of the linear layer that makes `value`."""
    node, bias = value.producer(), None
    if node is not None and (node.domain, node.op_type) == ("", "Add"):
        places = [place for place, term in enumerate(node.inputs) if _stored(term, 1)]
        if len(places) != 1:
            return None
        bias, product = node.inputs[places[0]], node.inputs[1 - places[0]]
        node = product.producer() if product is not None else None
    if node is None or (node.domain, node.op_type) != ("", "MatMul") or node.inputs[1] is None:
        return None
    if not _stored(node.inputs[1], 2) and not _is_turned(node.inputs[1]):
        return None
    source, weight = node.inputs
    assert source is not None
    assert weight is not None
    return source, weight, bias


def _is_turned(weight: ir.Value) -> bool:
    """Whether `weight` is a stored matrix, transposed."""
    node = weight.producer()
    return node is not None and (node.domain, node.op_type) == ("", "Transpose") and _stored(node.inputs[0], 2)


def _stored(value: ir.Value | None, rank: int) -> bool:
    return (
        value is not None
        and value.const_value is not None
        and not value.is_graph_input()
        and len(value.const_value.shape) == rank
    )


def side_by_side(tensors: Sequence[ir.TensorProtocol], axis: int = -1) -> ir.TensorProtocol:
    """Their concatenation along `axis`, made when it is written and not before: weights may be large."""
    shape = [int(size) for size in tensors[0].shape]
    shape[axis] = sum(int(tensor.shape[axis]) for tensor in tensors)
    dtype = tensors[0].dtype

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=axis), dtype=dtype)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape))
