"""Replace products with 4- and 8-bit weights by calls of functions (docs/contract/graph.md, section 8).

`MatMulNBits` is a function of onnxruntime's MatMulNBits, with the same inputs and attributes. So other parts of the
exporter read both alike. `MatMulNBitsWithOffsets` also adds the offsets of the weights' blocks. The native library has
operators of these names, which multiply several rows for less, with weights as they are in the file.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph import GraphEditor, attribute_values, number_attribute
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


def call_functions(model: ir.Model, opset: int) -> None:
    """Replace the products of `model` that round float32 activations to int8 by calls of the functions, in place.

    opset: of the standard operators.
    """
    editor, called = GraphEditor(model.graph, "products"), set()
    for node in [node for node in model.graph if _is_replaceable(node)]:
        found, inputs = _find_offsets(node), list(node.inputs)
        if found is not None:
            inputs += [None] * (len(_INPUTS) - len(inputs)) + [found.offsets]
        op_type, old = (OP_TYPE, node) if found is None else (WITH_OFFSETS, found.add)
        call = ir.node(op_type, inputs, attributes=attribute_values(node), domain=OWN_DOMAIN, name=node.name)
        call.outputs[0].type, call.outputs[0].shape = old.outputs[0].type, old.outputs[0].shape
        model.graph.insert_before(old, call)
        editor.replace(old, call.outputs[0])
        if old is not node:
            model.graph.remove(node, safe=True)
        called.add(op_type)
    for op_type in sorted(called):
        function = _build_function(op_type, opset)
        model.functions[function.identifier()] = function
        model.opset_imports[OWN_DOMAIN] = DOMAIN_VERSION
    RemoveUnusedNodesPass()(model)
    editor.finish()


def _is_replaceable(node: ir.Node) -> bool:
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


def _build_function(op_type: str, opset: int) -> ir.Function:
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
