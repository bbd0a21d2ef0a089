"""Find the products of a graph whose right factor is a constant matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingNode, find_embedding
from topw_deploy.export.graph import ROUTER_PROPERTY, GraphEditor, initializer_tensors, number_attribute, stored_tensor
from topw_deploy.export.quantise.blocks import Origin, QuantisedWeight, RecentBlocks, StoredRows, row_reader
from topw_deploy.export.quantise.experts import ExpertsReplacer, ExpertWeight, find_experts
from topw_deploy.export.quantise.rounding import Quantisation
from topw_deploy.text import decimal_size


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


DOMAIN = "com.microsoft"
_NOTABLE = 0.01  # a notice names each weight left in float that has more than this share of all weight bytes


def quantise(
    model: ir.Model, scheme: Quantisation, stored: StoredRows | None = None, *, cut: bool = False
) -> list[str]:
    """Quantise `model` in place. Returns notices for the user about weights left in float.

    model: a lowered decoder without sampler.
    stored: the rows of a quantised checkpoint, whose codes are kept.
    cut: whether the model has only its first layers, so that exclude patterns need not match.

    Raises ParameterError for a pattern of `scheme.exclude` that matches nothing, and UnsupportedModelError if there is
    no product to quantise.
    """
    graph = model.graph
    before = sum(int(tensor.nbytes) for tensor in initializer_tensors(model))
    logits = next((value.shape for value in graph.outputs if value.name == "logits"), None)
    products = [product for product in find_products(graph) if not _chooses_experts(product)]
    found = _QuantisableWeights(products, _float_embedding(graph), find_experts(graph), logits[-1] if logits else None)
    if not cut:
        found.check_patterns(scheme)
    excluded = found.excluded(scheme)
    named = {value.name for value in graph.initializers.values() if id(value) in excluded}
    replacer = _Replacer(GraphEditor(graph, "quantised"), scheme, stored)
    table = found.embedding.data[0] if found.embedding is not None else None
    if found.embedding is not None and id(table) not in excluded and not replacer.quantise_table(found.embedding):
        excluded.add(id(table))  # a tied head then stays float too
    head = found.head()
    for product in found.products:
        if id(product.weight) not in excluded:
            replacer.quantise_product(product, scheme.table_scheme if product is head else scheme)
    experts = ExpertsReplacer(replacer.editor, scheme, stored, replacer.recent)
    replaced = experts.replace(weight for weight in found.experts if id(weight.value) not in excluded)
    _check_half_experts(graph)
    if not replacer.has_replaced and not replaced:
        raise UnsupportedModelError(
            "the decoder has no product with a constant matrix to quantise; export it with --dtype fp32."
        )
    _drop_unused(graph)
    model.opset_imports[DOMAIN] = 1
    replacer.editor.finish()
    routers = {product.weight.name for product in find_products(graph) if _chooses_experts(product)}
    known = named | routers | replacer.scale_names() | experts.scale_names
    notices = _notices(graph, scheme, before, known)
    if stored is not None:
        notices.append(
            f"{replacer.kept} of {len(found.products)} products keep the checkpoint's own codes, scales and zero points"
        )
        if found.experts:
            notices.append(f"{experts.kept} of {replaced} groups of experts keep them too")
    return notices


@dataclass(frozen=True)
class _QuantisableWeights:
    """The weights of a graph that can be quantised.

    products: the products, except those that choose experts.
    embedding: the token table's lookup, if the table is a float initializer.
    vocab: width of the logits; None if it is unknown.
    """

    products: list[Product]
    embedding: EmbeddingNode | None
    experts: list[ExpertWeight]
    vocab: int | ir.SymbolicDim | None

    def head(self) -> Product | None:
        """Return the last product if it has one output per logit, else None. The token table may have more rows."""
        last = self.products[-1] if self.products else None
        return last if last is not None and last.outputs == self.vocab else None

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


def _chooses_experts(product: Product) -> bool:
    return any(ROUTER_PROPERTY in node.metadata_props for node in product.nodes)


def _check_half_experts(graph: ir.Graph) -> None:
    """Raises ParameterError for an MoE node in half precision, for which onnxruntime's CPU kernel returns zeros."""
    for node in graph:
        left = node.inputs[2] if (node.domain, node.op_type) == (DOMAIN, "MoE") else None
        if left is not None and left.dtype != ir.DataType.FLOAT:
            raise ParameterError(
                f"the experts {left.name} would stay {left.dtype}, which onnxruntime cannot multiply on a CPU; do not "
                "exclude them, or leave --compute-dtype out.",
                "exclude_nodes",
            )


