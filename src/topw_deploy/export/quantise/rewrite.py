"""Weight-only quantisation of a lowered decoder: MatMulNBits for its products, GatherBlockQuantized for its table.

Nothing is computed here: the new initializers are lazy, and each weight is quantised when it is written. A tied head
multiplies with the very bytes that the embedding is looked up in.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.graft.embedding_node import EmbeddingNode, find_embedding
from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.quantise.packed_rows import Origin, PackedRows
from topw_deploy.export.quantise.products import Product, find_products, is_stored
from topw_deploy.export.quantise.settings import Quantisation
from topw_deploy.export.quantise.weight import Latest, QuantisedWeight, rows_of
from topw_deploy.sizes import decimal_size

DOMAIN = "com.microsoft"
_WORTH_SAYING = 0.01  # share of the weights' bytes from which on a matrix that stays float is named


class _Stored:
    """A quantised weight in the graph: the values that nodes refer to."""

    def __init__(self, editor: GraphEditor, weight: QuantisedWeight, name: str, codes: tuple[int, ...]) -> None:
        self.shape = weight.shape
        # Next to each other, so that they are written one after the other (see weight.Latest).
        self.codes = editor.initializer(weight.codes(codes), f"{name}_Q{weight.shape.bits}")
        self.scales = editor.initializer(weight.scales(), f"{name}_scales")
        zeros = weight.zero_points()
        self.zero_points = editor.initializer(zeros, f"{name}_zero_points") if zeros is not None else None


def quantise(
    model: ir.Model, settings: Quantisation, packed: PackedRows | None = None, *, cut: bool = False
) -> list[str]:
    """Quantise `model` in place; returns what the user should know about weights that keep their type.

    The graph: traced and lowered, before the sampler is set onto it. packed: the layers of a checkpoint that is
    quantised already, whose products keep its own codes, scales and zero points. cut: the graph is a model's first
    layers, so that patterns may name what lies in the others.
    Raises ParameterError for a pattern of `settings.exclude` that matches nothing in a whole model,
    UnsupportedModelError for a graph without a product that could be quantised.
    """
    graph = model.graph
    before = _float_bytes(graph)
    products = find_products(graph)
    embedding = _embedding(graph)
    if not cut:
        _check_patterns(settings, products, embedding)
    editor, latest = GraphEditor(graph, "quantised"), Latest()
    excluded = _excluded(settings, products, embedding)
    named = {value.name for value in graph.initializers.values() if id(value) in excluded}
    tables: dict[int, _Stored] = {}
    if embedding is not None and id(embedding.data[0]) not in excluded:
        table = _quantise_table(editor, embedding, settings.of_table, latest)
        if table is None:
            excluded.add(id(embedding.data[0]))  # for a tied head too
        else:
            tables[id(embedding.data[0])] = table
    stored: dict[int, _Stored] = {}
    head = _head(products, embedding)
    kept = 0
    for product in products:
        if id(product.weight) in excluded:
            continue
        origin = _origin(product, packed)
        if origin is not None and packed is not None:
            _keep_codes(editor, product, settings, latest, packed, origin)
            kept += 1
        else:
            how = settings.of_table if product is head else settings
            _quantise_product(editor, product, how, latest, tables, stored)
    if not stored and not tables and not kept:
        raise UnsupportedModelError(
            "the decoder has no product with a constant matrix that could be quantised; export it as --dtype fp32."
        )
    _drop_unused(graph)
    model.opset_imports[DOMAIN] = 1
    editor.finish()
    known = {scales.scales.name for scales in (*stored.values(), *tables.values())}
    known |= named
    notices = _notices(graph, settings, before, known)
    if packed is not None:
        notices.append(f"{kept} of {len(products)} products keep the checkpoint's own codes, scales and zero points")
    return notices


def _embedding(graph: ir.Graph) -> EmbeddingNode | None:
    """The lookup of a stored float table, if the graph has just one."""
    try:
        found = find_embedding(graph)
    except UnsupportedModelError:
        return None
    return found if found.node.op_type == "Gather" and is_stored(found.data[0], 2) else None


def _head(products: list[Product], embedding: EmbeddingNode | None) -> Product | None:
    """The last product, if it has an output for each row of the table."""
    if not products or embedding is None:
        return None
    last = products[-1]
    tensor = last.weight.const_value
    outputs = None if tensor is None else int(tensor.shape[0 if last.by_output else 1])
    return last if outputs == embedding.rows else None


def _quantise_table(
    editor: GraphEditor, embedding: EmbeddingNode, settings: Quantisation, latest: Latest
) -> _Stored | None:
    """GatherBlockQuantized in the lookup's place; None where rows do not divide into blocks, which stay float."""
    table, node = embedding.data[0], embedding.node
    block_size = settings.table_block_size(embedding.hidden)
    if block_size is None or table.const_value is None:
        return None
    weight = QuantisedWeight.of_tensor(
        table.const_value, by_output=True, block_size=block_size, settings=settings, latest=latest, keep=True
    )
    flat = (embedding.rows, embedding.hidden * settings.bits // 8)
    stored = _Stored(editor, weight, str(table.name), flat)
    # A symmetric table has them too: onnxruntime's CUDA provider takes missing ones for 0 in some versions, its CPU
    # provider for 2 ** (bits - 1). A tied head has none: MatMulNBits' default is 2 ** (bits - 1) on both.
    zero_points = stored.zero_points
    if zero_points is None:
        zero_points = editor.initializer(weight.middle(), f"{table.name}_zero_points")
    inputs = [stored.codes, node.inputs[1], stored.scales, zero_points]
    attributes = {"bits": settings.bits, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
    _replace((node,), "GatherBlockQuantized", inputs, attributes, settings)
    return stored


def _quantise_product(
    editor: GraphEditor,
    product: Product,
    settings: Quantisation,
    latest: Latest,
    tables: dict[int, _Stored],
    stored: dict[int, _Stored],
) -> None:
    weight = product.weight
    shared = tables.get(id(weight)) if product.by_output else None
    if shared is not None:
        # The lookup wants rows, the product blocks: a view of the same bytes, which onnxruntime makes once, at loading.
        codes = editor.op(
            "Reshape",
            [shared.codes, editor.constant(_ints(shared.shape.codes))],
            dtype=ir.DataType.UINT8,
            shape=shared.shape.codes,
        )
        stored.setdefault(id(weight), shared)
    else:
        if id(weight) not in stored:
            assert weight.const_value is not None
            made = QuantisedWeight.of_tensor(
                weight.const_value,
                by_output=product.by_output,
                block_size=settings.block_size,
                settings=settings,
                latest=latest,
            )
            stored[id(weight)] = _Stored(editor, made, str(weight.name), made.shape.codes)
        shared = stored[id(weight)]
        codes = shared.codes
    _replace_product(product, product.data, codes, shared, settings)


def _origin(product: Product, packed: PackedRows | None) -> Origin | None:
    """Where the product's weight comes from, if all of it is a packed checkpoint's."""
    tensor = product.weight.const_value
    if packed is None or tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return None
    outputs = int(tensor.shape[0 if product.by_output else 1])
    return packed.origin(np.asarray(rows_of(tensor, product.by_output)(0, outputs)))


def _keep_codes(
    editor: GraphEditor, product: Product, settings: Quantisation, latest: Latest, packed: PackedRows, origin: Origin
) -> None:
    made = QuantisedWeight(origin.shape, ir.DataType.FLOAT, lambda: packed.blocks(origin), latest)
    stored = _Stored(editor, made, str(product.weight.name), origin.shape.codes)
    data = product.data
    if origin.order is not None and data is not None:  # act-order: the inputs of a group are not neighbours
        order = editor.constant(origin.order, f"{product.weight.name}_order")
        data = editor.op("Gather", [data, order], axis=-1, dtype=data.dtype, shape=data.shape)
    _replace_product(product, data, stored.codes, stored, settings)


def _replace_product(
    product: Product, data: ir.Value | None, codes: ir.Value, stored: _Stored, settings: Quantisation
) -> None:
    inputs: list[ir.Value | None] = [data, codes, stored.scales, stored.zero_points, None, product.bias]
    while inputs[-1] is None:
        inputs.pop()
    shape = stored.shape
    attributes = {"K": shape.inputs, "N": shape.outputs, "bits": shape.bits, "block_size": shape.block_size}
    if settings.accuracy_level:
        attributes["accuracy_level"] = settings.accuracy_level
    _replace(product.nodes, "MatMulNBits", inputs, attributes, settings)


def _replace(
    nodes: tuple[ir.Node, ...],
    op_type: str,
    inputs: list[ir.Value | None],
    attributes: dict[str, int],
    settings: Quantisation,
) -> None:
    """One node of `op_type` in the place of `nodes`, whose last one's output it gives under the same name."""
    old = nodes[-1].outputs[0]
    graph = nodes[-1].graph
    assert isinstance(graph, ir.Graph)
    node = ir.node(op_type, inputs, attributes=attributes, domain=DOMAIN, name=f"{nodes[0].name}_Q{settings.bits}")
    new = node.outputs[0]
    new.type, new.shape = old.type, old.shape
    graph.insert_before(nodes[-1], node)
    name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name = name
    for replaced in reversed(nodes):
        graph.remove(replaced, safe=True)


def _drop_unused(graph: ir.Graph) -> None:
    """Float weights, and transposes of them, that nothing refers to any more."""
    for node in [node for node in graph if node.op_type == "Transpose" and not node.outputs[0].uses()]:
        if is_stored(node.inputs[0], 2) and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def _excluded(settings: Quantisation, products: list[Product], embedding: EmbeddingNode | None) -> set[int]:
    """Weights that keep their type because a pattern names them or one of the nodes that use them: a tied head and its
    table are one weight, so a pattern for either excludes both."""
    uses = [(product.weight, product.names) for product in products]
    if embedding is not None:
        uses.append((embedding.data[0], (embedding.node.name, embedding.data[0].name)))
    return {id(weight) for weight, names in uses if settings.excludes(*names)}


def _check_patterns(settings: Quantisation, products: list[Product], embedding: EmbeddingNode | None) -> None:
    names = [name for product in products for name in product.names]
    if embedding is not None:
        names += [embedding.node.name, embedding.data[0].name]
    for pattern in settings.exclude:
        if not Quantisation(bits=settings.bits, exclude=(pattern,)).excludes(*names):
            some = ", ".join(sorted({name for name in names if name})[:5])
            raise ParameterError(
                f"the pattern {pattern!r} names no node or weight that would be quantised; there are {some}, ...",
                "exclude_nodes",
            )


def _float_bytes(graph: ir.Graph) -> int:
    return sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)


def _notices(graph: ir.Graph, settings: Quantisation, before: int, known: set[str | None]) -> list[str]:
    left = [
        value
        for value in graph.initializers.values()
        if any(is_stored(value, rank) for rank in (2, 3, 4))
        and value.const_value is not None
        and value.const_value.nbytes > before * _WORTH_SAYING
        and not settings.excludes(value.name)
        and value.name not in known
    ]
    if not left:
        return []
    size = sum(value.const_value.nbytes for value in left if value.const_value is not None)
    return [
        f"{len(left)} weights ({decimal_size(size)}; first: {left[0].name}) are not {settings.dtype}: they are no "
        "constant matrix of a product, or no table with rows of whole blocks"
    ]


def _ints(values: tuple[int, ...]) -> list[int]:
    return [int(value) for value in values]
