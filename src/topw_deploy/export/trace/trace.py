"""Trace a causal LM with transformers' exporter, without a cache: layers leave markers (see `marker`)."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter.onnx_fusions
import torch
from transformers import PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.experts import marked_experts
from topw_deploy.export.trace.interface import marked
from topw_deploy.export.trace.marker import check_layer_types, check_markers
from topw_deploy.export.trace.mixer_markers import SymbolicMarkers
from topw_deploy.export.trace.mixers import marked_mixers, takes_cache
from topw_deploy.export.trace.traced_cache import TracedCache
from topw_deploy.export.trace.weightless import Weights, weight_tensor, weightless
from topw_deploy.export.trace.workarounds import (
    fixed_frequencies,
    plain_for_text,
    positions_of_text,
    silenced,
    small_terms_kept,
)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPSET = 23  # at 24 the tracer decomposes norms and rotary embeddings
_BATCH, _SEQUENCE = 2, 3  # sample sizes: distinct and above 1
_PARAMETERS = "checkpoint"  # in place of the name of the parameters' data file


@dataclass(frozen=True)
class TracedDecoder:
    """A traced graph.

    model: inputs input_ids and, if read, position_ids; output logits [batch, sequence, vocab].
    num_layers: the configuration's num_hidden_layers.
    """

    model: ir.Model
    num_layers: int


def trace(model: PreTrainedModel) -> TracedDecoder:
    """Trace `model`, in evaluation mode on the CPU, at opset 23.

    Raises UnsupportedModelError for an encoder-decoder, a failed trace, or a trace that `check_markers` rejects.
    """
    config = model.config.get_text_config(decoder=True)
    check_layer_types(model, config)
    with marked_experts(model), weightless(model) as weights, marked(model), fixed_frequencies(model):
        traced = _export(model)
    _attach_and_optimize(model, traced, weights)
    _name_dimensions(traced.graph)
    _drop_origins(traced)
    check_markers(model, config, traced.graph)
    return TracedDecoder(traced, int(config.num_hidden_layers))


def save_trace(traced: TracedDecoder, model: torch.nn.Module, path: Path) -> None:
    """Save the graph of `traced` in `path` for a resumed export, without the model's parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = [value for name, value in traced.model.graph.initializers.items() if name in parameters]
    before = [value.const_value for value in values]
    for value, tensor in zip(values, before, strict=True):
        shape, name = ir.Shape([int(size) for size in tensor.shape]), value.name or ""
        value.const_value = ir.ExternalTensor(_PARAMETERS, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    try:
        ir.save(traced.model, path)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def load_trace(path: Path, num_layers: int, model: torch.nn.Module) -> TracedDecoder:
    """The trace saved in `path`, with the model's parameters."""
    graph_model = ir.load(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in graph_model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weight_tensor(parameters[name], name)
    return TracedDecoder(graph_model, num_layers)


def _export(model: PreTrainedModel) -> ir.Model:
    auto = torch.export.Dim.AUTO
    inputs = {
        "input_ids": torch.ones(_BATCH, _SEQUENCE, dtype=torch.int64),
        "position_ids": torch.arange(_SEQUENCE).repeat(_BATCH, 1),
    }
    try:
        with silenced(), _cached_forward(model):
            config = OnnxConfig(
                dynamic_shapes={name: {0: auto, 1: auto} for name in inputs}, opset_version=_OPSET, optimize=False
            )
            return OnnxExporter().export(model, inputs, config).program
    except Exception as error:  # model code may raise anything
        raise _refusal(model, error) from error


@contextlib.contextmanager
def _cached_forward(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` take ids and positions, use a `TracedCache` and return only logits inside the block."""
    forward = model.forward
    takes_positions = "position_ids" in inspect.signature(forward).parameters
    rotary = plain_for_text(model)

    def logits(input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = {"position_ids": position_ids} if takes_positions else {}
        cache = TracedCache(position_ids)
        cached = {_cache_argument(forward): cache, "use_cache": True} if takes_cache(model) else {"use_cache": False}
        with marked_mixers(model, SymbolicMarkers(cache)), positions_of_text(rotary, position_ids):
            found = forward(input_ids=input_ids, **cached, **positions)
        return {"logits": found.logits}

    model.forward = logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def _cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache argument: Mamba-like models call it cache_params."""
    return "cache_params" if "cache_params" in inspect.signature(forward).parameters else "past_key_values"


def _attach_and_optimize(model: PreTrainedModel, traced: ir.Model, weights: Weights) -> None:
    """Attach the parameters and optimize the graph without folding weights."""

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


def _name_dimensions(graph: ir.Graph) -> None:
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        for dimension, name in zip(value.shape, ("batch_size", "sequence_length"), strict=True):
            symbols[str(dimension)] = name
    for value in _all_values(graph):
        # An unknown size gets no name: onnxruntime assumes that dimensions of one name are equal.
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) or d.value is None else _renamed(str(d), symbols) for d in value.shape]
            )


def _renamed(expression: str, symbols: dict[str, str]) -> str:
    return re.sub(r"\bs\d+\b", lambda match: symbols.get(match[0], match[0]), expression)


def _all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _drop_origins(model: ir.Model) -> None:
    """Remove stack traces and paths, which bloat files and reveal the exporting machine."""
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
    first = _COLOURS.sub("", str(error)).strip().partition("\n")[0]  # torch.onnx colours its messages
    reason = first[:120] or type(error).__name__
    return UnsupportedModelError(
        f"the architecture {type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); "
        "graft an ONNX decoder made by another exporter."
    )
