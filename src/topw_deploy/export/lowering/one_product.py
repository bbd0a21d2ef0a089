"""Several linear layers of one value as one matrix product: the weights side by side.

A decode step reads each weight once, so the products cost what one does, and more starts of all threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor


def joined(editor: GraphEditor, parts: Sequence[ir.Value], label: str) -> ir.Value | None:
    """The `parts` [batch, sequence, n_i] as one value [batch, sequence, n]: one product with the weights side by side,
    and one sum with the biases. None if they are not products of one value with weights of the file, each with a bias
    or each without. The new weights have the names of all old ones, so that a pattern for any of them finds them, and
    end in `label`.
    """
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
        side_by_side([value.const_value for value in stored], axis), editor.unique(_name(stored, label))
    )
    width = int(weight.shape[axis])  # type: ignore[arg-type,index]
    if turned == {True}:
        weight = editor.op("Transpose", [weight], perm=[1, 0], dtype=parts[0].dtype)
    shape: list[int | str | None] = ["batch_size", "sequence_length", width]
    whole = editor.op("MatMul", [sources[0], weight], dtype=parts[0].dtype, shape=shape)
    if biases[0] is None:
        return whole
    terms = side_by_side([bias.const_value for bias in biases])
    bias = editor.initializer(terms, editor.unique(_name(biases, label)))
    return editor.op("Add", [whole, bias], dtype=parts[0].dtype, shape=shape)


def _name(values: Sequence[ir.Value], label: str) -> str:
    return f"{'+'.join(str(value.name) for value in values)}.{label}"


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
