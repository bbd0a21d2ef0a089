"""Attach the sampler to a decoder: the node, its function, and the logits of each row's last attended position.

Of all weights, only those of the embedding table are read, for its statistics.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES
from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingForm, EmbeddingTable, find_embedding
from topw_deploy.export.graph import (
    Decoder,
    GraphEditor,
    attribute_values,
    find_input,
    is_constant,
    required_input,
    required_node_input,
    tidy,
)
from topw_deploy.export.options import ExportOptions, SamplerOptions
from topw_deploy.export.sampler.function import build_function
from topw_deploy.export.sampler.neighbour_bound import neighbour_bound
from topw_deploy.export.sampler.node import (
    DOMAIN,
    DOMAIN_VERSION,
    GEOMETRY_INPUTS,
    OP_TYPE,
    SAMPLER_INPUTS,
    SamplerSpec,
    sampler_attributes,
    sampler_outputs,
)
from topw_deploy.manifest import ROWS
from topw_deploy.progress import Progress
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWParameters

NODE_NAME = "topw_sample"
BOUND_NAME = "topw.neighbour_bound"
NO_BOUND = np.zeros(0, np.float32)
# Further sizes of inputs [batch, ...]; all others are [batch].
_SIZES: dict[str, tuple[str | int]] = dict.fromkeys(("edit_ids", "edit_penalty", "edit_bias"), ("edits",))
_SIZES |= {"allowed": ("words",), "rule_values": (2,)}
_TYPES = {"edit_ids": ir.DataType.INT64, "allowed": ir.DataType.INT32, "rule": ir.DataType.INT32}  # others: float32
_GREEDY = TopWParameters(temperature=0.0)

PREFIX = "topw.last"  # of the names that this module adds
_ELEMENTWISE = {"Tanh", "Cast", "Identity", "Neg", "Sigmoid"}
_ELEMENTWISE_WITH_VECTOR = {"Mul", "Div", "Add", "Sub"}  # row-wise if the other input has rank 0 or 1
_MATMULS = {("", "MatMul"), ("com.microsoft", "MatMulNBits"), ("com.microsoft", "FusedMatMul")}


def attach_sampler(decoder: Decoder, wanted: ExportOptions, progress: Progress) -> SamplerSpec:
    """Add the sampler to `decoder.model` in place. Returns the options of its sampler node.

    With `with_logits`, the graph keeps an output `logits`. In another exporter's decoder it is that decoder's own
    output, and the graph then also runs without sampler inputs. In a traced graph it is float32 [batch, vocab]. A
    traced graph is also simplified.

    Raises UnsupportedModelError if the metric needs embeddings, and the decoder has none, or fewer rows than tokens.
    """
    graph = decoder.model.graph
    embedding = find_embedding(graph) if wanted.top_w.metric != "uniform" else None
    vocab = decoder.vocab_size
    if embedding is not None and embedding.rows < vocab:
        raise UnsupportedModelError(
            f"the embedding table has {embedding.rows} rows for logits of width {vocab}, but every token needs one; "
            "export with --metric uniform."
        )
    keep_own = decoder.foreign and wanted.with_logits
    batch = _batch_dimension(graph)
    info = decoder.info
    draws_several = info.kv_form == "static" and not info.recurs and info.target != "tensorrt"
    rows = ROWS if draws_several else batch
    editor = GraphEditor(graph, "topw")
    given = add_sampler_inputs(editor, rows)
    uniform = given[SAMPLER_INPUTS.index("uniform") - 1]
    logits = last_logits(graph, before_matmul=not keep_own, drawn=uniform if draws_several else None)
    form, hidden = (embedding.form, embedding.hidden) if embedding else (None, None)
    spec = spec_of(wanted, vocab, form, hidden, decoder.opset)
    inputs = [logits, *(add_defaults(editor, given, logits) if keep_own else given)]
    if embedding is not None:
        geometry = Geometry.from_embeddings(EmbeddingTable(embedding, vocab), wanted.top_w.metric)
        inputs += [*add_geometry(editor, geometry, bound_of(geometry, vocab, wanted, progress)), *embedding.data]
    results = add_sampler_node(graph, spec, inputs, rows)
    _set_outputs(graph, results, logits, rows, wanted.with_logits, keep_own)
    install_function(decoder.model, spec)
    RemoveUnusedNodesPass()(decoder.model)
    editor.finish()
    if not decoder.foreign:
        tidy(decoder.model, _shared_table(decoder.model.graph))
    return spec


def spec_of(
    wanted: SamplerOptions, vocab: int, embedding: EmbeddingForm | None, hidden: int | None, opset: int
) -> SamplerSpec:
    """The sampler node that the options ask for. Raises ParameterError for a value out of range."""
    return SamplerSpec(
        options=wanted.top_w, vocab_size=vocab, embedding=embedding, hidden_size=hidden, branches=wanted.branches,
        opset=opset, with_mass=wanted.with_mass, with_keep_mask=wanted.with_keep_mask, rules=wanted.rules,
    )  # fmt: skip


def _shared_table(graph: ir.Graph) -> ir.Value | None:
    """The initializer of the embedding table, which a tied output layer may share; None if there is none."""
    try:
        table = find_embedding(graph).data[0]
    except UnsupportedModelError:  # the uniform metric needs no embeddings
        return None
    return table if table.producer() is None else None


def add_sampler_inputs(editor: GraphEditor, batch: int | str) -> list[ir.Value]:
    """Append graph inputs for the node's inputs but `logits`. Returns them in the node's order."""
    return [
        editor.input(name, _TYPES.get(name, ir.DataType.FLOAT), [batch, *_SIZES.get(name, ())])
        for name in SAMPLER_INPUTS[1:]
    ]


def add_defaults(editor: GraphEditor, inputs: list[ir.Value], logits: ir.Value) -> list[ir.Value]:
    """Make the sampler's graph inputs optional. Returns the node's inputs.

    onnxruntime requires a value for each graph input that has no initializer. With initializers for a greedy row, which
    are expanded to all rows of `logits`, callers can run the decoder without sampler inputs.
    """
    rows = editor.op("Shape", [logits], start=0, end=1)
    rows_and_one = editor.op("Concat", [rows, [1]], axis=0)
    node_inputs = []
    for value in inputs:
        name = value.name or ""
        value.const_value = ir.tensor(_default(name), name=name)
        editor.graph.register_initializer(value)
        shape = rows_and_one if name in _SIZES else rows
        node_inputs.append(editor.op("Expand", [value, shape], dtype=value.dtype, shape=list(value.shape or ())))
    return node_inputs


def _default(name: str) -> np.ndarray:
    """The input's value for one greedy row: [1] or [1, n]."""
    shape = [1, *(size if isinstance(size, int) else 0 for size in _SIZES.get(name, ()))]
    # Edits, masks, `uniform` and rules are not among Top-W's parameters; they are 0.
    return np.full(shape, getattr(_GREEDY, name, 0), _TYPES.get(name, ir.DataType.FLOAT).numpy())


