"""Find the weights of a graph that can be quantised: of products, of the token table, and of experts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingNode, find_embedding
from topw_deploy.export.graph import (
    LazyWeight,
    Read,
    derive_weight,
    number_attribute,
    stored_tensor,
)
from topw_deploy.export.products import Product, match_product
from topw_deploy.export.quantise.rounding import Quantisation

DOMAIN = "com.microsoft"
MOE_MATRICES = (2, 4)
"""The inputs of MoE that are matrices; the input after each is its bias."""


def find_products(graph: ir.Graph) -> list[Product]:
    """Return the MatMul and Gemm nodes with a constant float matrix on the right, in the order of the graph."""
    found = (match_product(node) for node in graph if node.domain == "" and node.op_type in ("MatMul", "Gemm"))
    return [product for product in found if product is not None]


@dataclass(frozen=True)
class ExpertWeight:
    """One matrix of all experts of a layer, [experts, outputs, inputs].

    node: the MoE or Gather node that uses it.
    place: the input of `node`.
    value, tensor: the initializer and its data.
    """

    node: ir.Node
    place: int
    value: ir.Value
    tensor: ir.TensorProtocol

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names that exclude patterns can match."""
        return self.node.name, self.value.name

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        experts, outputs, inputs = (int(size) for size in self.tensor.shape)
        return experts, outputs, inputs

    def rows(self) -> LazyWeight:
        """The matrices of all experts as one, [experts * outputs, inputs], which reads whole experts."""
        experts, outputs, inputs = self.sizes

        def read(source: Read, index: slice) -> np.ndarray:
            first, last = index.start // outputs, math.ceil(index.stop / outputs)
            part = source(slice(first, last)).reshape(-1, inputs)
            return np.asarray(part[index.start - first * outputs : index.stop - first * outputs])

        shape = (experts * outputs, inputs)
        return derive_weight(self.tensor, shape, lambda whole: whole.reshape(-1, inputs), read, "rows")


def _find_experts(graph: ir.Graph) -> Iterator[ExpertWeight]:
    """The experts' matrices that are initializers, in the order of the graph."""
    for node in graph:
        places: tuple[int, ...] = ()
        if (node.domain, node.op_type) == (DOMAIN, "MoE"):
            places = MOE_MATRICES
        elif (node.domain, node.op_type) == ("", "Gather") and number_attribute(node, "axis", 0) == 0:
            places = (0,)
        for place in places:
            value = node.inputs[place]
            tensor = stored_tensor(value, 3)
            if value is not None and tensor is not None:
                yield ExpertWeight(node, place, value, tensor)


@dataclass(frozen=True)
class QuantisableWeights:
    """The weights of a graph that can be quantised.

    products: the products, except those that choose experts, and gates: products with a single output.
    embedding: the token table's lookup, if the table is a float initializer.
    head: the last product if it has one output per logit, else None. The token table may have more rows.
    """

    products: list[Product]
    embedding: EmbeddingNode | None
    experts: list[ExpertWeight]
    head: Product | None

    @classmethod
    def of(cls, graph: ir.Graph) -> QuantisableWeights:
        logits = next((value.shape for value in graph.outputs if value.name == "logits"), None)
        products = [each for each in find_products(graph) if not each.chooses_experts and each.outputs > 1]
        has_head = bool(products) and logits is not None and products[-1].outputs == logits[-1]
        head = products[-1] if has_head else None
        embedding: EmbeddingNode | None = None
        with contextlib.suppress(UnsupportedModelError):
            embedding = find_embedding(graph)
        if embedding is not None:
            is_float = stored_tensor(embedding.data[0], 2) is not None
            embedding = embedding if is_float and embedding.node.op_type == "Gather" else None
        return cls(products, embedding, list(_find_experts(graph)), head)

    def excluded(self, scheme: Quantisation) -> set[int]:
        """Return the ids of weights that a pattern excludes, by their name or by the name of a node that uses them.

        So a pattern that matches a tied head also excludes the table.
        """
        return {id(weight) for weight, names in self._uses() if scheme.excludes(*names)}

    def check_patterns(self, scheme: Quantisation) -> None:
        """Raises ParameterError for a pattern of `scheme.exclude` that matches no name."""
        known = [name for _, names in self._uses() for name in names]
        for pattern in scheme.exclude:
            if not replace(scheme, exclude=(pattern,)).excludes(*known):
                some = ", ".join(sorted({name for name in known if name})[:5])
                raise ParameterError(
                    f"the pattern {pattern!r} matches no node or weight to be quantised; their names are {some}, ...",
                    "exclude_nodes",
                )

    def _uses(self) -> list[tuple[ir.Value, tuple[str | None, ...]]]:
        uses = [(product.weight, product.names) for product in self.products]
        uses += [(weight.value, weight.names) for weight in self.experts]
        if self.embedding is not None:
            uses.append((self.embedding.data[0], (self.embedding.node.name, self.embedding.data[0].name)))
        return uses
