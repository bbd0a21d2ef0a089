"""A traced graph on the disk, without weights: tracing is the slow part, and needs none."""

from __future__ import annotations

import onnx_ir as ir
import torch

from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.trace.shapes_only import weight_tensor
from topw_deploy.export.trace.trace import TracedDecoder

_FILE = "trace.onnx"
_STAGE = "traced graph"
_NOWHERE = "checkpoint"  # the data file that stands for the model's parameters


def save_trace(traced: TracedDecoder, model: torch.nn.Module, journal: Journal, stamp: str) -> None:
    """Keep `traced`; weights that are parameters of `model` are left out."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = [value for name, value in traced.model.graph.initializers.items() if name in parameters]
    before = [value.const_value for value in values]
    for value, tensor in zip(values, before, strict=True):
        assert tensor is not None
        shape, name = ir.Shape([int(size) for size in tensor.shape]), value.name or ""
        value.const_value = ir.ExternalTensor(_NOWHERE, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    shapes = {"num_kv_heads": traced.num_kv_heads, "head_dim": traced.head_dim}
    try:
        journal.keep_file(_STAGE, stamp, _FILE, lambda path: ir.save(traced.model, path), **shapes)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def load_trace(model: torch.nn.Module, journal: Journal, stamp: str) -> TracedDecoder | None:
    """The graph that was kept under this stamp, with the parameters of `model` as its weights; None without one."""
    found = journal.find(_STAGE, stamp)
    if found is None:
        return None
    graph_model = ir.load(found["file"])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in graph_model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = weight_tensor(parameters[name], name)
    return TracedDecoder(graph_model, tuple(found["num_kv_heads"]), tuple(found["head_dim"]))