def bound_of(geometry: Geometry, tokens: int, options: SamplerOptions, progress: Progress) -> np.ndarray:
    """The neighbour bound of an export: measured, or none. In a dry run it is zero, which is valid and as large."""
    if not options.neighbour_bound:
        return NO_BOUND
    if options.dry_run:
        return np.zeros(tokens, np.float32)
    progress.say(f"Measuring the distance of each of {tokens} tokens to its nearest neighbour")
    return neighbour_bound(geometry, tokens, progress)


def add_geometry(editor: GraphEditor, geometry: Geometry, bound: np.ndarray) -> list[ir.Value]:
    """Add the node's inputs `GEOMETRY_INPUTS` as initializers."""
    values = (geometry.mean, geometry.inverse_std, bound)
    return [
        editor.constant(np.asarray(array, np.float32), f"topw.{name}")
        for name, array in zip(GEOMETRY_INPUTS, values, strict=True)
    ]


def add_sampler_node(graph: ir.Graph, spec: SamplerSpec, inputs: list[ir.Value], batch: int | str) -> list[ir.Value]:
    """Append the sampler node. Returns its outputs, named as in `sampler_outputs(spec)`.

    inputs: in the order of `sampler_inputs(spec)`.
    batch: the dimension of the outputs.
    """
    names = sampler_outputs(spec)
    node = ir.node(
        OP_TYPE, inputs, attributes=sampler_attributes(spec), domain=DOMAIN, num_outputs=len(names), name=NODE_NAME
    )
    for value, name in zip(node.outputs, names, strict=True):
        value.name = name
        value.type = ir.TensorType(ir.DataType[SAMPLER_OUTPUT_TYPES[name].upper()])
        value.shape = ir.Shape([batch, spec.vocab_size] if name == "keep_mask" else [batch])
    graph.append(node)
    return list(node.outputs)


