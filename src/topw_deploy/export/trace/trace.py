"""From a transformers causal LM to an onnx_ir graph with one marker node per attention layer.

transformers' own exporter does the tracing. In place of attention it sees a function that leaves one node of the
domain `topw.trace` behind, with the layer's scale, soft cap and sliding window as attributes, and no mask at all. So
the traced graph is the same for every target, and what a target needs of attention and cache is written by a
lowering (see lowering/) instead of being recognised in somebody's pattern of nodes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter.onnx_fusions
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.masking_utils import AttentionMaskInterface

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.first_frequencies import first_frequencies
from topw_deploy.export.trace.shapes_only import ShapesOnly, shapes_only
from topw_deploy.export.trace.small_terms import small_terms_kept

MARKER_DOMAIN = "topw.trace"
MARKER_OP = "Attention"
_IMPLEMENTATION = "topw_marker"
_EXPERTS = "batched_mm"  # the only form of experts whose shapes do not depend on the routing
# Arguments of attention functions that do not change what a causal decoder computes in inference.
_HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPSET = 23  # has operators for norms and rotary embeddings; at 24 the tracer spells both out
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH, _PAST, _NEW = 2, 5, 3  # sizes of the sample inputs: any, but all different and above 1


@dataclass(frozen=True)
class TracedDecoder:
    """`graph`: input_ids, position_ids and past_key_values.{i}.key|value in, logits [batch, sequence, vocab] and
    present.{i}.key|value out; one marker node per layer."""

    model: ir.Model
    num_kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]


def trace(model: PreTrainedModel) -> TracedDecoder:
    """Trace `model` (in evaluation mode, on the CPU) at ONNX opset 23.

    Raises UnsupportedModelError, naming the architecture, for layers that are not plain or sliding-window attention,
    for an architecture that does not use transformers' attention interface, and for one that cannot be traced.
    """
    config = model.config.get_text_config(decoder=True)
    _check_layer_types(model, config)
    with shapes_only(model) as shapes, _marked(model), first_frequencies(model):
        cache = _filled_cache(model, config, shapes)
        traced = _export(model, cache)
    heads = tuple(layer.keys.shape[1] for layer in cache.layers)
    dims = tuple(layer.keys.shape[3] for layer in cache.layers)
    traced = _with_weights(model, traced, shapes)
    graph = traced.graph
    _name_inputs_and_outputs(graph)
    _forget_where_it_was_traced(traced)
    _check_markers(model, config, graph, len(heads))
    return TracedDecoder(traced, heads, dims)


def has_experts(model: PreTrainedModel) -> bool:
    """Whether the model routes tokens to experts, in a form that a graph can hold."""
    return bool(getattr(model, "_can_set_experts_implementation", lambda: False)())


def marker_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The marker nodes in layer order."""
    nodes = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == MARKER_OP]
    return sorted(nodes, key=lambda node: node.attributes["layer"].as_int())


def _check_layer_types(model: PreTrainedModel, config: Any) -> None:
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(other)}, but only full and sliding-window attention "
            "can be exported; choose another model or graft an ONNX decoder made by another exporter."
        )
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal decoder; choose a decoder-only language model."
        )


