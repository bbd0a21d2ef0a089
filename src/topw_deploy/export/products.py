"""The products of a graph with constant matrices: linear layers, with their biases."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from topw_deploy.export.graph import ROUTER_PROPERTY, is_op, number_attribute, producer, stored_tensor


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
    def inputs(self) -> int:
        return int(self.tensor.shape[1 if self.by_output else 0])

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names that exclude patterns can match."""
        return self.nodes[0].name, self.weight.name

    @property
    def chooses_experts(self) -> bool:
        return any(ROUTER_PROPERTY in node.metadata_props for node in self.nodes)


def match_product(node: ir.Node) -> Product | None:
    """The product of a MatMul or Gemm with a constant matrix on the right; None for another MatMul or Gemm."""
    found = _match_matrix(node.inputs[1])
    if node.inputs[0] is None or found is None:
        return None
    weight, tensor, by_output = found
    if node.op_type == "MatMul":
        product = Product((node,), weight, tensor, by_output)
        uses = node.outputs[0].uses()
        if len(uses) != 1 or node.outputs[0].is_graph_output():
            return product
        add, position = uses[0]
        bias = add.inputs[1 - position] if is_op(add, "Add") else None
        return replace(product, nodes=(node, add), bias=bias) if _is_bias(bias, product.outputs) else product
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    product = Product((node,), weight, tensor, by_output != bool(number_attribute(node, "transB", 0)), bias)
    if number_attribute(node, "transA", 0) or number_attribute(node, "alpha", 1) != 1:
        return None
    if bias is not None and (number_attribute(node, "beta", 1) != 1 or not _is_bias(bias, product.outputs)):
        return None
    return product


def _match_matrix(value: ir.Value | None) -> tuple[ir.Value, ir.TensorProtocol, bool] | None:
    if value is None:
        return None
    tensor = stored_tensor(value, 2)
    if tensor is not None:
        return value, tensor, False
    node = producer(value, "Transpose")
    source = None if node is None else node.inputs[0]
    tensor = stored_tensor(source, 2)
    if node is None or source is None or tensor is None:
        return None
    permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else (1, 0)
    return (source, tensor, True) if tuple(permutation) == (1, 0) else None


def _is_bias(value: ir.Value | None, outputs: int) -> bool:
    tensor = stored_tensor(value, 1)
    return tensor is not None and int(tensor.shape[0]) == outputs
