"""Trace a causal LM with transformers' exporter, one marker node per layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter.onnx_fusions
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.trace.interface import marked
from topw_deploy.export.trace.marker import check_layer_types, check_markers
from topw_deploy.export.trace.weightless import Weights, weight_tensor, weightless
from topw_deploy.export.trace.workarounds import batch_experts, fixed_frequencies, silenced, small_terms_kept

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPSET = 23  # at 24 the tracer decomposes norms and rotary embeddings
_BATCH, _PAST, _NEW = 2, 5, 3  # sample sizes: distinct and above 1
_FILE = "trace.onnx"
_STAGE = "traced graph"
_PARAMETERS = "checkpoint"  # placeholder for the parameters' data file


@dataclass(frozen=True)
class TracedDecoder:
    """A traced graph, with key-value heads and head size per layer.

    model: inputs input_ids, position_ids, past_key_values.{i}.key|value; outputs logits [batch, sequence, vocab],
        present.{i}.key|value.
    """

    model: ir.Model
    num_kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]


def trace(model: PreTrainedModel) -> TracedDecoder:
    """Trace `model`, in evaluation mode on the CPU, at opset 23.

    Raises UnsupportedModelError for layers without a marker or a failed trace.
    """
    config = model.config.get_text_config(decoder=True)
    check_layer_types(model, config)
    with weightless(model) as weights, marked(model), fixed_frequencies(model):
        batch_experts(model)
        cache = _filled_cache(model, config, weights)
        traced = _export(model, cache)
    heads = tuple(layer.keys.shape[1] for layer in cache.layers)
    dims = tuple(layer.keys.shape[3] for layer in cache.layers)
    _attach_and_optimize(model, traced, weights)
    _name_inputs_and_outputs(traced.graph)
    _drop_origins(traced)
    check_markers(model, config, traced.graph, len(heads))
    return TracedDecoder(traced, heads, dims)


def save_trace(traced: TracedDecoder, model: torch.nn.Module, journal: Journal, stamp: str) -> None:
    """Save `traced` for a resumed export, without the model's parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = [value for name, value in traced.model.graph.initializers.items() if name in parameters]
    before = [value.const_value for value in values]
    for value, tensor in zip(values, before, strict=True):
        shape, name = ir.Shape([int(size) for size in tensor.shape]), value.name or ""
        value.const_value = ir.ExternalTensor(_PARAMETERS, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    shapes = {"num_kv_heads": traced.num_kv_heads, "head_dim": traced.head_dim}
    try:
        journal.keep_file(_STAGE, stamp, _FILE, lambda path: ir.save(traced.model, path), **shapes)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def load_trace(model: torch.nn.Module, journal: Journal, stamp: str) -> TracedDecoder | None:
    """The trace saved under `stamp`, with the model's parameters, or None."""
    found = journal.find(_STAGE, stamp)
    if found is None:
        return None
    graph_model = ir.load(found["file"])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in graph_model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weight_tensor(parameters[name], name)
    return TracedDecoder(graph_model, tuple(found["num_kv_heads"]), tuple(found["head_dim"]))


def _filled_cache(model: PreTrainedModel, config: Any, weights: Weights) -> DynamicCache:
    """A cache with one chunk of tokens in it.

    It is made without the model's configuration: with a sliding window configured, transformers drops old tokens from
    the cache, while the graph keeps them and masks them.
    """
    found = DynamicCache()
    with torch.no_grad(), weights.fake_mode:
        try:
            ids = torch.zeros(_BATCH, _PAST, dtype=torch.int64)
            model(input_ids=ids, past_key_values=found, use_cache=True)
        except Exception as error:  # model code may raise anything
            raise _refusal(model, error) from error
    each: list[tuple[int, ...]] = [getattr(getattr(layer, "keys", None), "shape", ()) for layer in found.layers]
    if len(each) != config.num_hidden_layers or any(len(s) != 4 or s[2] != _PAST for s in each):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps {len(each)} key-value layers for {config.num_hidden_layers} layers, "
            "but one each is needed; choose a model whose every layer has attention with a cache of its own."
        )
    cache = DynamicCache()
    for index, layer in enumerate(found.layers):
        zeros = [torch.zeros(side.shape, dtype=side.dtype) for side in (layer.keys, layer.values)]
        cache.update(*zeros, index)
    return cache


def _export(model: PreTrainedModel, cache: DynamicCache) -> ir.Model:
    auto = torch.export.Dim.AUTO
    inputs = {
        "input_ids": torch.ones(_BATCH, _NEW, dtype=torch.int64),
        "position_ids": torch.arange(_PAST, _PAST + _NEW).repeat(_BATCH, 1),
        "past_key_values": cache,
        "use_cache": True,
    }
    dynamic_shapes = {
        "input_ids": {0: auto, 1: auto},
        "position_ids": {0: auto, 1: auto},
        "past_key_values": [{0: auto, 2: auto}] * (2 * len(cache.layers)),
    }
    try:
        with silenced():
            config = OnnxConfig(dynamic_shapes=dynamic_shapes, opset_version=_OPSET, optimize=False)
            return OnnxExporter().export(model, inputs, config).program
    except Exception as error:
        raise _refusal(model, error) from error


def _attach_and_optimize(model: PreTrainedModel, traced: ir.Model, weights: Weights) -> None:
    """The optimizer must not fold weights."""

    def may_fold(node: ir.Node) -> bool | None:
        return False if any(value is not None and value.name in weights.by_name for value in node.inputs) else None

    try:
        weights.attach(traced)
        with silenced():
            with small_terms_kept(traced.graph):
                onnxscript.optimizer.optimize_ir(traced, should_fold=may_fold)
            onnxscript.rewriter.onnx_fusions.fuse(traced)
    except Exception as error:
        raise _untraceable(model, error) from error


def _name_inputs_and_outputs(graph: ir.Graph) -> None:
    layer_of = re.compile(r"layers\.(\d+)\.(key|value)s$")
    for values, prefix in ((graph.inputs, "past_key_values"), (graph.outputs, "present")):
        for value in values:
            if match := layer_of.search(value.name or ""):
                value.name = f"{prefix}.{match[1]}.{match[2]}"
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        names = (
            ("batch_size", "sequence_length")
            if value.name in ("input_ids", "position_ids")
            else ("batch_size", None, "past_sequence_length", None)
        )
        for dimension, name in zip(value.shape, names, strict=True):
            if name is not None:
                symbols[str(dimension)] = name
    symbol = re.compile(r"\bs\d+\b")
    for value in _all_values(graph):
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    d if isinstance(d, int) else symbol.sub(lambda m: symbols.get(m[0], m[0]), str(d))
                    for d in value.shape
                ]
            )


def _all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _drop_origins(model: ir.Model) -> None:
    """Stack traces and paths bloat files and reveal the exporting machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "decoder"
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*_all_values(model.graph), *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def _refusal(model: PreTrainedModel, error: Exception) -> UnsupportedModelError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedModelError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return _untraceable(model, error)


def _untraceable(model: PreTrainedModel, error: Exception) -> UnsupportedModelError:
    plain = _COLOURS.sub("", str(error)).strip()  # torch.onnx colours its messages
    reason = (plain.splitlines() or [type(error).__name__])[0][:120]
    return UnsupportedModelError(
        f"the architecture {type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); "
        "graft an ONNX decoder made by another exporter."
    )
