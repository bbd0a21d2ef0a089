"""Find the products of a graph whose right factor is a constant matrix."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""The element types of weights that can be quantised."""


@dataclass(frozen=True)
class Product:
    """A product data @ weight, with a bias if there is one.

    nodes: the product's nodes in order; the last one makes the output.
    weight, tensor: the initializer and its data, [outputs, inputs] if `by_output`, else [inputs, outputs].
    bias: [outputs], or None.
    """

    nodes: tuple[ir.Node, ...]
    weight: ir.Value
    tensor: ir.TensorProtocol
    by_output: bool
    bias: ir.Value | None = None

    @property
    def data(self) -> ir.Value | None:
        """The left factor in the current graph, in which earlier replacements may have changed it."""
        return self.nodes[0].inputs[0]

    @property
    def outputs(self) -> int:
        return int(self.tensor.shape[0 if self.by_output else 1])

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names that exclude patterns can match."""
        return self.nodes[0].name, self.weight.name


def find_products(graph: ir.Graph) -> list[Product]:
    """Return the MatMul and Gemm nodes with a constant float matrix on the right, in the order of the graph."""
    found = (
        _match_matmul(node) if node.op_type == "MatMul" else _match_gemm(node) for node in graph if _is_product(node)
    )
    return [product for product in found if product is not None]


def stored_tensor(value: ir.Value | None, rank: int) -> ir.TensorProtocol | None:
    """Return the tensor of `value` if it is a float initializer of `rank` dimensions, else None."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    return tensor if tensor is not None and len(tensor.shape) == rank and tensor.dtype in FLOATS else None


def _is_product(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("MatMul", "Gemm")


def _match_matmul(node: ir.Node) -> Product | None:
    found = _match_matrix(node.inputs[1])
    if found is None or node.inputs[0] is None:
        return None
    product = Product((node,), *found)
    added = _match_added_bias(node, product.outputs)
    return product if added is None else Product((node, added[0]), *found, added[1])


def _match_gemm(node: ir.Node) -> Product | None:
    found = _match_matrix(node.inputs[1])
    if (
        node.inputs[0] is None
        or found is None
        or number_attribute(node, "transA", 0)
        or number_attribute(node, "alpha", 1) != 1
    ):
        return None
    weight, tensor, transposed = found
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    product = Product((node,), weight, tensor, transposed != bool(number_attribute(node, "transB", 0)), bias)
    if bias is not None and (number_attribute(node, "beta", 1) != 1 or not _is_bias(bias, product.outputs)):
        return None
    return product


def _match_matrix(value: ir.Value | None) -> tuple[ir.Value, ir.TensorProtocol, bool] | None:
    if value is None:
        return None
    tensor = stored_tensor(value, 2)
    if tensor is not None:
        return value, tensor, False
    node = value.producer()
    source = node.inputs[0] if node is not None and (node.domain, node.op_type) == ("", "Transpose") else None
    tensor = stored_tensor(source, 2)
    if node is None or source is None or tensor is None:
        return None
    permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else (1, 0)
    return (source, tensor, True) if tuple(permutation) == (1, 0) else None


def _match_added_bias(matmul: ir.Node, outputs: int) -> tuple[ir.Node, ir.Value] | None:
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
    tensor = stored_tensor(value, 1)
    return tensor is not None and int(tensor.shape[0]) == outputs


def number_attribute(node: ir.Node, name: str, default: float) -> float:
    """Return a numeric attribute of a node, or `default` if the node does not state it."""
    return float(node.attributes[name].value) if name in node.attributes else default
