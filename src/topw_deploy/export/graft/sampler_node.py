"""Add the sampler node and its function to a decoder.

Of all weights, only those of the embedding table are read, for its statistics.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES
from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.embedding import EmbeddingNode, EmbeddingTable, find_embedding
from topw_deploy.export.graft.last_token import last_logits
from topw_deploy.export.graft.neighbour_bound import Measure, no_bound
from topw_deploy.export.graft.tidy import tidy
from topw_deploy.export.graph import GraphEditor, find_input
from topw_deploy.export.request import SamplerOptions
from topw_deploy.export.tail import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    TAIL_INPUTS,
    TailSpec,
    build_tail,
    tail_attributes,
    tail_outputs,
)
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWParameters

NODE_NAME = "topw_sample"
BOUND_NAME = "topw.neighbour_bound"
_MATRIX_INPUTS: dict[str, tuple[ir.DataType, str | int]] = {  # name -> (element type, n) of inputs [batch, n]
    "edit_ids": (ir.DataType.INT64, "edits"),
    "edit_penalty": (ir.DataType.FLOAT, "edits"),
    "edit_bias": (ir.DataType.FLOAT, "edits"),
    "allowed": (ir.DataType.INT32, "words"),
    "rule_values": (ir.DataType.FLOAT, 2),
}
_VECTOR_TYPES = {"rule": ir.DataType.INT32}  # name -> element type of inputs [batch]; all others are float32
_GREEDY = TopWParameters(temperature=0.0)


def graft(decoder: Decoder, wanted: SamplerOptions, measure: Measure = no_bound) -> tuple[Decoder, TailSpec]:
    """Add the sampler to `decoder.model` in place. Returns the decoder and the options of its sampler node.

    With `with_logits`, the graph keeps an output `logits`. In another exporter's decoder it is that decoder's own
    output, and the graph then also runs without sampler inputs. In a traced graph it is float32 [batch, vocab]. A
    traced graph is also simplified.

    measure: computes the neighbour bound.

    Raises UnsupportedModelError if the metric needs embeddings, and the decoder has none, or fewer rows than tokens.
    """
    graph = decoder.model.graph
    embedding = find_embedding(graph) if wanted.options.metric != "uniform" else None
    vocab = decoder.vocab_size
    _check_rows(embedding, vocab)
    keep_own = decoder.foreign and wanted.with_logits
    logits = last_logits(graph, before_matmul=not keep_own)
    spec = TailSpec(
        options=wanted.options,
        vocab_size=vocab,
        embedding=embedding.form if embedding else None,
        hidden_size=embedding.hidden if embedding else None,
        form=wanted.tail,
        opset=decoder.opset,
        with_mass=wanted.with_mass,
        with_keep_mask=wanted.with_keep_mask,
        rules=wanted.rules,
    )
    editor = GraphEditor(graph, "topw")
    batch = _batch_dimension(graph)
    given = add_sampler_inputs(editor, batch)
    inputs = [logits, *(add_defaults(editor, given, logits) if keep_own else given)]
    if embedding is not None:
        inputs += [*geometry_constants(editor, embedding, spec, measure), *embedding.data]
    results = add_sampler_node(graph, spec, inputs, batch)
    _set_outputs(graph, results, logits, batch, wanted.with_logits, keep_own)
    install_function(decoder.model, spec)
    RemoveUnusedNodesPass()(decoder.model)
    editor.finish()
    if not decoder.foreign:
        tidy(decoder.model, _shared_table(decoder.model.graph))
    return decoder, spec


def _shared_table(graph: ir.Graph) -> ir.Value | None:
    """The initializer of the embedding table, which a tied output layer may share; None if there is none."""
    try:
        table = find_embedding(graph).data[0]
    except UnsupportedModelError:  # the uniform metric needs no embeddings
        return None
    return table if table.producer() is None else None


def add_sampler_inputs(editor: GraphEditor, batch: int | str) -> list[ir.Value]:
    """Append graph inputs for the node's inputs but `logits`. Returns them in the node's order."""
    inputs = []
    for name in TAIL_INPUTS[1:]:
        dtype, *width = _MATRIX_INPUTS.get(name, (_VECTOR_TYPES.get(name, ir.DataType.FLOAT),))
        inputs.append(editor.input(name, dtype, [batch, *width]))
    return inputs


def add_defaults(editor: GraphEditor, inputs: list[ir.Value], logits: ir.Value) -> list[ir.Value]:
    """Make the sampler's graph inputs optional. Returns the node's inputs.

    onnxruntime requires a value for each graph input that has no initializer. With initializers for a greedy row, which
    are expanded to all rows of `logits`, callers can run the decoder without sampler inputs.
    """
    rows = editor.op("Shape", [logits], start=0, end=1)
    rows_and_one = editor.op("Concat", [rows, editor.constant(np.array([1]))], axis=0)
    node_inputs = []
    for value in inputs:
        name = value.name or ""
        value.const_value = ir.tensor(_default(name), name=name)
        editor.graph.register_initializer(value)
        shape = rows_and_one if name in _MATRIX_INPUTS else rows
        node_inputs.append(editor.op("Expand", [value, shape], dtype=value.dtype, shape=list(value.shape or ())))
    return node_inputs


def _default(name: str) -> np.ndarray:
    """The input's value for one greedy row: [1] or [1, n]."""
    if name in _MATRIX_INPUTS:
        dtype, width = _MATRIX_INPUTS[name]
        return np.zeros((1, width if isinstance(width, int) else 0), dtype.numpy())
    # `uniform` and `rule` are not among Top-W's parameters; they are 0.
    return np.array([getattr(_GREEDY, name, 0)], _VECTOR_TYPES.get(name, ir.DataType.FLOAT).numpy())


