"""Finding the products with constant weights in a decoder's graph, in the forms that tracing and lowering leave."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class Product:
    """data x weight (+ bias), made by `nodes`, the last of them giving it.

    weight: the initializer, [outputs, inputs] if by_output, else [inputs, outputs]. bias: an initializer [outputs].
    """

    nodes: tuple[ir.Node, ...]
    weight: ir.Value
    by_output: bool
    bias: ir.Value | None

    @property
    def data(self) -> ir.Value | None:
        """What is multiplied, as the graph stands now."""
        return self.nodes[0].inputs[0]

    @property
    def names(self) -> tuple[str | None, ...]:
        """What a pattern may call it: its first node, its weight."""
        return self.nodes[0].name, self.weight.name


def find_products(graph: ir.Graph) -> list[Product]:
    """Every MatMul and Gemm with one constant float matrix on its right, in the graph's order."""
    found = (_of_matmul(node) if node.op_type == "MatMul" else _of_gemm(node) for node in graph if _is_product(node))
    return [product for product in found if product is not None]


def is_stored(value: ir.Value | None, rank: int) -> bool:
    """Whether `value` is an initializer of `rank` dimensions and a float type."""
    return (
        value is not None
        and value.const_value is not None
        and not value.is_graph_input()
        and len(value.const_value.shape) == rank
        and value.const_value.dtype in _FLOATS
    )


def _is_product(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("MatMul", "Gemm")


def _of_matmul(node: ir.Node) -> Product | None:
    weight = _matrix(node.inputs[1])
    if weight is None or node.inputs[0] is None:
        return None
    outputs = _outputs(*weight)
    add = _added_bias(node, outputs)
    if add is None:
        return Product((node,), *weight, None)
    return Product((node, add[0]), *weight, add[1])


def _of_gemm(node: ir.Node) -> Product | None:
    weight = _matrix(node.inputs[1])
    if node.inputs[0] is None or weight is None or _number(node, "transA", 0) or _number(node, "alpha", 1) != 1:
        return None
    by_output = weight[1] != bool(_number(node, "transB", 0))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return Product((node,), weight[0], by_output, None)
    if _number(node, "beta", 1) != 1 or not _is_bias(bias, _outputs(weight[0], by_output)):
        return None
    return Product((node,), weight[0], by_output, bias)


def _matrix(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """The initializer behind a product's right side, and whether it is stored transposed."""
    if value is not None and is_stored(value, 2):
        return value, False
    node = value.producer() if value is not None else None
    if node is None or node.domain != "" or node.op_type != "Transpose" or not is_stored(node.inputs[0], 2):
        return None
    permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else (1, 0)
    assert node.inputs[0] is not None
    return (node.inputs[0], True) if tuple(permutation) == (1, 0) else None


def _outputs(weight: ir.Value, by_output: bool) -> int:
    assert weight.const_value is not None
    return int(weight.const_value.shape[0 if by_output else 1])


def _added_bias(matmul: ir.Node, outputs: int) -> tuple[ir.Node, ir.Value] | None:
    """The Add of a constant vector that alone uses the product, and the vector."""
    product = matmul.outputs[0]
    uses = product.uses()
    if len(uses) != 1 or product.is_graph_output():
        return None
    add, position = uses[0]
    if add.domain != "" or add.op_type != "Add":
        return None
    bias = add.inputs[1 - position]
    return (add, bias) if bias is not None and _is_bias(bias, outputs) else None


def _is_bias(value: ir.Value, outputs: int) -> bool:
    return is_stored(value, 1) and value.const_value is not None and int(value.const_value.shape[0]) == outputs


def _number(node: ir.Node, name: str, default: float) -> float:
    return float(node.attributes[name].value) if name in node.attributes else default
