"""Replace the products, the token table and the experts of a graph by quantised nodes.

For onnxruntime, a product becomes MatMulNBits, the table's lookup GatherBlockQuantized, an MoE node QMoE, and a Gather
of experts' matrices GatherBlockQuantized. For TensorRT, a product reads its matrix from a DequantizeLinear, and table,
head and experts stay float. QMoE multiplies activations rounded to 8 bits. It multiplies float32 activations only
with 4-bit weights and an `accuracy_level` other than 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingNode
from topw_deploy.export.graph import GraphEditor, attribute_values, initializer_tensors, stored_tensor
from topw_deploy.export.products import Product
from topw_deploy.export.quantise.blocks import (
    BlockValues,
    QuantisedWeight,
    ReadRows,
    RecentBlocks,
    StoredRows,
    StoredWeight,
    row_reader,
)
from topw_deploy.export.quantise.choice import Calibration, RoundedWeights
from topw_deploy.export.quantise.rounding import Quantisation
from topw_deploy.export.quantise.weights import (
    DOMAIN,
    MOE_MATRICES,
    ExpertWeight,
    QuantisableWeights,
    find_products,
)
from topw_deploy.text import decimal_size

Codes = list[QuantisedWeight]  # of the matrices of one node of experts
CodedGroup = tuple[list[ExpertWeight], Codes]
_NOTABLE = 0.01  # a notice names each weight left in float that has more than this share of all weight bytes
_QMOE_SINCE = "1.30"  # the first onnxruntime whose QMoE is tested here
_QMOE_LEVELS_SINCE = "1.31"  # the first whose QMoE has `accuracy_level`
_INT8_ACTIVATIONS = 4  # the accuracy_level of activations rounded to int8
OFFSETS = "topw.offsets"
"""Entry of a product's `meta`: the offsets [N, blocks] of its weight, which the node behind it adds, for rank 3."""


def quantise(
    model: ir.Model,
    scheme: Quantisation,
    stored: StoredRows | None = None,
    *,
    cut: bool = False,
    calibration: Calibration | None = None,
    estimate: bool = False,
    tensorrt: bool = False,
) -> list[str]:
    """Quantise `model` in place. Returns notices for the user, such as about weights left in float.

    model: a lowered decoder without sampler.
    stored: the rows of a quantised checkpoint, whose codes are kept.
    cut: whether the model has only its first layers, so that exclude patterns need not match.
    calibration: rounds rows for a text; None to round all weights to nearest.
    estimate: do not use `calibration`, but choose weights with more bits as if all lost the same.
    tensorrt: use the operators of TensorRT; `scheme` is then symmetric.

    Raises ParameterError for a pattern of `scheme.exclude` that matches nothing, and UnsupportedModelError if there is
    no product to quantise, or if TensorRT cannot multiply a checkpoint's codes.
    """
    graph = model.graph
    before = sum(int(tensor.nbytes) for tensor in initializer_tensors(model))
    found = QuantisableWeights.of(graph)
    if tensorrt:
        fitting = [product for product in found.products if scheme.experts_block_size({product.inputs})]
        found = QuantisableWeights([product for product in fitting if product is not found.head], None, [], None)
    if not cut:
        found.check_patterns(scheme)
    excluded = found.excluded(scheme)
    known = {value.name for value in graph.initializers.values() if id(value) in excluded}
    rounded = RoundedWeights(scheme, calibration, estimate)
    replacer = _Replacer(GraphEditor(graph, "quantised"), scheme, stored, rounded, whole_blocks=tensorrt)
    table = found.embedding.data[0] if found.embedding is not None else None
    if found.embedding is not None and id(table) not in excluded and not replacer.quantise_table(found.embedding):
        excluded.add(id(table))  # a tied head then stays float too
    products = [
        product
        for product in found.products
        if id(product.weight) not in excluded and (product is found.head or not replacer.leaves_float(product))
    ]
    experts = [weight for weight in found.experts if id(weight.value) not in excluded]
    groups = replacer.choose([product for product in products if product is not found.head], experts)
    for product in products:
        if tensorrt:
            replacer.dequantise(product)
        else:
            replacer.quantise_product(product, scheme.table_scheme if product is found.head else scheme)
    for group, codes in groups:
        replacer.replace_experts(group, codes)
    _check_half_experts(graph)
    if not replacer.scale_names:
        raise UnsupportedModelError(
            "the decoder has no product with a constant matrix to quantise; export it with --dtype fp32."
        )
    _drop_unused(graph)
    if not tensorrt:
        model.opset_imports[DOMAIN] = 1
    replacer.editor.finish()
    known |= {product.weight.name for product in find_products(graph) if product.chooses_experts}
    notices = _notices(graph, scheme, before, known | replacer.scale_names | replacer.floats) + replacer.rounded.notices
    if stored is not None:
        kept, kept_groups = replacer.kept
        left = {product.weight.name for product in found.products} & replacer.floats
        notices.append(
            f"{kept} of {len(found.products)} products keep the checkpoint's own codes, scales and zero points"
            + (f", and {len(left)} stay float as there" if left else "")
        )
        if found.experts:
            groups_left = len({id(weight.node) for weight in found.experts if weight.value.name in replacer.floats})
            notices.append(
                f"{kept_groups} of {len(groups) + groups_left} groups of experts keep them too"
                + (f", and {groups_left} stay float, because experts in them are float there" if groups_left else "")
            )
    return notices


