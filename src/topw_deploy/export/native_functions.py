"""Call functions that the native library has operators for (docs/contract/graph.md, section 8).

`MatMulNBits` is a function of onnxruntime's MatMulNBits, with the same inputs and attributes. So other parts of the
exporter read both alike. `MatMulNBitsWithOffsets` also adds the offsets of the weights' blocks. The native operators
multiply several rows for less, with weights as they are in the file.

`GroupQueryAttention` is a function of onnxruntime's operator with one more input, `row_lengths`; with
`GroupQueryAttentionReadOnly`, which has one output, a layer reads the states of another. The native operators take any
number of new tokens of each row, and compute each as if it were alone.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph import GraphEditor, attribute_values, find_input, number_attribute
from topw_deploy.export.quantise.rewrite import OFFSETS
from topw_deploy.export.quantise.rounding import BLOCK_SIZES, DTYPE_BITS
from topw_deploy.export.quantise.weights import DOMAIN
from topw_deploy.export.sampler.node import DOMAIN as OWN_DOMAIN
from topw_deploy.export.sampler.node import DOMAIN_VERSION
from topw_deploy.export.sampler.ops import Ops

OP_TYPE, WITH_OFFSETS = "MatMulNBits", "MatMulNBitsWithOffsets"
_INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
_ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")
_INT8_ACTIVATIONS = 4  # the accuracy_level at which activations are rounded to int8, as the native operators do


ATTENTION, READ_ONLY = "GroupQueryAttention", "GroupQueryAttentionReadOnly"
_MOST_HEAD = 512  # elements of a head that the native operator takes
_ATTENTION_INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache"),
    *("sin_cache", "position_ids", "attention_bias", "head_sink", "row_lengths"),
)
_ATTENTION_ATTRIBUTES = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved"), ir.AttributeType.INT),
    **dict.fromkeys(("local_window_size", "sliding_window_cache"), ir.AttributeType.INT),
    **dict.fromkeys(("scale", "softcap"), ir.AttributeType.FLOAT),
}


def call_functions(model: ir.Model, opset: int) -> bool:
    """Replace nodes of `model` by calls of the functions, in place: products that round float32 activations to int8,
    and attention to a static float32 cache.

    opset: of the standard operators.

    Returns whether it replaced all nodes of onnxruntime's GroupQueryAttention, of which there is at least one.
    """
    editor, called = GraphEditor(model.graph, "products"), set()
    lengths = find_input(model.graph, "row_lengths")
    for node in list(model.graph):
        op_type, old, inputs = node.op_type, node, list(node.inputs)
        if _is_product(node):
            found = _find_offsets(node)
            if found is not None:
                inputs += [None] * (len(_INPUTS) - len(inputs)) + [found.offsets]
                op_type, old = WITH_OFFSETS, found.add
        elif lengths is not None and _is_attention(node):
            inputs += [None] * (len(_ATTENTION_INPUTS) - 1 - len(inputs)) + [lengths]
            op_type = READ_ONLY if len(node.outputs) == 1 else ATTENTION
        else:
            continue
        call = ir.node(
            op_type,
            inputs,
            attributes=attribute_values(node),
            domain=OWN_DOMAIN,
            name=node.name,
            num_outputs=len(old.outputs),
        )
        model.graph.insert_before(old, call)
        for value, result in zip(old.outputs, call.outputs, strict=True):
            result.type, result.shape = value.type, value.shape
        editor.replace(old, *call.outputs)
        if old is not node:
            model.graph.remove(node, safe=True)
        called.add(op_type)
    for op_type in sorted(called):
        build = _attention_function if op_type in (ATTENTION, READ_ONLY) else _product_function
        function = build(op_type, opset)
        model.functions[function.identifier()] = function
        model.opset_imports[OWN_DOMAIN] = DOMAIN_VERSION
    RemoveUnusedNodesPass()(model)
    editor.finish()
    left = any((node.domain, node.op_type) == (DOMAIN, ATTENTION) for node in model.graph)
    return not left and bool(called & {ATTENTION, READ_ONLY})


def _is_attention(node: ir.Node) -> bool:
    state = node.inputs[3] if (node.domain, node.op_type) == (DOMAIN, ATTENTION) else None
    return (
        state is not None
        and state.dtype == ir.DataType.FLOAT
        and state.shape is not None
        and isinstance(size := state.shape[-1], int)
        and size <= _MOST_HEAD
    )


def _attention_function(op_type: str, opset: int) -> ir.Function:
    inputs = [ir.Value(name=name) for name in _ATTENTION_INPUTS]
    references = [ir.RefAttr(name, name, kind) for name, kind in _ATTENTION_ATTRIBUTES.items()]
    node = ir.Node(DOMAIN, ATTENTION, inputs[:-1], references, num_outputs=1 if op_type == READ_ONLY else 3)
    for value, name in zip(node.outputs, ("output", "present_key", "present_value"), strict=False):
        value.name = name
    imports = {"": opset, DOMAIN: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name=op_type)
    attributes = [ir.Attr(name, kind, None) for name, kind in _ATTENTION_ATTRIBUTES.items()]
    return ir.Function(OWN_DOMAIN, op_type, graph=graph, attributes=attributes)


def _is_product(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, OP_TYPE):
        return False
    inputs = dict(zip(_INPUTS, node.inputs, strict=False))
    scales, zeros = inputs["scales"], inputs.get("zero_points")
    return (
        inputs.get("g_idx") is None
        and number_attribute(node, "accuracy_level", 0) == _INT8_ACTIVATIONS
        and number_attribute(node, "block_size", 0) in BLOCK_SIZES
        and number_attribute(node, "bits", 4) in DTYPE_BITS.values()
        and scales is not None
        and scales.dtype == ir.DataType.FLOAT
        and (zeros is None or zeros.dtype == ir.DataType.UINT8)
    )


class _Offsets(NamedTuple):
    """The offsets [N, blocks] of a product's weight, and the node that adds their part to the product."""

    add: ir.Node
    offsets: ir.Value


