"""The linear layers of queries, keys, values and gates: find them in a trace, and fuse those that read the same input.

Between a linear layer and attention, transformers splits and transposes heads, often with per-head norms and rotary
embeddings. One fused product starts threads and rounds activations only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import (
    CONTRIB_DOMAIN,
    GraphEditor,
    attribute_values,
    constant_integer,
    constant_of,
    fixed_size,
    is_constant,
    producer,
    rank,
    rewrite_each,
)
from topw_deploy.export.lowering.rotary import rotary_producer
from topw_deploy.export.products import Product, match_product


@dataclass(frozen=True)
class MergedHeads:
    """Queries, keys or values whose heads are side by side.

    unrotated: [batch, sequence, heads * head_dim], before any rotary embedding.
    rotary: the RotaryEmbedding that the model applies to it, or None.
    """

    unrotated: ir.Value
    heads: int
    rotary: ir.Node | None = None

    def rotated(self, editor: GraphEditor) -> ir.Value:
        """Add the rotation, if there is one. Returns [batch, sequence, heads * head_dim]."""
        if self.rotary is None:
            return self.unrotated
        source = self.unrotated
        attributes = {**attribute_values(self.rotary), "num_heads": self.heads}
        inputs = [source, *self.rotary.inputs[1:]]
        return editor.op("RotaryEmbedding", inputs, dtype=source.dtype, shape=source.shape, **attributes)


def merge_heads(editor: GraphEditor, value: ir.Value) -> MergedHeads:
    """Put the heads of `value` [batch, heads, sequence, head_dim] side by side, before its rotation."""
    heads = fixed_size(value, 1)
    rotary = rotary_producer(value)
    source = value if rotary is None else rotary.inputs[0]
    return MergedHeads(_join_heads(editor, source), heads, rotary)


def _join_heads(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, heads, sequence, head_dim] -> [batch, sequence, heads * head_dim], from the linear layer if possible."""
    width = fixed_size(value, 1) * fixed_size(value, 3)
    rows = _untranspose_heads(editor, value)
    reshape = producer(rows, "Reshape")
    source = None if reshape is None else reshape.inputs[0]
    if source is not None and rank(source) == 3 and source.shape[-1] == width:
        return source
    shape: list[int | str | None] = ["batch_size", "sequence_length", width]
    return editor.op("Reshape", [rows, [0, 0, width]], dtype=value.dtype, shape=shape)