def geometry_constants(
    editor: GraphEditor, embedding: EmbeddingNode, spec: TailSpec, measure: Measure
) -> list[ir.Value]:
    """Add the node's inputs `GEOMETRY_INPUTS` as initializers, from the statistics of the embedding table."""
    table = EmbeddingTable(embedding, spec.vocab_size)
    geometry = Geometry.from_embeddings(table, spec.options.metric)
    return [
        editor.constant(np.asarray(geometry.mean, dtype=np.float32), "topw.embedding_mean"),
        editor.constant(np.asarray(geometry.inverse_std, dtype=np.float32), "topw.embedding_inverse_std"),
        editor.constant(measure(geometry, spec.vocab_size), BOUND_NAME),
    ]


def add_sampler_node(graph: ir.Graph, spec: TailSpec, inputs: list[ir.Value], batch: int | str) -> list[ir.Value]:
    """Append the sampler node. Returns its outputs, named as in `tail_outputs(spec)`.

    inputs: in the order of `tail_inputs(spec)`.
    batch: the dimension of the outputs.
    """
    names = tail_outputs(spec)
    node = ir.node(
        OP_TYPE, inputs, attributes=tail_attributes(spec), domain=DOMAIN, num_outputs=len(names), name=NODE_NAME
    )
    for value, name in zip(node.outputs, names, strict=True):
        value.name = name
        value.type = ir.TensorType(ir.DataType[SAMPLER_OUTPUT_TYPES[name].upper()])
        value.shape = ir.Shape([batch, spec.vocab_size] if name == "keep_mask" else [batch])
    graph.append(node)
    return list(node.outputs)


def install_function(model: ir.Model, spec: TailSpec) -> None:
    """Add the sampler's function to the model, and import its domain."""
    function = build_tail(spec)
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


def _check_rows(embedding: EmbeddingNode | None, vocab: int) -> None:
    """Raise UnsupportedModelError if the embedding table has fewer rows than there are tokens."""
    if embedding is not None and embedding.rows < vocab:
        raise UnsupportedModelError(
            f"the embedding table has {embedding.rows} rows for logits of width {vocab}, but every token needs one; "
            "export with --metric uniform."
        )
