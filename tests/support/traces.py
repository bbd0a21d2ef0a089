"""Each model is traced once in a test run.

Tracing takes most of a small export's time and depends on a model's structure, not on its weights. A repeated model
gets the trace that the first one left. `tests/export/trace` tests tracing
itself.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from topw_deploy.export.trace.trace import TracedDecoder, weight_tensor
from topw_deploy.export.trace.trace import trace as trace_anew

folder: Path | None = None
"""Where traces are kept; None: every model is traced."""
_LIBRARIES = ("torch.", "transformers.")


def trace(model: PreTrainedModel) -> TracedDecoder:
    """`topw_deploy.export.trace.trace.trace`, or what it returned for the same structure."""
    stamp = structure_of(model)
    if folder is None or stamp is None:
        return trace_anew(model)
    kept = folder / f"{stamp}.onnx"
    if kept.is_file():
        return _load(kept, model)
    traced = trace_anew(model)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _save(traced, model, Path(scratch) / "trace.onnx")
        (Path(scratch) / "trace.onnx").replace(kept)
    return traced


def _save(traced: TracedDecoder, model: torch.nn.Module, path: Path) -> None:
    """Save the graph of `traced` to `path`, without the parameters of `model`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = [value for name, value in traced.model.graph.initializers.items() if name in parameters]
    before = [value.const_value for value in values]
    for value, tensor in zip(values, before, strict=True):
        shape, name = ir.Shape([int(size) for size in tensor.shape]), value.name or ""
        value.const_value = ir.ExternalTensor("checkpoint", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    try:
        ir.save(traced.model, path)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def _load(path: Path, model: PreTrainedModel) -> TracedDecoder:
    """Load a trace that `_save` saved to `path`, with the parameters of `model`."""
    graph_model = ir.load(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in graph_model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weight_tensor(parameters[name], name)
    return TracedDecoder(graph_model, int(model.config.get_text_config(decoder=True).num_hidden_layers))


def structure_of(model: PreTrainedModel) -> str | None:
    """A digest of all that a trace depends on; None if the model runs code that is not its library's."""
    modules = dict(model.named_modules())
    if any("forward" in vars(m) or not type(m).__module__.startswith(_LIBRARIES) for m in modules.values()):
        return None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    digest = hashlib.sha256()
    for part in (
        json.dumps({**model.config.to_dict(), "_name_or_path": None}, sort_keys=True, default=str),
        [(name, type(module).__qualname__) for name, module in modules.items()],
        [(name, first.setdefault(id(p), name), tuple(p.shape), str(p.dtype)) for name, p in parameters.items()],
        [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()],
    ):
        digest.update(repr(part).encode())
    for _, buffer in model.named_buffers():  # frequencies, biases of experts: constants of the graph
        digest.update(buffer.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