def _untranspose_heads(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, heads, sequence, head_dim] -> [batch, sequence, heads, head_dim].

    Moves norms and casts before the model's own transpose, which then has no reader.
    """
    node = value.producer()
    if node is not None and node.domain == "":
        source = node.inputs[0]
        permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
        if node.op_type == "Transpose" and source is not None and tuple(permutation) == (0, 2, 1, 3):
            return source
        if source is not None and _commutes_with_transpose(node):
            inner = _untranspose_heads(editor, source)
            inputs = [inner, *node.inputs[1:]]
            return editor.op(node.op_type, inputs, dtype=value.dtype, shape=inner.shape, **attribute_values(node))
    batch, heads, sequence, dim = value.shape
    return editor.op("Transpose", [value], perm=[0, 2, 1, 3], dtype=value.dtype, shape=[batch, sequence, heads, dim])


def _commutes_with_transpose(node: ir.Node) -> bool:
    """Whether `node` computes each head of each token alone."""
    norm = node.op_type == "RMSNormalization" and node.attributes["axis"].as_int() in (-1, 3)
    return norm or node.op_type == "Cast"


_ELEMENTWISE = {"Sigmoid", "Tanh", "Gelu", "Relu", "Erf", "Mul", "Div", "Add", "Pow", "Swish"}


def fuse_qkv(editor: GraphEditor, parts: Sequence[ir.Value]) -> ir.Value | None:
    """Fuse queries, keys and values [batch, sequence, n_i] into one value [batch, sequence, n]; None if impossible.

    If the model itself splits one product (Phi-3, GPT-2), returns that product's output. Other products need stored
    weights, the same input, and a bias in all or none of them.
    """
    return _whole_before_split(parts) or _fuse_products(editor, parts, "qkv")


def fuse_gate_up(model: ir.Model) -> int:
    """Fuse the products gate(x) and up(x) of gated layers, down(act(gate(x)) * up(x)). Returns the number of pairs.

    With two threads and 4-bit weights, steps are 3 % faster; with float32 weights, they take the same time.
    """
    return rewrite_each(model, "topw.gate", "Mul", _fuse_gate)


def _whole_before_split(parts: Sequence[ir.Value]) -> ir.Value | None:
    """The value whose last axis is split or sliced into exactly `parts`, in this order; else None."""
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
    """Fuse the linear layers behind the two factors of the Mul `product`. Returns whether they could be fused."""
    parts = [part for part in map(_linear_output_behind, product.inputs) if part is not None]
    if len(parts) != 2 or parts[0] is parts[1]:
        return False
    widths = {part.shape[-1] for part in parts if part.shape is not None}
    if len(widths) != 1 or not isinstance(width := widths.pop(), int):
        return False
    whole = _fuse_products(editor, parts, "gate_up")
    if whole is None:
        return False
    for old, new in zip(parts, editor.outputs("Split", [whole, [width, width]], 2, axis=-1), strict=True):
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new)
    return True


def _linear_output_behind(value: ir.Value | None) -> ir.Value | None:
    """The output of the only linear layer from which elementwise operators compute `value`; else None."""
    ends: list[ir.Value] = []
    pending = [value]
    while pending:
        value = pending.pop()
        if value is None or value.is_initializer() or any(value is end for end in ends):
            continue
        node = value.producer()
        if node is None or node.domain:
            return None
        if _product_of(value) is not None:
            ends.append(value)
        elif node.op_type in _ELEMENTWISE:
            pending += node.inputs
        else:
            return None
    return ends[0] if len(ends) == 1 else None


def _fuse_products(editor: GraphEditor, parts: Sequence[ir.Value], label: str) -> ir.Value | None:
    """Compute all `parts` by one product; None if impossible.

    The weight's name joins the names of the parts' weights, so that the patterns of --exclude-nodes still match it.
    """
    products = [product for part in parts if (product := _product_of(part)) is not None]
    kinds = {(id(product.data), product.by_output, product.bias is None) for product in products}
    if len(products) < len(parts) or len(kinds) > 1:
        return None
    first = products[0]
    axis = 0 if first.by_output else 1
    tensor = concatenated([product.tensor for product in products], axis)
    weight = editor.initializer(tensor, editor.unique(_joined_name([product.weight for product in products], label)))
    width = fixed_size(weight, axis)
    if first.by_output:
        weight = editor.op("Transpose", [weight], perm=[1, 0], dtype=parts[0].dtype)
    shape: list[int | str | None] = ["batch_size", "sequence_length", width]
    whole = editor.op("MatMul", [first.data, weight], dtype=parts[0].dtype, shape=shape)
    biases = [product.bias for product in products if product.bias is not None]
    if not biases:
        return whole
    terms = concatenated([constant_of(bias) for bias in biases])
    bias = editor.initializer(terms, editor.unique(_joined_name(biases, label)))
    return editor.op("Add", [whole, bias], dtype=parts[0].dtype, shape=shape)


def _joined_name(values: Sequence[ir.Value], label: str) -> str:
    return f"{'+'.join(str(value.name) for value in values)}.{label}"


def _product_of(value: ir.Value) -> Product | None:
    """The product, with its bias if it has one, whose output is `value`; None if there is none."""
    add = producer(value, "Add")
    factors = [value] if add is None else add.inputs
    for node in (producer(factor, "MatMul") for factor in factors):
        product = None if node is None else match_product(node)
        if product is not None and product.nodes[-1].outputs[0] is value:
            return product
    return None


def concatenated(tensors: Sequence[ir.TensorProtocol], axis: int = -1) -> ir.TensorProtocol:
    """Concatenate `tensors` along `axis` when the result is written: weights may be too large to hold until then."""
    shape = [int(size) for size in tensors[0].shape]
    shape[axis] = sum(int(tensor.shape[axis]) for tensor in tensors)
    dtype = tensors[0].dtype

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=axis), dtype=dtype)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape))


_BITS = 63  # of a nonnegative int64
# The low bits are summed apart: onnxruntime's CPU provider sums int64 as double, which is exact up to 53 bits.
_LOW_BITS = 32
_SKIP_NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def merge_reshapes(model: ir.Model) -> int:
    """Let each reshape that follows a reshape read the first one's input. Returns the number of changed reshapes.

    Leaves shapes that are not constant or contain 0: a 0 copies a size of the input, which would be another one.
    """
    return rewrite_each(model, "topw.reshape", "Reshape", _skip_first_reshape)


def _skip_first_reshape(_: GraphEditor, second: ir.Node) -> bool:
    first, shape = producer(second.inputs[0], "Reshape"), second.inputs[1]
    sizes = ir.convenience.get_const_tensor(shape) if shape is not None else None
    if first is None or sizes is None or (sizes.numpy() == 0).any():
        return False
    second.replace_input_with(0, first.inputs[0])
    return True


def spell_out_exclusive_or(model: ir.Model) -> int:
    """Replace each BitwiseXor of int64, which NVIDIA's parser lacks, by an Xor of bits.

    The operands must not be negative. Returns the number of replaced nodes.
    """
    return rewrite_each(model, "exclusive_or", "BitwiseXor", _replace_by_xor_of_bits)


def _replace_by_xor_of_bits(editor: GraphEditor, node: ir.Node) -> bool:
    op = editor.op
    powers = np.int64(2) ** np.arange(_BITS)

    def bits(value: ir.Value) -> ir.Value:
        """The bits of `value`, lowest first: bool [..., _BITS]."""
        shifted = op("Div", [op("Unsqueeze", [value, [-1]]), powers])
        return op("Cast", [op("Mod", [shifted, 2])], to=ir.DataType.BOOL)

    left, right = node.inputs
    differing = op("Where", [op("Xor", [bits(left), bits(right)]), powers, 0])
    halves = editor.outputs("Split", [differing, [_LOW_BITS, _BITS - _LOW_BITS]], 2, axis=-1)
    sums = [op("ReduceSum", [half, [-1]], keepdims=0) for half in halves]
    total = op("Add", sums, dtype=ir.DataType.INT64)
    total.shape = node.outputs[0].shape
    editor.replace(node, total)
    return True


def cast_rows_of_norms(model: ir.Model) -> int:
    """Cast the rows of each RMSNormalization to the type of its weights. Returns the number of casts.

    Gemma mixes half-precision rows with float32 weights. Opset 23 allows that, but onnxruntime 1.31.1 on CPU expands
    such a node wrongly. The operator casts the rows in the same way itself (`stash_type` 1), so no value changes.
    """
    return rewrite_each(model, "topw.norm", "RMSNormalization", _cast_rows)


def _cast_rows(editor: GraphEditor, norm: ir.Node) -> bool:
    rows, weights = norm.inputs[:2]
    if rows.dtype is None or weights.dtype in (None, rows.dtype):
        return False
    norm.replace_input_with(0, editor.op("Cast", [rows], to=weights.dtype, dtype=weights.dtype, shape=rows.shape))
    return True


def fuse_skip_norms(model: ir.Model) -> int:
    """Fuse each residual add with the norm that follows it. Returns the number of fused pairs."""
    fused = rewrite_each(model, "topw.skip", "Add", _fuse_skip_norm)
    if fused:
        model.opset_imports[CONTRIB_DOMAIN] = 1
    return fused


def _fuse_skip_norm(editor: GraphEditor, add: ir.Node) -> bool:
    total = add.outputs[0]
    norms = [node for node, place in total.uses() if place == 0 and node.op_type in _SKIP_NORMS and not node.domain]
    if len(norms) != 1 or not _adds_rows(add) or not _norms_rows(norms[0]):
        return False
    norm = norms[0]
    if len({value.dtype for value in (*add.inputs, *norm.inputs[1:], norm.outputs[0]) if value is not None}) > 1:
        return False
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    inputs = [*add.inputs, *norm.inputs[1:]]
    results = editor.outputs(_SKIP_NORMS[norm.op_type], inputs, 4, domain=CONTRIB_DOMAIN, epsilon=epsilon)
    for old, new in ((norm.outputs[0], results[0]), (total, results[3])):
        new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    for statistic in results[1:3]:  # mean and deviation are for training; an empty name omits an optional output
        statistic.name = ""
    editor.graph.remove([add, norm], safe=True)
    return True


def _adds_rows(add: ir.Node) -> bool:
    """Whether `add` sums two hidden states of the same shape, [batch, sequence, hidden]."""
    first, second = add.inputs
    if first is None or second is None or is_constant(first) or is_constant(second):
        return False
    return rank(first) == 3 and first.shape == second.shape


def _norms_rows(norm: ir.Node) -> bool:
    """Whether `norm` is over the last of three axes, with weights [hidden] that do not depend on inputs."""
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    return axis in (-1, 2) and all(is_constant(value) and rank(value) == 1 for value in norm.inputs[1:])
