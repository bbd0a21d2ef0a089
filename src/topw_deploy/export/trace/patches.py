"""Workarounds for the tracer and its optimizer."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

_DEFAULT_ROPE = "default"
_POSITIONS = 7  # compared by `plain_rotary_embeddings`
_LARGEST_HIDDEN_TERM = 1e-7  # above the 1e-8 up to which the optimizer drops terms


@contextlib.contextmanager
def fixed_frequencies(model: torch.nn.Module) -> Iterator[None]:
    """Keep rotary frequencies constant inside the block.

    The rope types `longrope` and `dynamic` change them for long sequences, which cannot be traced. So the export's
    context ends where they change (`checkpoint.switching_rope`).
    """
    modules = [module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str | dict)]
    before = [module.rope_type for module in modules]
    for module, kind in zip(modules, before, strict=True):
        fixed = dict.fromkeys(kind, _DEFAULT_ROPE) if isinstance(kind, dict) else _DEFAULT_ROPE
        vars(module)["rope_type"] = fixed
    try:
        yield
    finally:
        for module, kind in zip(modules, before, strict=True):
            vars(module)["rope_type"] = kind


def plain_rotary_embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The multimodal rotary embeddings of `model` that equal a plain rotary embedding for text.

    They choose an axis (time, height, width) for each frequency. In text the axes have equal positions, so the choice
    changes nothing; but its nodes in a trace would keep attention from rotating inside the operator.
    """
    return [module for module in model.modules() if hasattr(module, "mrope_section") and _is_plain_for_text(module)]


@contextlib.contextmanager
def positions_of_text(embeddings: list[torch.nn.Module], position_ids: torch.Tensor) -> Iterator[None]:
    """Make the modules `embeddings` rotate by `position_ids` [batch, sequence] inside the block."""
    for module in embeddings:
        vars(module)["forward"] = partial(_rotary_factors, module, position_ids=position_ids)
    try:
        yield
    finally:
        for module in embeddings:
            del vars(module)["forward"]


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
