"""Trace without weights: parameters are fake tensors in the trace, and then initializers that are read on demand."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter.onnx_fusions
import torch
from onnx_ir import tensor_adapters
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateInitializersPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import Cache, PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph import LazyWeight
from topw_deploy.export.source.checkpoint import UnreadTensor, read_part
from topw_deploy.export.source.files import EncodedWeight, StoredTensor
from topw_deploy.export.source.text_decoder import replaced
from topw_deploy.export.trace.attention import marked_attention
from topw_deploy.export.trace.experts import marked_experts
from topw_deploy.export.trace.layers import RepeatedLayers
from topw_deploy.export.trace.mixers import marked_mixers, takes_cache
from topw_deploy.export.trace.placeholders import (
    PLACEHOLDER_DOMAIN,
    MixerPlaceholders,
    attention_placeholders,
    untraceable,
)


class Weights:
    """The parameters of a model that has fake ones in their place.

    fake_mode: computes shapes instead of values.
    by_name: the real parameters.
    """

    def __init__(self, by_name: dict[str, torch.Tensor]) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_name = by_name

    @contextlib.contextmanager
    def attached(self, graph: ir.Graph) -> Iterator[None]:
        """Replace the fake initializers of `graph` by inputs inside the block, and by the real parameters after it.

        So the optimizer can neither fold weights nor depend on their values.
        Raises ValueError for an initializer that is no parameter.
        """
        hidden = []
        for name, value in list(graph.initializers.items()):
            fake = getattr(value.const_value, "raw", None)
            if not isinstance(fake, FakeTensor):
                continue
            weight = self.by_name.get(name)
            if weight is None or weight.shape != fake.shape or weight.dtype != fake.dtype:
                raise ValueError(f"the weight {name} of the graph is not a parameter of the model")
            hidden.append(graph.initializers.pop(name))
            value.const_value = None
        graph.inputs.extend(hidden)
        yield
        for value in hidden:
            graph.inputs.remove(value)
            if value.uses():
                value.const_value = weight_tensor(self.by_name[str(value.name)], str(value.name))
                graph.register_initializer(value)

    def initializer(self, graph: ir.Graph, name: str) -> ir.Value:
        """The initializer of `graph` for the parameter `name`, which it gets if it lacks it."""
        if name not in graph.initializers:
            tensor = weight_tensor(self.by_name[name], name)
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor
            )
            graph.register_initializer(value)
        return graph.initializers[name]


@contextlib.contextmanager
def fake_parameters(model: torch.nn.Module) -> Iterator[Weights]:
    """Replace the parameters of `model` by fake tensors inside the block; shared parameters stay shared."""
    real = dict(model.named_parameters(remove_duplicate=False))
    weights = Weights(
        {
            name: parameter if isinstance(parameter, UnreadTensor) else parameter.detach()
            for name, parameter in real.items()
        }
    )
    fakes: dict[int, torch.nn.Parameter] = {}
    for parameter in real.values():
        if id(parameter) not in fakes:
            with weights.fake_mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            fakes[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
    try:
        _set_parameters(model, {name: fakes[id(parameter)] for name, parameter in real.items()})
        yield weights
    finally:
        _set_parameters(model, real)


def weight_tensor(parameter: torch.Tensor, name: str) -> ir.TensorProtocol:
    """`parameter` as the tensor of an initializer; an UnreadTensor is read on demand."""
    if not isinstance(parameter, UnreadTensor):
        return tensor_adapters.TorchTensor(parameter.detach(), name=name)

    load = lambda: tensor_adapters.TorchTensor(parameter.values(), name=name)  # noqa: E731
    dtype, shape = tensor_adapters.from_torch_dtype(parameter.dtype), tuple(parameter.shape)
    read = None if parameter.file is None else partial(_read_part, parameter.file, parameter.dtype)
    return LazyWeight(id(parameter), dtype, shape, load, read, name)


def _set_parameters(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _read_part(file: StoredTensor | EncodedWeight, dtype: torch.dtype, index: Any) -> np.ndarray:
    """The values at `index` (slices or ids), as an array of ONNX's type for `dtype`."""
    return tensor_adapters.TorchTensor(read_part(file, index).to(dtype).contiguous()).numpy()


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPSET = 23  # at 24 the tracer decomposes norms and rotary embeddings
_BATCH, _SEQUENCE = 2, 3  # sample sizes: the tracer takes equal sizes and 1 for constants
# Model type -> why no graph over tokens can compute the model.
_REFUSED = {
    "blt": "runs its middle layers once for each patch of bytes, and where a patch starts depends on entropies that a "
    "second model predicts",
    "cpmant": "lets a prompt's tokens attend to later ones, so its logits depend on how a prompt is divided into calls",
}