def install_function(model: ir.Model, spec: SamplerSpec) -> None:
    """Add the sampler's function to the model, and import its domain."""
    function = build_function(spec)
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = DOMAIN_VERSION


def sampler_node(graph: ir.Graph) -> ir.Node:
    """The graph's sampler node."""
    return next(node for node in graph if node.domain == DOMAIN and node.op_type == OP_TYPE)


def _set_outputs(
    graph: ir.Graph, results: list[ir.Value], logits: ir.Value, batch: int | str, with_logits: bool, keep_own: bool
) -> None:
    """Set the graph's outputs: the sampler's, logits if wanted, then the cache.

    logits: the sampler's input, float32 [batch, vocab].
    keep_own: whether the output `logits` is the decoder's own rather than `logits`.
    """
    own = next(value for value in graph.outputs if value.name == "logits")
    cache = [value for value in graph.outputs if value is not own]
    graph.outputs.clear()
    graph.outputs.extend(results)
    if with_logits and keep_own:
        graph.outputs.append(own)
    elif with_logits:
        own.name = "logits_of_all_positions"
        logits.name = "logits"
        logits.shape = ir.Shape([batch, logits.shape[-1] if logits.shape is not None else None])
        graph.outputs.append(logits)
    graph.outputs.extend(cache)


def _batch_dimension(graph: ir.Graph) -> int | str:
    """The first dimension of `input_ids`. Raises UnsupportedModelError unless the input has rank 2."""
    ids = find_input(graph, "input_ids")
    if ids is None or ids.shape is None or len(ids.shape) != 2:
        raise UnsupportedModelError(
            "the decoder has no input input_ids [batch, sequence]; export it as text-generation-with-past."
        )
    first = ids.shape[0]
    return first if isinstance(first, int) else str(first)


def last_logits(graph: ir.Graph, *, before_matmul: bool = True, drawn: ir.Value | None = None) -> ir.Value:
    """Add nodes that select each row's last logits. Returns these, float32 [batch, vocab].

    With `drawn`, [rows], whose size is n times the batch, those of each row's last n positions: float32 [rows, vocab],
    the positions of a row one after another.

    `logits` stays a graph output.

    graph: maps input_ids [batch, sequence] and attention_mask [batch, past + sequence] or row_lengths [batch] to logits
        [batch, sequence, vocab].
    before_matmul: select before the vocabulary matmul if possible, so that only the selected positions are computed
        where `logits` is not used. False selects from the complete logits.
    """
    logits = next(value for value in graph.outputs if value.name == "logits")
    editor = GraphEditor(graph, PREFIX)
    nodes = _nodes_after_hidden(logits) if before_matmul else []
    hidden = required_node_input(nodes[0].inputs[0]) if nodes else logits
    selected = _select_last(editor, graph, hidden) if drawn is None else _select_drawn(editor, graph, hidden, drawn)
    old = nodes[0].inputs[0] if nodes else None
    for node in nodes:  # copies of these, for the selected positions
        inputs = [selected if value is old else value for value in node.inputs]
        old, dtype = node.outputs[0], node.outputs[0].dtype
        selected = editor.op(node.op_type, inputs, domain=node.domain, dtype=dtype, **attribute_values(node))
    selected.shape = ir.Shape(
        [ROWS if drawn is not None else "batch_size", logits.shape[-1] if logits.shape is not None else None]
    )
    selected.type = ir.TensorType(logits.dtype)
    if logits.dtype != ir.DataType.FLOAT:
        selected = editor.op("Cast", [selected], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=selected.shape)
    editor.finish()
    return selected


