"""Setting the sampler onto a decoder: one node, one model-local function, the sampler's inputs and outputs.

Nothing of the decoder is copied or read but the embedding table's statistics. Weights stay the references they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graft.embedding_node import EmbeddingNode, find_embedding
from topw_deploy.export.graft.last_token import last_logits
from topw_deploy.export.graft.neighbour_bound import Measure, no_bound
from topw_deploy.export.graft.optional_inputs import with_defaults
from topw_deploy.export.graft.table import EmbeddingTable
from topw_deploy.export.graph.editor import GraphEditor, find_input
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

NODE_NAME = "topw_sample"
BOUND_NAME = "topw.neighbour_bound"
_EDITS = {"edit_ids": ir.DataType.INT64, "edit_penalty": ir.DataType.FLOAT, "edit_bias": ir.DataType.FLOAT}
_OUTPUT_TYPES = {
    "next_token": ir.DataType.INT64,
    "logprob": ir.DataType.FLOAT,
    "kept": ir.DataType.INT32,
    "certified": ir.DataType.BOOL,
    "mass": ir.DataType.FLOAT,
    "keep_mask": ir.DataType.BOOL,
}


def graft(decoder: Decoder, wanted: SamplerOptions, measure: Measure = no_bound) -> TailSpec:
    """Add the sampler to `decoder.model` in place; returns what was added. `measure` makes the neighbour bound.

    The output `logits` stays only on request: for a foreign decoder as its maker wrote it, otherwise
    [batch, vocab] float32 of each row's last position. A foreign decoder with its own logits also runs without the
    sampler's inputs, as its maker's tools run it.
    Raises UnsupportedModelError for a decoder without input embeddings (unless the metric is `uniform`) and for a
    table with fewer rows than the logits have columns.
    """
    graph = decoder.model.graph
    embedding = find_embedding(graph) if wanted.options.metric != "uniform" else None
    vocab = decoder.vocab_size
    _check_rows(embedding, vocab)
    keep_makers = decoder.foreign and wanted.with_logits
    logits = last_logits(graph, before_matmul=not keep_makers)
    spec = TailSpec(
        options=wanted.options,
        vocab_size=vocab,
        embedding=embedding.form if embedding else None,
        hidden_size=embedding.hidden if embedding else None,
        form=wanted.tail,
        opset=decoder.opset,
        with_mass=wanted.with_mass,
        with_keep_mask=wanted.with_keep_mask,
    )
    editor = GraphEditor(graph, "topw")
    batch = _batch_dimension(graph)
    given = sampler_inputs(editor, batch)
    inputs = [logits, *(with_defaults(editor, given, logits) if keep_makers else given)]
    if embedding is not None:
        inputs += [*geometry_constants(editor, embedding, spec, measure), *embedding.data]
    results = add_sampler_node(graph, spec, inputs, batch)
    _set_outputs(graph, results, logits, batch, wanted.with_logits, keep_makers)
    install_function(decoder.model, spec)
    RemoveUnusedNodesPass()(decoder.model)
    editor.finish()
    return spec


def sampler_inputs(editor: GraphEditor, batch: int | str) -> list[ir.Value]:
    """The sampler's graph inputs in the node's order, logits left out."""
    made = []
    for name in TAIL_INPUTS[1:]:
        if name in _EDITS:
            made.append(editor.input(name, _EDITS[name], [batch, "edits"]))
        else:
            made.append(editor.input(name, ir.DataType.FLOAT, [batch]))
    return made


def geometry_constants(
    editor: GraphEditor, embedding: EmbeddingNode, spec: TailSpec, measure: Measure
) -> list[ir.Value]:
    """Mean and inverse standard deviation [hidden] of the table, and the neighbour bound, as initializers."""
    table = EmbeddingTable(embedding, spec.vocab_size)
    geometry = Geometry.from_embeddings(table, spec.options.metric)
    return [
        editor.constant(np.asarray(geometry.mean, dtype=np.float32), "topw.embedding_mean"),
        editor.constant(np.asarray(geometry.inverse_std, dtype=np.float32), "topw.embedding_inverse_std"),
        editor.constant(measure(geometry, spec.vocab_size), BOUND_NAME),
    ]


def add_sampler_node(graph: ir.Graph, spec: TailSpec, inputs: list[ir.Value], batch: int | str) -> list[ir.Value]:
    """The one sampler node, appended to `graph`; its outputs, typed and named."""
    names = tail_outputs(spec)
    node = ir.node(
        OP_TYPE, inputs, attributes=tail_attributes(spec), domain=DOMAIN, num_outputs=len(names), name=NODE_NAME
    )
    for value, name in zip(node.outputs, names, strict=True):
        value.name = name
        value.type = ir.TensorType(_OUTPUT_TYPES[name])
        value.shape = ir.Shape([batch, spec.vocab_size] if name == "keep_mask" else [batch])
    graph.append(node)
    return list(node.outputs)


def install_function(model: ir.Model, spec: TailSpec) -> None:
    """The node's body as a model-local function, so that any runtime of standard operators runs it."""
    function = build_tail(spec)
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = DOMAIN_VERSION


def sampler_node(graph: ir.Graph) -> ir.Node:
    """The sampler node of an exported graph."""
    return next(node for node in graph if node.domain == DOMAIN and node.op_type == OP_TYPE)


def _set_outputs(
    graph: ir.Graph, results: list[ir.Value], logits: ir.Value, batch: int | str, with_logits: bool, keep_makers: bool
) -> None:
    """Sampler results first, then the logits if asked for, then the cache."""
    makers = next(value for value in graph.outputs if value.name == "logits")
    cache = [value for value in graph.outputs if value is not makers]
    graph.outputs.clear()
    graph.outputs.extend(results)
    if with_logits and keep_makers:
        graph.outputs.append(makers)
    elif with_logits:
        makers.name = "logits_of_all_positions"
        logits.name = "logits"
        logits.shape = ir.Shape([batch, logits.shape[-1] if logits.shape is not None else None])
        graph.outputs.append(logits)
    graph.outputs.extend(cache)


def _batch_dimension(graph: ir.Graph) -> int | str:
    ids = find_input(graph, "input_ids")
    if ids is None or ids.shape is None or len(ids.shape) != 2:
        raise UnsupportedModelError(
            "the decoder has no input input_ids [batch, sequence]; export it as text-generation-with-past."
        )
    first = ids.shape[0]
    return first if isinstance(first, int) else str(first)


def _check_rows(embedding: EmbeddingNode | None, vocab: int) -> None:
    if embedding is not None and embedding.rows < vocab:
        raise UnsupportedModelError(
            f"the embedding table has {embedding.rows} rows for logits of width {vocab}, but every token needs one; "
            "export with --metric uniform."
        )