def _find_offsets(product: ir.Node) -> _Offsets | None:
    """The offsets that `quantise/rewrite.py` noted, for activations of rank 3; None if there are none."""
    offsets, uses = product.meta.get(OFFSETS), product.outputs[0].uses()
    return None if offsets is None or len(uses) != 1 else _Offsets(uses[0].node, offsets)


def _product_function(op_type: str, opset: int) -> ir.Function:
    op = Ops(branches=False)
    inputs = [ir.Value(name=name) for name in (*_INPUTS, *(["offsets"] if op_type == WITH_OFFSETS else []))]
    references = [ir.RefAttr(name, name, ir.AttributeType.INT) for name in _ATTRIBUTES]
    product = ir.Node(DOMAIN, OP_TYPE, inputs[: len(_INPUTS)], references)
    nodes, result = [product], product.outputs[0]
    result.name = "product"
    if op_type == WITH_OFFSETS:
        size = ir.Node("", "Constant", [], [ir.RefAttr("value_int", "block_size", ir.AttributeType.INT)])
        size.outputs[0].name = "size"
        shape = op.Concat([0, 0, -1], op.Reshape(size.outputs[0], [1]), axis=0)
        sums = op.ReduceSum(op.Reshape(inputs[0], shape), [-1], keepdims=0)
        result = op.Add(result, op.custom_op(DOMAIN, "FusedMatMul", [sums, inputs[-1]], {"transB": 1}))
        nodes += [size, *op.nodes]
    graph = ir.Graph(inputs, [result], nodes=nodes, opset_imports={"": opset, DOMAIN: 1}, name=op_type)
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in _ATTRIBUTES]
    return ir.Function(OWN_DOMAIN, op_type, graph=graph, attributes=attributes)