@dataclass(frozen=True)
class TracedDecoder:
    """A traced decoder, with placeholders.

    model: inputs input_ids and, if the model reads positions, position_ids, both int64 [batch, sequence]; output logits
        [batch, sequence, vocab].
    num_layers: the configuration's num_hidden_layers.
    """

    model: ir.Model
    num_layers: int


def trace(model: PreTrainedModel) -> TracedDecoder:
    """Trace `model`, which must be in evaluation mode on the CPU, at opset 23.

    Raises UnsupportedModelError for a model that is no causal decoder over tokens, for a failed trace, and for a trace
    without placeholders or with several attention placeholders for one layer.
    """
    config = model.config.get_text_config(decoder=True)
    _check_architecture(model, config)
    layers = RepeatedLayers(model)
    traced = None
    if layers:
        with contextlib.suppress(UnsupportedModelError):  # of irregular layers, or of any that fail
            traced = _trace_graph(model, layers)
    if traced is None:
        traced = _trace_graph(model, None)
    _name_dimensions(traced.graph)
    _remove_metadata(traced)
    _check_placeholders(model, config, traced.graph)
    return TracedDecoder(traced, int(config.num_hidden_layers))


def _trace_graph(model: PreTrainedModel, layers: RepeatedLayers | None) -> ir.Model:
    """The optimized graph of `model`, with weights.

    layers: to trace layers of equal structure once; None to trace each layer.
    """
    with marked_experts(model), fake_parameters(model) as weights, marked_attention(model), fixed_frequencies(model):
        traced = _export(model, layers)
    try:
        with silenced_libraries():
            with weights.attached(traced.graph), hidden_small_terms(traced.graph):
                onnxscript.optimizer.optimize_ir(traced)
            if layers is not None:
                layers.copy_layers(traced.graph, partial(weights.initializer, traced.graph))
                CommonSubexpressionEliminationPass()(traced)
            DeduplicateInitializersPass()(traced)
            onnxscript.rewriter.onnx_fusions.fuse(traced)
    except Exception as error:
        raise _untraceable(model, error) from error
    return traced


def _check_architecture(model: PreTrainedModel, config: Any) -> None:
    """Raise UnsupportedModelError for a model that is no causal decoder over tokens."""
    reason = _REFUSED.get(model.config.model_type) or _REFUSED.get(getattr(config, "model_type", ""))
    if getattr(config, "is_encoder_decoder", False):
        reason = "is not a causal decoder"
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}; choose a decoder-only model of tokens.")


def _check_placeholders(model: PreTrainedModel, config: Any, graph: ir.Graph) -> None:
    """Raise UnsupportedModelError if the graph has no placeholder, or several attention placeholders for one layer."""
    nodes = attention_placeholders(graph)
    name = type(model).__name__
    layers = [node.attributes["layer"].as_int() for node in nodes]
    if len(set(layers)) != len(layers) or not any(node.domain == PLACEHOLDER_DOMAIN for node in graph):
        raise untraceable(
            f"{name} shows {len(nodes)} attention calls for {config.num_hidden_layers} layers through transformers' "
            "attention interface, but one per attention layer is needed"
        )


def _export(model: PreTrainedModel, layers: RepeatedLayers | None) -> ir.Model:
    """The graph as transformers' exporter returns it, not optimized and with fake parameters."""
    auto = torch.export.Dim.AUTO
    inputs = {
        "input_ids": torch.ones(_BATCH, _SEQUENCE, dtype=torch.int64),
        "position_ids": torch.arange(_SEQUENCE).repeat(_BATCH, 1),
    }
    try:
        with silenced_libraries(), _traceable_forward(model, layers):
            config = OnnxConfig(
                dynamic_shapes={name: {0: auto, 1: auto} for name in inputs}, opset_version=_OPSET, optimize=False
            )
            return OnnxExporter().export(model, inputs, config).program
    except Exception as error:  # model code may raise anything
        raise _refusal(model, error) from error


