"""Workarounds for the tracer and its optimizer."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import onnx_ir as ir
import torch

_DEFAULT_ROPE = "default"
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