def _select_last(editor: GraphEditor, graph: ir.Graph, rows: ir.Value) -> ir.Value:
    """Select the last attended position of each row: [batch, sequence, n] -> [batch, n]."""
    op = editor.op
    if rows.shape is not None and rows.shape[1] == 1:
        return op("Squeeze", [rows, [1]])
    last = _last_column(editor, graph)
    if rows.shape is None or rows.dtype is None:
        return op("GatherND", [rows, last], batch_dims=1)
    return op("GatherND", [rows, last], batch_dims=1, dtype=rows.dtype, shape=["batch_size", rows.shape[-1]])


def _select_drawn(editor: GraphEditor, graph: ir.Graph, rows: ir.Value, drawn: ir.Value) -> ir.Value:
    """Select the last n positions of each row: [batch, sequence, m] -> [n * batch, m]. See `last_logits`."""
    op = editor.op
    lengths = required_input(graph, "row_lengths")
    count = op("Div", [op("Size", [drawn]), op("Size", [lengths])])  # n
    before_end = op("Unsqueeze", [op("Range", [count, 0, -1]), [1]])  # [n, 1]
    columns = op("Sub", [op("Unsqueeze", [lengths, [1, 2]]), before_end])  # [batch, n, 1]
    width = rows.shape[-1] if rows.shape is not None else None
    drawn_rows = op("GatherND", [rows, columns], batch_dims=1, dtype=rows.dtype, shape=["batch_size", None, width])
    return op("Flatten", [drawn_rows], axis=2, dtype=rows.dtype, shape=[ROWS, width])


def _last_column(editor: GraphEditor, graph: ir.Graph) -> ir.Value:
    """The column of each row's last attended position, int64 [batch, 1]."""
    op = editor.op
    lengths = find_input(graph, "row_lengths")
    if lengths is not None:
        return op("Unsqueeze", [op("Sub", [lengths, [1]]), [1]])
    ids, mask = required_input(graph, "input_ids"), required_input(graph, "attention_mask")
    length = op("Shape", [ids], start=1, end=2)
    attended = op("Slice", [mask, op("Neg", [length]), [np.iinfo(np.int64).max], [1]])  # [batch, sequence]
    if mask.dtype != ir.DataType.INT64:
        attended = op("Cast", [attended], to=ir.DataType.INT64)
    columns = op("Range", [0, op("Squeeze", [length]), 1])
    return op("ReduceMax", [op("Mul", [attended, columns]), [1]], keepdims=1)


def _nodes_after_hidden(logits: ir.Value) -> list[ir.Node]:
    """The vocabulary matmul, and the row-wise nodes between it and the logits, in their order.

    Empty if there are other nodes, or ones of which it is not known whether they treat each position alone.
    """
    if logits.shape is None or len(logits.shape) != 3:
        return []
    nodes: list[ir.Node] = []
    value: ir.Value | None = logits
    while value is not None and (node := value.producer()) is not None:
        nodes.insert(0, node)
        if (node.domain, node.op_type) in _MATMULS:
            return nodes if _is_rowwise_matmul(node) else []
        value = _rowwise_source(node)
    return []


def _is_rowwise_matmul(matmul: ir.Node) -> bool:
    """Whether each row of the output depends only on the same row of the first input, which has rank 3."""
    weights = matmul.inputs[1]
    if not all(source is None or is_constant(source) for source in matmul.inputs[1:]) or weights is None:
        return False
    if matmul.op_type == "MatMulNBits":
        return True
    flags = ("transA", "transBatchA", "transBatchB")
    transposes_rows = any(matmul.attributes[name].as_int() for name in flags if name in matmul.attributes)
    return not transposes_rows and weights.shape is not None and len(weights.shape) == 2


def _rowwise_source(node: ir.Node) -> ir.Value | None:
    """The input of a row-wise node that is not constant; None for other nodes."""
    if node.domain != "" or len(node.outputs) != 1:
        return None
    if node.op_type in _ELEMENTWISE:
        return node.inputs[0]
    if node.op_type not in _ELEMENTWISE_WITH_VECTOR:
        return None
    varying = [value for value in node.inputs if not is_constant(value)]
    fixed = [value for value in node.inputs if value not in varying]
    if len(varying) == 1 and all(value.shape is not None and len(value.shape) <= 1 for value in fixed):
        return varying[0]
    return None