def _traceable_forward(
    model: PreTrainedModel, layers: RepeatedLayers | None
) -> contextlib.AbstractContextManager[None]:
    """Inside the block, make `model` take ids and positions, use a `TracedCache` and return only logits.

    layers: see `_trace_graph`.
    """
    forward = model.forward
    arguments = forward_arguments(model)
    caches = ("cache_params", "past_key_values")  # the first in Mamba's like
    cache_argument = next((name for name in arguments if name in caches), caches[-1])
    rotary_embeddings = plain_rotary_embeddings(model)

    takes_mask = is_own_code(model) and "attention_mask" in arguments

    def compute_logits(input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = {"position_ids": position_ids} if "position_ids" in arguments else {}
        if takes_mask:  # as transformers passes it for new tokens without padding
            positions["attention_mask"] = torch.ones_like(input_ids)
        cache = TracedCache(position_ids)
        cached = {cache_argument: cache, "use_cache": True} if takes_cache(model) else {"use_cache": False}
        once = contextlib.nullcontext() if layers is None else layers.traced_once()
        with marked_mixers(model, MixerPlaceholders(cache)), positions_of_text(rotary_embeddings, position_ids), once:
            outputs = forward(input_ids=input_ids, **cached, **positions)
        return {"logits": outputs.logits}

    return replaced((model, "forward", compute_logits))


def is_own_code(model: torch.nn.Module) -> bool:
    """Whether the class of `model` comes with the checkpoint, not with transformers."""
    return type(model).__module__.startswith("transformers_modules")


def forward_arguments(model: PreTrainedModel) -> list[str]:
    """The names of the arguments that the forward of `model` takes.

    A forward with `**kwargs`, as remote code often has, also takes the arguments of those to which it can pass them:
    of its base classes first, and then of the models within.
    """
    found = dict(inspect.signature(model.forward).parameters)
    if any(argument.kind is argument.VAR_KEYWORD for argument in found.values()):
        bases = [vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base)]
        parts = [part.forward for part in model.modules() if isinstance(part, PreTrainedModel)]
        for forward in (*bases, *parts):
            found |= {name: each for name, each in inspect.signature(forward).parameters.items() if name not in found}
    return list(found)


def _name_dimensions(graph: ir.Graph) -> None:
    """Name the symbolic sizes batch_size and sequence_length, also within expressions.

    An unknown size gets no name, because onnxruntime assumes that dimensions of one name are equal.
    """
    names: dict[str, str] = {}
    for value in graph.inputs:
        for dimension, name in zip(value.shape, ("batch_size", "sequence_length"), strict=True):
            names[str(dimension)] = name

    def renamed(size: Any) -> Any:
        if isinstance(size, int) or size.value is None:
            return size
        return re.sub(r"\bs\d+\b", lambda match: names.get(match[0], match[0]), str(size))

    for value in _inputs_and_outputs(graph):
        if value.shape is not None:
            value.shape = ir.Shape(list(map(renamed, value.shape)))


def _inputs_and_outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs of the graph and the outputs of its nodes."""
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _remove_metadata(model: ir.Model) -> None:
    """Remove stack traces and paths, which enlarge the file and name folders of the exporting machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "decoder"
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*_inputs_and_outputs(model.graph), *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def _refusal(model: PreTrainedModel, error: Exception) -> UnsupportedModelError:
    """The UnsupportedModelError among the causes of `error`, else one that says why the trace failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedModelError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return _untraceable(model, error)


def _untraceable(model: PreTrainedModel, error: Exception) -> UnsupportedModelError:
    first = _COLOURS.sub("", str(error)).strip().partition("\n")[0]  # torch.onnx colours its messages
    reason = first[:120] or type(error).__name__
    return untraceable(f"the architecture {type(model).__name__} cannot be traced ({type(error).__name__}: {reason})")


class _EmptyLayers(list[Any]):
    """The layers of a cache that stores nothing: any index is valid.

    Qwen 4's model reads its indexers' positions from a layer, and accepts None.
    """

    def __getitem__(self, _index: Any) -> Any:
        return SimpleNamespace(indexer_position_ids=None)


class TracedCache(Cache):
    """The cache of a model while it is traced: it stores nothing, and returns what a layer gives it.

    positions: the positions of the call's tokens, int64 [batch, sequence], for layers that read them from the cache.
    convolution, recurrence: (layer, number of the state in the layer) of the last request for such a state, to which
        the next placeholder belongs; None before the first.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(layers=_EmptyLayers())
        self.positions = positions
        self.convolution: tuple[int, int] | None = None
        self.recurrence: tuple[int, int] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.convolution = layer_idx, state_idx

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        self.convolution = layer_idx, state_idx
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.recurrence = layer_idx, state_idx

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        return recurrent_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return indexer_key_states

    def is_recording_past(self, *_args: Any) -> bool:
        return False

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, *_args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