def _float_embedding(graph: ir.Graph) -> EmbeddingNode | None:
    try:
        found = find_embedding(graph)
    except UnsupportedModelError:
        return None
    return found if found.node.op_type == "Gather" and stored_tensor(found.data[0], 2) is not None else None


class _BlockInitializers:
    """The initializers of a quantised weight in a graph.

    codes: the shape of the codes' initializer, which a table and a product lay out differently.
    """

    def __init__(self, editor: GraphEditor, weight: QuantisedWeight, name: str, codes: tuple[int, ...]) -> None:
        self.shape = weight.shape
        # They are added one after the other, so that RecentBlocks quantises the weight once.
        self.codes = editor.initializer(weight.codes(codes), f"{name}_Q{weight.shape.bits}")
        self.scales = editor.initializer(weight.scales(), f"{name}_scales")
        zeros = weight.zero_points()
        self.zero_points = editor.initializer(zeros, f"{name}_zero_points") if zeros is not None else None


class _Replacer:
    """Replaces products and the token table's lookup by quantised nodes.

    kept: the number of products that keep a quantised checkpoint's codes.
    """

    def __init__(self, editor: GraphEditor, scheme: Quantisation, stored: StoredRows | None) -> None:
        self.editor, self.kept = editor, 0
        self._scheme, self._stored_rows, self.recent = scheme, stored, RecentBlocks()
        self._tables: dict[int, _BlockInitializers] = {}
        self._stored: dict[int, _BlockInitializers] = {}

    @property
    def has_replaced(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._stored or self._tables or self.kept)

    def scale_names(self) -> set[str | None]:
        """Return the names of the scales' initializers."""
        return {stored.scales.name for stored in (*self._stored.values(), *self._tables.values())}

    def quantise_table(self, embedding: EmbeddingNode) -> bool:
        """Quantise the token table. Returns whether it could: its rows must be whole blocks."""
        scheme = self._scheme.table_scheme
        table, node = embedding.data[0], embedding.node
        block_size = scheme.table_block_size(embedding.hidden)
        if block_size is None or table.const_value is None:
            return False
        weight = QuantisedWeight.of_tensor(
            table.const_value, by_output=True, block_size=block_size, scheme=scheme, recent=self.recent
        )
        flat = (embedding.rows, embedding.hidden * scheme.bits // 8)
        stored = _BlockInitializers(self.editor, weight, str(table.name), flat)
        # Absent zero points mean 2 ** (bits - 1), but some versions of onnxruntime's CUDA provider take 0 for tables.
        zero_points = stored.zero_points
        if zero_points is None:
            zero_points = self.editor.initializer(weight.middle_zero_points(), f"{table.name}_zero_points")
        inputs = [stored.codes, node.inputs[1], stored.scales, zero_points]
        attributes = {"bits": scheme.bits, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
        self._replace((node,), "GatherBlockQuantized", inputs, attributes, scheme)
        self._tables[id(table)] = stored
        return True

    def quantise_product(self, product: Product, scheme: Quantisation) -> None:
        """Replace a product by MatMulNBits: with the checkpoint's codes, the tied table's, or codes of its own."""
        origin = self._origin(product)
        if origin is not None and self._stored_rows is not None:
            self._keep_codes(product, self._stored_rows, origin)
            return
        weight = product.weight
        table = self._tables.get(id(weight)) if product.by_output else None
        if table is not None:
            self._stored.setdefault(id(weight), table)
            # onnxruntime computes this Reshape when it loads the file; the result is a view of the table's bytes.
            shape = table.shape.codes
            target = self.editor.constant([int(size) for size in shape])
            codes = self.editor.op("Reshape", [table.codes, target], dtype=ir.DataType.UINT8, shape=shape)
            self._replace_product(product, product.data, codes, table, scheme)
            return
        if id(weight) not in self._stored:
            made = QuantisedWeight.of_tensor(
                product.tensor,
                by_output=product.by_output,
                block_size=scheme.block_size,
                scheme=scheme,
                recent=self.recent,
            )
            self._stored[id(weight)] = _BlockInitializers(self.editor, made, str(weight.name), made.shape.codes)
        stored = self._stored[id(weight)]
        self._replace_product(product, product.data, stored.codes, stored, scheme)

    def _origin(self, product: Product) -> Origin | None:
        if self._stored_rows is None or product.tensor.dtype != ir.DataType.FLOAT:
            return None
        return self._stored_rows.origin(np.asarray(row_reader(product.tensor, product.by_output)(0, product.outputs)))

    def _keep_codes(self, product: Product, rows: StoredRows, origin: Origin) -> None:
        made = QuantisedWeight(origin.shape, ir.DataType.FLOAT, lambda: rows.blocks(origin), self.recent)
        stored = _BlockInitializers(self.editor, made, str(product.weight.name), origin.shape.codes)
        data = product.data
        if origin.order is not None and data is not None:  # act-order: a group's inputs are scattered
            order = self.editor.constant(origin.order, f"{product.weight.name}_order")
            data = self.editor.op("Gather", [data, order], axis=-1, dtype=data.dtype, shape=data.shape)
        self._replace_product(product, data, stored.codes, stored, self._scheme)
        self.kept += 1

    def _replace_product(
        self, product: Product, data: ir.Value | None, codes: ir.Value, stored: _BlockInitializers, scheme: Quantisation
    ) -> None:
        inputs: list[ir.Value | None] = [data, codes, stored.scales, stored.zero_points, None, product.bias]
        while inputs[-1] is None:
            inputs.pop()
        shape = stored.shape
        attributes = {"K": shape.inputs, "N": shape.outputs, "bits": shape.bits, "block_size": shape.block_size}
        if scheme.accuracy_level:
            attributes["accuracy_level"] = scheme.accuracy_level
        self._replace(product.nodes, "MatMulNBits", inputs, attributes, scheme)

    def _replace(
        self,
        nodes: tuple[ir.Node, ...],
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, int],
        scheme: Quantisation,
    ) -> None:
        old, graph = nodes[-1].outputs[0], self.editor.graph
        node = ir.node(op_type, inputs, attributes=attributes, domain=DOMAIN, name=f"{nodes[0].name}_Q{scheme.bits}")
        new = node.outputs[0]
        new.type, new.shape = old.type, old.shape
        graph.insert_before(nodes[-1], node)
        name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
        for replaced in reversed(nodes):
            graph.remove(replaced, safe=True)


def _drop_unused(graph: ir.Graph) -> None:
    for node in [node for node in graph if node.op_type == "Transpose" and not node.outputs[0].uses()]:
        if stored_tensor(node.inputs[0], 2) is not None and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def _notices(graph: ir.Graph, scheme: Quantisation, before: int, known: set[str | None]) -> list[str]:
    left = []
    for value in graph.initializers.values():
        tensor = next((found for rank in (2, 3, 4) if (found := stored_tensor(value, rank)) is not None), None)
        large = tensor is not None and tensor.nbytes > before * _NOTABLE
        if tensor is not None and large and not scheme.excludes(value.name) and value.name not in known:
            left.append((value.name, tensor.nbytes))
    if not left:
        return []
    return [
        f"{len(left)} weights ({decimal_size(sum(size for _, size in left))}; first: {left[0][0]}) are not "
        f"{scheme.dtype}: they are neither the constant matrix of a product nor a table whose rows are whole blocks"
    ]