def least_onnxruntime(graph: ir.Graph) -> str:
    """Return the first onnxruntime version that runs the experts of `graph`; "" if any version does."""
    nodes = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, "QMoE")]
    leveled = any("accuracy_level" in node.attributes for node in nodes)
    return (_QMOE_LEVELS_SINCE if leveled else _QMOE_SINCE) if nodes else ""


def usual_type(graph: ir.Graph) -> str | None:
    """Return the type of most quantised products, `int4` or `int8`; None without products."""
    bits = Counter(int(node.attributes["bits"].as_int()) for node in graph if node.op_type == "MatMulNBits")
    return f"int{bits.most_common(1)[0][0]}" if bits else None


class _Replacer:
    """Replaces products, the token table's lookup and the nodes of experts by quantised nodes.

    kept: the numbers of products and of groups of experts that keep a quantised checkpoint's codes.
    scale_names: the names of the scales' initializers.
    floats: the names of weights that stay float, as in the checkpoint.
    rounded: the weights that get codes of their own, see `choose`.
    whole_blocks: whether the rows of a product's matrix must be whole blocks.
    """

    def __init__(
        self,
        editor: GraphEditor,
        scheme: Quantisation,
        stored: StoredRows | None,
        rounded: RoundedWeights,
        *,
        whole_blocks: bool,
    ) -> None:
        self.editor, self.kept, self.rounded = editor, (0, 0), rounded
        self.scale_names: set[str | None] = set()
        self.floats: set[str | None] = set()
        self._scheme, self._checkpoint, self._recent = scheme, stored, RecentBlocks()
        self._whole_blocks = whole_blocks
        self._tables: dict[int, BlockValues] = {}
        self._values: dict[int, BlockValues] = {}
        self._stored: dict[int, StoredWeight | None] = {}
        self._keeps_table = False
        self._sums: dict[tuple[int, int], ir.Value] = {}

    def _add(self, weight: QuantisedWeight, name: str, **how: Any) -> BlockValues:
        values = self._recent.add(self.editor, weight, name, **how)
        self.scale_names.add(values.scales.name)
        return values

    def quantise_table(self, embedding: EmbeddingNode) -> bool:
        """Quantise the token table. Returns whether it could: its rows must be whole blocks."""
        scheme = self._scheme.table_scheme
        table, node = embedding.data[0], embedding.node
        block_size, tensor = scheme.table_block_size(embedding.hidden), table.const_value
        if tensor is None:
            return False
        read, stored = row_reader(tensor, by_output=True), None
        if self._checkpoint is not None and tensor.dtype == ir.DataType.FLOAT:
            stored = self._checkpoint.find(np.asarray(read(0, embedding.rows)), scheme.bits)
        if stored is not None and stored.fits_table:
            weight, self._keeps_table = stored.weight, True
        elif block_size is not None:
            sizes = (embedding.rows, embedding.hidden)
            weight = QuantisedWeight.rounded(read, sizes, tensor.dtype.numpy(), block_size, scheme)
        else:
            return False
        flat = (embedding.rows, embedding.hidden * weight.bits // 8)
        values = self._add(weight, str(table.name), codes=flat, explicit_zeros=True)
        inputs = [values.codes, node.inputs[1], values.scales, values.zero_points]
        attributes = {"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1}
        self._replace((node,), "GatherBlockQuantized", inputs, attributes, weight.bits)
        self._tables[id(table)] = values
        return True

    def leaves_float(self, product: Product) -> bool:
        """Whether the checkpoint's quantisation left the weight float, or a part of it, which the trace joined."""
        if self._checkpoint is None or product.tensor.dtype != ir.DataType.FLOAT:
            return False
        read = row_reader(product.tensor, product.by_output)
        if self._checkpoint.lacks(np.asarray(read(0, product.outputs))):
            self.floats.add(product.weight.name)
        return product.weight.name in self.floats

    def _leaves_experts_float(self, group: list[ExpertWeight]) -> bool:
        """Whether the checkpoint left an expert of the node float. All then stay float: a node has one format."""
        checkpoint = self._checkpoint
        if checkpoint is None or any(weight.tensor.dtype != ir.DataType.FLOAT for weight in group):
            return False
        if any(checkpoint.lacks(weight.rows().numpy()) for weight in group):
            self.floats |= {weight.value.name for weight in group}
        return group[0].value.name in self.floats

    def choose(self, products: Iterable[Product], experts: Iterable[ExpertWeight]) -> list[CodedGroup]:
        """Choose the rounding of the weights that have no codes yet, from the checkpoint or the tied table.

        Returns the nodes of `experts` whose matrices are all among them, with the codes of each matrix.
        """
        for product in products:
            if self._table_of(product) is None and self._stored_weight(product, self._scheme) is None:
                self.rounded.add(product.weight, *self._round(product, self._scheme))
        groups = self._group_experts(experts)
        self.rounded.settle()
        made = []
        for group, kept in groups:
            own = [self.rounded.weight(weight.value) for weight in group]
            codes = kept or [weight for weight in own if weight is not None]
            if codes:  # else no block size fits
                made.append((group, codes))
        return made

    def _round(self, product: Product, scheme: Quantisation) -> tuple[QuantisedWeight, ReadRows]:
        """The product's weight rounded to nearest, and the function that reads its float rows."""
        read, dtype = row_reader(product.tensor, product.by_output), product.tensor.dtype.numpy()
        whole = scheme.experts_block_size({product.inputs}) if self._whole_blocks else None
        sizes, block_size = (product.outputs, product.inputs), whole or scheme.product_block_size(product.inputs)
        return QuantisedWeight.rounded(read, sizes, dtype, block_size, scheme), read

    def _table_of(self, product: Product) -> BlockValues | None:
        """The quantised token table, if the product is a head tied to it."""
        return self._tables.get(id(product.weight)) if product.by_output else None

    def _stored_weight(self, product: Product, scheme: Quantisation) -> StoredWeight | None:
        """The product's weight with the checkpoint's codes; None if it has none."""
        key = id(product.weight)
        if self._checkpoint is None or product.tensor.dtype != ir.DataType.FLOAT:
            return None
        if key not in self._stored:
            read = row_reader(product.tensor, product.by_output)
            self._stored[key] = self._checkpoint.find(np.asarray(read(0, product.outputs)), scheme.bits)
        return self._stored[key]

    def quantise_product(self, product: Product, scheme: Quantisation) -> None:
        """Replace a product by MatMulNBits: with the checkpoint's codes, the tied table's, or codes of its own."""
        weight, data, editor = product.weight, product.data, self.editor
        table = self._table_of(product)
        stored = None if table is not None else self._stored_weight(product, scheme)
        if stored is not None:
            values = self._add(stored.weight, str(weight.name))
            if stored.order is not None and data is not None:  # act-order: a group's inputs are scattered
                order = editor.constant(stored.order, f"{weight.name}_order")
                data = editor.op("Gather", [data, order], axis=-1, dtype=data.dtype, shape=data.shape)
            self.kept, scheme = (self.kept[0] + 1, self.kept[1]), self._scheme
        elif table is not None:
            # onnxruntime computes this Reshape when it loads the file; the result is a view of the table's bytes. The
            # table's zero points of a symmetric weight are for the lookup.
            shape = table.weight.codes_shape
            codes = editor.op(
                "Reshape", [table.codes, editor.constant(list(shape))], dtype=ir.DataType.UINT8, shape=shape
            )
            values = table._replace(codes=codes, zero_points=None if table.weight.symmetric else table.zero_points)
            self.kept = (self.kept[0] + self._keeps_table, self.kept[1])
        else:
            if id(weight) not in self._values:
                rounded = self.rounded.weight(weight) or self._round(product, scheme)[0]  # the head was not added
                self._values[id(weight)] = self._add(rounded, str(weight.name))
            values = self._values[id(weight)]
        made = values.weight
        inputs = [data, values.codes, values.scales, values.zero_points, None, product.bias]
        attributes = {"K": made.inputs, "N": made.outputs, "bits": made.bits, "block_size": made.block_size}
        if scheme.accuracy_level:
            attributes["accuracy_level"] = scheme.accuracy_level
        made_by = self._replace(product.nodes, "MatMulNBits", inputs, attributes, made.bits)
        if values.offsets is not None and data is not None:
            self._add_offsets(made_by, data, values)

    def dequantise(self, product: Product) -> None:
        """Let a product read its matrix from a DequantizeLinear, whose codes TensorRT multiplies as they are."""
        weight, editor = product.weight, self.editor
        if not weight.uses():  # an earlier product has the same matrix
            return
        stored = self._stored_weight(product, self._scheme)
        made = self.rounded.weight(weight) if stored is None else stored.weight
        assert made is not None  # `choose` has added it
        if stored is not None:
            self.kept = (self.kept[0] + 1, self.kept[1])
            if stored.order is not None or made.has_offsets or not made.symmetric or (made.data().scales < 0).any():
                raise UnsupportedModelError(
                    f"{weight.name} has codes with zero points, minima, negative scales or scattered groups, which "
                    "TensorRT does not multiply; export with --dtype fp16."
                )
        values = self._add(made, str(weight.name), signed=True)
        inputs, dtype = [values.codes, values.scales], product.tensor.dtype
        sizes = (made.outputs, made.inputs)
        matrix = editor.op("DequantizeLinear", inputs, axis=1, block_size=made.block_size, dtype=dtype, shape=sizes)
        if not product.by_output:
            matrix = editor.op("Transpose", [matrix], perm=[1, 0], dtype=dtype, shape=sizes[::-1])
        ir.convenience.replace_all_uses_with(weight, matrix)

    def _add_offsets(self, product: ir.Node, data: ir.Value, values: BlockValues) -> None:
        """Add the product of each block's offset and the sum of its activations to what `product` makes."""
        editor, made, rank = self.editor, values.weight, len(data.shape or (0, 0, 0))
        key = id(data), made.block_size
        if key not in self._sums:
            shape = editor.constant([0] * (rank - 1) + [made.blocks, made.block_size])
            split = editor.op("Reshape", [data, shape])
            self._sums[key] = editor.op("ReduceSum", [split, editor.constant([-1])], keepdims=0)
        old = product.outputs[0]
        part = editor.op("FusedMatMul", [self._sums[key], values.offsets], domain=DOMAIN, transB=1)
        whole = ir.node("Add", [old, part], name=f"{product.name}_add")
        new = whole.outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        whole.replace_input_with(0, old)
        new.name, old.name = old.name, editor.unique("product")
        editor.graph.append(whole)
        if rank == 3:
            product.meta[OFFSETS] = values.offsets

    def _group_experts(self, weights: Iterable[ExpertWeight]) -> list[tuple[list[ExpertWeight], Codes | None]]:
        """The nodes whose matrices are all in `weights`, with a checkpoint's codes; None for codes of their own.

        These get one block size, and are added to `rounded`. If no size fits, they stay float. Without the nodes of
        experts that the checkpoint left float.
        """
        by_node: dict[int, list[ExpertWeight]] = {}
        for weight in weights:
            by_node.setdefault(id(weight.node), []).append(weight)
        whole = [group for group in by_node.values() if len(group) == len(MOE_MATRICES) or group[0].place == 0]
        made = [(group, self._stored_experts(group)) for group in whole if not self._leaves_experts_float(group)]
        own = [weight for group, kept in made if kept is None for weight in group]
        block_size = self._scheme.experts_block_size({weight.sizes[2] for weight in own})
        if block_size is not None:
            for weight in own:
                experts, outputs, inputs = weight.sizes
                read, sizes = row_reader(weight.rows(), by_output=True), (experts * outputs, inputs)
                dtype = weight.tensor.dtype.numpy()
                plain = QuantisedWeight.rounded(read, sizes, dtype, block_size, self._scheme, experts)
                self.rounded.add(weight.value, plain, read)
        return made

    def _stored_experts(self, group: list[ExpertWeight]) -> Codes | None:
        """Return the matrices of one node with the checkpoint's own codes; None if the node cannot use these."""
        checkpoint = self._checkpoint
        if checkpoint is None or any(weight.tensor.dtype != ir.DataType.FLOAT for weight in group):
            return None
        bits = self._scheme.bits
        stored = [checkpoint.find(weight.rows().numpy(), bits, weight.sizes[0]) for weight in group]
        made = [one.weight for one in stored if one is not None and one.fits_experts]
        if len(made) < len(group) or len({(weight.bits, weight.block_size) for weight in made}) > 1:
            return None
        self.kept = (self.kept[0], self.kept[1] + 1)
        return made

    def replace_experts(self, group: list[ExpertWeight], made: Codes) -> None:
        """Replace a node of experts, see `choose`."""
        node, bits, block_size = group[0].node, made[0].bits, made[0].block_size
        is_moe = node.op_type == "MoE"
        names = [self.editor.unique(str(weight.value.name)) for weight in group]
        values = [self._add(one, name, explicit_zeros=not is_moe) for one, name in zip(made, names, strict=True)]
        first, last = values[0], values[-1]
        inputs: list[ir.Value | None]
        if not is_moe:
            attributes = {"bits": bits, "block_size": block_size, "gather_axis": 0, "quantize_axis": 2}
            inputs = [first.codes, node.inputs[1], first.scales, first.zero_points]
            self._replace((node,), "GatherBlockQuantized", inputs, attributes, bits)
            return
        biases = [node.inputs[place + 1] if len(node.inputs) > place + 1 else None for place in MOE_MATRICES]
        inputs = [*node.inputs[:2], first.codes, first.scales, biases[0], last.codes, last.scales, biases[1]]
        inputs += [None, None, None, first.zero_points, last.zero_points]
        attributes = attribute_values(node) | {"expert_weight_bits": bits, "block_size": block_size}
        if self._scheme.accuracy_level == _INT8_ACTIVATIONS:
            attributes["accuracy_level"] = _INT8_ACTIVATIONS
        self._replace((node,), "QMoE", inputs, attributes, bits)

    def _replace(
        self,
        nodes: Sequence[ir.Node],
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, Any],
        bits: int,
    ) -> ir.Node:
        """Replace `nodes`, the last of which makes the output, by one of com.microsoft. Drops trailing empty inputs."""
        while inputs[-1] is None:
            inputs.pop()
        old, graph = nodes[-1].outputs[0], self.editor.graph
        node = ir.node(op_type, inputs, attributes=attributes, domain=DOMAIN, name=f"{nodes[0].name}_Q{bits}")
        node.outputs[0].type, node.outputs[0].shape = old.type, old.shape
        graph.insert_before(nodes[-1], node)
        self.editor.replace(nodes[-1], node.outputs[0])
        for replaced in reversed(nodes[:-1]):
            graph.remove(replaced, safe=True)
        return node


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
        f"{scheme.dtype}: the target has no operator for them in this form"
    ]
