"""Small graphs that a test writes with an editor and runs in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.graph import GraphEditor

FLOAT = ir.DataType.FLOAT


def new_editor() -> GraphEditor:
    """An editor of an empty graph."""
    return GraphEditor(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy"), "toy")


def model_of(editor: GraphEditor, *outputs: ir.Value) -> ir.Model:
    """The model of the editor's graph with these outputs."""
    editor.graph.outputs.extend(outputs)
    editor.finish()
    return ir.Model(editor.graph, ir_version=10)


def run(model: ir.Model, *, optimize: bool = True, **feeds: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    serialized = ir.to_proto(model).SerializeToString()
    found: list[np.ndarray] = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"]).run(
        None, feeds
    )
    return found


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]
