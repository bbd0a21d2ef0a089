"""Lower and run graphs of one placeholder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.trace.placeholders import PLACEHOLDER_DOMAIN

Build = Callable[[GraphEditor, ir.Node, Mapping[str, ir.Value]], tuple[ir.Value, ir.Value]]


class PlaceholderGraph:
    """A session that computes a lowered placeholder.

    inputs: the placeholder's, in its order; None for missing ones.
    others: further graph inputs, such as `past`.
    build: the lowering; returns output and present state.
    """

    def __init__(
        self,
        op_type: str,
        inputs: Mapping[str, torch.Tensor | None],
        others: Mapping[str, torch.Tensor],
        build: Build,
        **attributes: int | float | str,
    ) -> None:
        values = {name: _input(name, tensor) for name, tensor in {**inputs, **others}.items() if tensor is not None}
        given = [values.get(name) for name in inputs]
        while given[-1] is None:
            given.pop()
        placeholder = ir.node(
            op_type, given, domain=PLACEHOLDER_DOMAIN, attributes={"layer": 0, "state": 0, **attributes}
        )
        first = next(tensor for tensor in inputs.values() if tensor is not None)
        placeholder.outputs[0].type = ir.TensorType(_dtype(first))
        graph = ir.Graph(
            list(values.values()), [], nodes=[], opset_imports={"": 23, "com.microsoft": 1}, name="placeholder"
        )
        editor = GraphEditor(graph, "test")
        output, present = build(editor, placeholder, values)
        for name, value in (("output", output), ("present", present)):
            value.name = name
            value.type = value.type or ir.TensorType(_dtype(others["past"]))
            graph.outputs.append(value)
        editor.finish()
        self.graph = graph
        model = ir.to_proto(ir.Model(graph, ir_version=11))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        names = {value.name for value in self.session.get_inputs()}
        given = {name: tensor.numpy() for name, tensor in feeds.items() if tensor is not None and name in names}
        output, present = self.session.run(None, given)
        return torch.from_numpy(output), torch.from_numpy(present)


def _input(name: str, tensor: torch.Tensor) -> ir.Value:
    """A graph input like `tensor`, with symbolic batch and sequence axes where it has them."""
    sizes: list[int | str] = list(tensor.shape)
    if name in ("weight", "bias"):
        return ir.Value(name=name, type=ir.TensorType(_dtype(tensor)), shape=ir.Shape(sizes))
    sizes[0] = "batch"
    if name == "x":
        sizes[2] = "sequence"
    elif name not in ("past", "lengths"):
        sizes[1] = "sequence"
    return ir.Value(name=name, type=ir.TensorType(_dtype(tensor)), shape=ir.Shape(sizes))


def _dtype(tensor: torch.Tensor) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(str(tensor.dtype).removeprefix("torch.")))