_DEFAULT_ROPE = "default"
_POSITIONS = 7  # compared by `plain_rotary_embeddings`
_LARGEST_HIDDEN_TERM = 1e-7  # above the 1e-8 up to which the optimizer drops terms


def fixed_frequencies(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keep rotary frequencies constant inside the block.

    The rope types `longrope` and `dynamic` change them for long sequences, which cannot be traced. So the export's
    context ends where they change (`text_decoder.switching_rope`).
    """
    kinds = [(module, getattr(module, "rope_type", None)) for module in model.modules()]
    return replaced(
        *(
            (module, "rope_type", dict.fromkeys(kind, _DEFAULT_ROPE) if isinstance(kind, dict) else _DEFAULT_ROPE)
            for module, kind in kinds
            if isinstance(kind, str | dict)
        )
    )


def plain_rotary_embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The multimodal rotary embeddings of `model` that equal a plain rotary embedding for text.

    They choose an axis (time, height, width) for each frequency. In text the axes have equal positions, so the choice
    changes nothing; but its nodes in a trace would keep attention from rotating inside the operator.
    """
    return [module for module in model.modules() if hasattr(module, "mrope_section") and _is_plain_for_text(module)]


def positions_of_text(
    embeddings: list[torch.nn.Module], position_ids: torch.Tensor
) -> contextlib.AbstractContextManager[None]:
    """Make the modules `embeddings` rotate by `position_ids` [batch, sequence] inside the block."""
    return replaced(
        *((module, "forward", partial(_rotary_factors, module, position_ids=position_ids)) for module in embeddings)
    )


def _rotary_factors(
    module: Any, x: torch.Tensor, *_: Any, position_ids: torch.Tensor, **_others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [batch, sequence, rotary_dim] in the type of `x`, for pairs half of rotary_dim apart."""
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _is_plain_for_text(module: Any) -> bool:
    """Whether `module` computes the same as `_rotary_factors` for equal positions on three axes."""
    frequencies = getattr(module, "inv_freq", None)
    if not isinstance(frequencies, torch.Tensor) or not hasattr(module, "attention_scaling"):
        return False
    if frequencies.device.type == "meta":
        return False
    x, positions = torch.zeros(1), torch.arange(_POSITIONS)[None]
    try:
        factors = module(x, positions.expand(3, 1, _POSITIONS))
    except Exception:  # noqa: BLE001  # an embedding that takes other arguments
        return False
    plain = _rotary_factors(module, x, position_ids=positions)
    return len(factors) == 2 and all(torch.equal(one, other) for one, other in zip(factors, plain, strict=True))


@contextlib.contextmanager
def hidden_small_terms(graph: ir.Graph) -> Iterator[None]:
    """Hide small constant addends, such as Helium's norm epsilon, from the optimizer inside the block.

    The optimizer drops terms up to 1e-8. Without the epsilon, rows of zeros (padding) become NaN. Inside the block the
    addends are graph inputs, and after it initializers.
    """
    hidden: dict[tuple[str, bytes], tuple[ir.Value, ir.TensorProtocol]] = {}
    for node in graph:
        for place, term in enumerate(node.inputs):
            tensor = _small_term(node, term)
            if tensor is None:
                continue
            key = (tensor.dtype.name, tensor.tobytes())
            if key not in hidden:
                name = f"small_term_{len(hidden)}"
                value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape))
                graph.inputs.append(value)
                hidden[key] = value, tensor
            node.replace_input_with(place, hidden[key][0])
    yield
    for value, tensor in hidden.values():
        graph.inputs.remove(value)
        value.const_value = tensor
        graph.register_initializer(value)


def _small_term(node: ir.Node, value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of `value` if it is a small constant number that `node` adds or subtracts, else None."""
    producer = None if value is None else value.producer()
    if node.domain or node.op_type not in ("Add", "Sub") or producer is None or producer.op_type != "Constant":
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return tensor if 0 < abs(float(tensor.numpy().reshape(-1)[0])) <= _LARGEST_HIDDEN_TERM else None


@contextlib.contextmanager
def silenced_libraries() -> Iterator[None]:
    """Suppress torch.onnx's progress messages and its dumps of failed graphs inside the block."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "transformers", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
