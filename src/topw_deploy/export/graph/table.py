"""Read a graph's embedding table in blocks of rows.

The table of a Gather is read from its initializer, which may be transposed. For other lookups, onnxruntime runs the
decoder's own nodes, so that the rows are exactly those that the sampler will see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph.editor import GraphEditor, attribute_values
from topw_deploy.export.graph.embedding import EmbeddingNode
from topw_deploy.export.graph.lazy_weight import LazyWeight, Read

ReadRows = Callable[[np.ndarray], np.ndarray]
"""Returns the rows of ids int64 [n]: float32 [n, hidden]."""


class EmbeddingTable:
    """A graph's embedding table as an array-like float32 [rows, hidden] that reads rows on demand.

    rows: use only the first ones; None for all.
    """

    def __init__(self, embedding: EmbeddingNode, rows: int | None = None) -> None:
        self.shape = (embedding.rows if rows is None else rows, embedding.hidden)
        self.dtype = np.dtype(np.float32)
        self._read = _stored_rows(embedding) or _looked_up_rows(embedding)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The rows of a slice or of ids, integers [n]: float32 [n, hidden]."""
        ids = np.arange(self.shape[0])[index] if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        return self._read(ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole table, for callers that cannot read blocks."""
        return self[:].astype(dtype or self.dtype)


def _stored_rows(embedding: EmbeddingNode) -> ReadRows | None:
    """A function that reads rows of the initializer of a Gather; None for other lookups."""
    if embedding.node.op_type != "Gather":
        return None
    value, producer = embedding.data[0], embedding.data[0].producer()
    transposed = producer is not None and producer.op_type == "Transpose"
    if transposed and producer is not None and producer.inputs[0] is not None:
        value = producer.inputs[0]
    elif producer is not None:
        return None
    tensor = value.const_value
    if tensor is None:
        return None
    if isinstance(tensor, ir.ExternalTensor):
        return _mapped_rows(tensor, transposed)
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        return _lazy_rows(tensor.read, transposed)
    array = tensor.numpy().T if transposed else tensor.numpy()
    return lambda ids: np.asarray(array[ids]).astype(np.float32)


def stored_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor's values. Memory-maps data files itself, because onnx_ir refuses hard-linked ones.

    onnx_ir reads types of less than a byte.
    """
    whole_bytes = tensor.dtype.itemsize >= 1
    if not isinstance(tensor, ir.ExternalTensor) or not whole_bytes:
        return tensor.numpy()
    shape = tuple(int(size) for size in tensor.shape)
    return np.memmap(tensor.path, dtype=tensor.dtype.numpy(), mode="r", offset=tensor.offset or 0, shape=shape)


def _mapped_rows(tensor: ir.ExternalTensor, transposed: bool) -> ReadRows:
    """A function that reads rows of a data file. It maps the file for each read, which then releases the pages."""

    def read(ids: np.ndarray) -> np.ndarray:
        array = stored_array(tensor)
        rows = array.T if transposed else array
        consecutive = len(ids) > 0 and ids[-1] - ids[0] == len(ids) - 1 and bool((np.diff(ids) == 1).all())
        return np.asarray(rows[ids[0] : ids[-1] + 1] if consecutive else rows[ids]).astype(np.float32)

    return read


def _lazy_rows(read: Read, transposed: bool) -> ReadRows:
    """A function that reads rows of a `LazyWeight`."""
    if transposed:
        return lambda ids: read((slice(None), ids)).T.astype(np.float32)
    return lambda ids: read(ids).astype(np.float32)


def _looked_up_rows(embedding: EmbeddingNode) -> ReadRows:
    """A function that looks rows up with the decoder's own nodes, in onnxruntime."""
    import onnxruntime

    model, feeds = _lookup_model(embedding)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda ids: session.run(["rows"], {"ids": ids.astype(np.int64), **feeds})[0].astype(np.float32)


def _lookup_model(embedding: EmbeddingNode) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """A model with the lookup alone, from `ids` int64 [n] to `rows` float32 [n, hidden], and its weights as feeds."""
    source = embedding.node.graph
    imports = dict(source.opset_imports) if source is not None else {}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="embedding")
    editor = GraphEditor(graph, "lookup")
    feeds: dict[str, np.ndarray] = {}
    copies: dict[int, ir.Value] = {}

    def copy(value: ir.Value | None) -> ir.Value | None:
        """Copy the nodes that make `value`, each once; their initializers become inputs."""
        if value is None:
            return None
        if id(value) not in copies:
            producer = value.producer()
            if producer is None:
                name, tensor = str(value.name), value.const_value
                if tensor is None:
                    raise UnsupportedModelError(f"the embedding lookup's input {name} has no stored value.")
                feeds[name] = stored_array(tensor)
                copies[id(value)] = editor.input(name, tensor.dtype, [int(size) for size in tensor.shape])
            else:
                inputs = [copy(source) for source in producer.inputs]
                attributes = attribute_values(producer)
                copies[id(value)] = editor.op(producer.op_type, inputs, domain=producer.domain, **attributes)
        return copies[id(value)]

    data = [copy(value) for value in embedding.data]
    ids = editor.input("ids", ir.DataType.INT64, ["n"])
    position = embedding.form.indices_position
    attributes: dict[str, Any] = dict(embedding.form.attributes)
    rows = editor.op(
        embedding.node.op_type,
        [*data[:position], ids, *data[position:]],
        domain=embedding.node.domain,
        name="row_values",
        **attributes,
    )
    graph.outputs.append(
        editor.op(
            "Cast", [rows], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=["n", embedding.hidden], name="rows"
        )
    )
    editor.finish()
    return ir.Model(graph, ir_version=10), feeds