@contextlib.contextmanager
def _marked(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model's attention leaves markers, and its experts multiply in a form with fixed shapes."""
    AttentionInterface.register(_IMPLEMENTATION, _marker_attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    if has_experts(model):
        model.set_experts_implementation(_EXPERTS)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _filled_cache(model: PreTrainedModel, config: Any, shapes: ShapesOnly) -> DynamicCache:
    """A cache of `_PAST` tokens of the shapes that the model itself puts into one; its values are zeros.

    Made without the configuration on purpose: a cache that knows of sliding windows drops old tokens, the graph's
    never does (the mask hides them).
    """
    found = DynamicCache()
    with torch.no_grad(), shapes.mode:
        try:
            ids = torch.zeros(_BATCH, _PAST, dtype=torch.int64)
            model(input_ids=ids, past_key_values=found, use_cache=True)
        except Exception as error:  # whatever a foreign model raises, the user wants to know which model
            raise _refusal_behind(error) or _untraceable(model, error) from error
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
        with _silence():
            config = OnnxConfig(dynamic_shapes=dynamic_shapes, opset_version=_OPSET, optimize=False)
            return OnnxExporter().export(model, inputs, config).program
    except Exception as error:
        raise _refusal_behind(error) or _untraceable(model, error) from error


def _with_weights(model: PreTrainedModel, traced: ir.Model, shapes: ShapesOnly) -> ir.Model:
    """Weights where the trace has none, then torch's own clean-up, which may compute with all constants but them."""

    def may_fold(node: ir.Node) -> bool | None:
        return False if any(value is not None and value.name in shapes.weights for value in node.inputs) else None

    try:
        shapes.attach(traced)
        with _silence():
            with small_terms_kept(traced.graph):
                onnxscript.optimizer.optimize_ir(traced, should_fold=may_fold)
            onnxscript.rewriter.onnx_fusions.fuse(traced)
            return traced
    except Exception as error:
        raise _untraceable(model, error) from error


def _marker_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, heads, sequence, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, past + sequence, head_dim]
    value: torch.Tensor,  # [batch, kv_heads, past + sequence, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for attention while tracing; returns no values in eager mode that could be used."""
    unknown = sorted(name for name, given in others.items() if name not in _HARMLESS and given is not None)
    masked = attention_mask is not None  # transformers' masks are None here, so this is one of the model's own
    if masked or unknown or is_causal is False or not getattr(module, "is_causal", True):
        what = f"the attention argument {unknown[0]}" if unknown else "attention that is not causal"
        what = "an attention mask of its own" if masked else what
        raise UnsupportedModelError(
            f"{type(module).__name__} uses {what}, which the export does not know; "
            "choose another model or graft an ONNX decoder made by another exporter."
        )
    batch, heads, sequence, head_dim = query.shape
    attributes: dict[str, Any] = {
        "scale": float(head_dim**-0.5 if scaling is None else scaling),
        "softcap": float(softcap or 0.0),
        "window": int(sliding_window or 0),
        "layer": int(module.layer_idx),  # type: ignore[arg-type]
    }
    output = torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{MARKER_OP}",
        (query, key, value),
        attributes,
        dtype=query.dtype,
        shape=(batch, sequence, heads, value.shape[-1]),
        version=1,
    )
    return output, None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for transformers' mask construction: the lowering writes the mask."""


def _name_inputs_and_outputs(graph: ir.Graph) -> None:
    """The ecosystem's names (`past_key_values.{i}.key`, `present.{i}.key`) and speaking dimension names."""
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


def _forget_where_it_was_traced(model: ir.Model) -> None:
    """Drop stack traces, module paths and local file names: they bloat the file and tell of the exporting machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "decoder"
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*_all_values(model.graph), *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def _check_markers(model: PreTrainedModel, config: Any, graph: ir.Graph, layers: int) -> None:
    nodes = marker_nodes(graph)
    name = type(model).__name__
    if [node.attributes["layer"].as_int() for node in nodes] != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} shows {len(nodes)} attention calls for {layers} layers through transformers' attention interface, "
            "but exactly one per layer is needed; graft an ONNX decoder made by another exporter."
        )
    for index, node in enumerate(nodes):
        for position, kind in ((1, "key"), (2, "value")):
            producer = node.inputs[position].producer()
            if (
                producer is None
                or producer.op_type != "Concat"
                or node.inputs[position].name != f"present.{index}.{kind}"
            ):
                raise UnsupportedModelError(
                    f"{name} changes the {kind}s of layer {index} between cache and attention, which the export does "
                    "not know; graft an ONNX decoder made by another exporter."
                )
        expected = _expected_window(config, index)
        found = node.attributes["window"].as_int()
        if expected is not None and found != expected:
            raise UnsupportedModelError(
                f"{name} masks layer {index} with a window of {expected} tokens but calls attention with {found}, so "
                "its mask is not known for sure; graft an ONNX decoder made by another exporter."
            )


def _expected_window(config: Any, layer: int) -> int | None:
    """The window that the configuration's layer types promise, 0 for none; None where it lists no types."""
    types = getattr(config, "layer_types", None)
    if not types:
        return None
    return int(config.sliding_window) if types[layer] == "sliding_attention" else 0


def _untraceable(model: PreTrainedModel, error: BaseException) -> UnsupportedModelError:
    plain = _COLOURS.sub("", str(error)).strip()  # torch.onnx writes for terminals
    reason = (plain.splitlines() or [type(error).__name__])[0][:120]
    return UnsupportedModelError(
        f"the architecture {type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); "
        "graft an ONNX decoder made by another exporter."
    )


def _refusal_behind(error: BaseException | None) -> UnsupportedModelError | None:
    """Our own refusal, raised inside the tracer and wrapped by it."""
    while error is not None:
        if isinstance(error, UnsupportedModelError):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """torch.onnx prints its progress to stdout, which belongs to the result; a failed trace prints its whole graph."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "transformers", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # what fails is said once, by the error
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
