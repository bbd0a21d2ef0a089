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
_SAMPLES = 7  # positions
_SMALLEST_TERM = 1e-7  # above the optimizer's 1e-8


@contextlib.contextmanager
def fixed_frequencies(model: torch.nn.Module) -> Iterator[None]:
    """Fix rotary frequencies inside the block.

    `longrope` and `dynamic` change them for long sequences, which cannot be traced. So the export's context ends where
    they change (`checkpoint.switching_rope`).
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


def plain_for_text(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The multimodal rotary embeddings of `model` that compute plain rotary angles if all axes are equal.

    In text the axes (time, height, width) have equal positions, so the choice of an axis for each frequency changes
    nothing. Traced, its nodes would keep attention from rotating inside the operator.
    """
    return [module for module in model.modules() if hasattr(module, "mrope_section") and _is_plain_for_text(module)]


@contextlib.contextmanager
def positions_of_text(embeddings: list[torch.nn.Module], position_ids: torch.Tensor) -> Iterator[None]:
    """Make `embeddings` rotate by `position_ids` [batch, sequence] inside the block."""
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
    """cos and sin [batch, sequence, rotary_dim] in the type of `x`, with pairs half of them apart."""
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _is_plain_for_text(module: Any) -> bool:
    frequencies = getattr(module, "inv_freq", None)
    if not isinstance(frequencies, torch.Tensor) or not hasattr(module, "attention_scaling"):
        return False
    if frequencies.device.type == "meta":
        return False
    x, positions = torch.zeros(1), torch.arange(_SAMPLES)[None]
    try:
        wanted = module(x, positions.expand(3, 1, _SAMPLES))
    except Exception:  # noqa: BLE001  # an embedding that takes other arguments
        return False
    found = _rotary_factors(module, x, position_ids=positions)
    return len(wanted) == 2 and all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


@contextlib.contextmanager
def small_terms_kept(graph: ir.Graph) -> Iterator[None]:
    """Hide small constant addends, such as Helium's norm epsilon, from the optimizer.

    The optimizer drops terms up to 1e-8. Without the epsilon, rows of zeros (padding) become NaN.
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
    producer = None if value is None else value.producer()
    if node.domain or node.op_type not in ("Add", "Sub") or producer is None or producer.op_type != "Constant":
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return tensor if 0 < abs(float(tensor.numpy().reshape(-1)[0])) <= _SMALLEST_TERM else None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Suppress torch.onnx's progress messages and its dumps of failed graphs."""
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
