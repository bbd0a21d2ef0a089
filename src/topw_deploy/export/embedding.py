"""Find and describe the node that looks up token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph import (
    GraphEditor,
    LazyWeight,
    Read,
    constant_of,
    find_input,
    fixed_size,
    is_constant,
    number_attribute,
    producer,
)

AttributeValue = int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The operator and the types of an embedding node, which maps ids [...] to rows [..., hidden].

    domain, op_type: the operator.
    attributes: (name, value), sorted by name where the node comes from a graph.
    inputs: (element type, shape) of each input but the ids.
    indices_position: the position of the ids among the inputs.

    Raises UnsupportedModelError for a Gather axis other than 0.
    """

    domain: str
    op_type: str
    attributes: tuple[tuple[str, AttributeValue], ...]
    inputs: tuple[tuple[ir.DataType, tuple[int, ...]], ...]
    indices_position: int

    def __post_init__(self) -> None:
        if self.op_type == "Gather" and not self.domain and dict(self.attributes).get("axis", 0) != 0:
            raise UnsupportedModelError(
                f"the embedding node is a Gather over axis {dict(self.attributes)['axis']}, but token rows need "
                "axis 0; transpose the table before exporting."
            )

    @property
    def form(self) -> str:
        """The operator and its sorted attributes as text, e.g. `Gather(axis=0)`, by which a kernel knows the form."""
        attributes = dict(self.attributes)
        if self.op_type == "Gather" and not self.domain:
            attributes.setdefault("axis", 0)
        name = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"{name}({','.join(f'{key}={attributes[key]}' for key in sorted(attributes))})"


def plain_gather(rows: int, hidden: int, dtype: ir.DataType = ir.DataType.FLOAT) -> EmbeddingForm:
    """The form of a Gather over axis 0 of one table [rows, hidden]."""
    return EmbeddingForm("", "Gather", (("axis", 0),), ((dtype, (rows, hidden)),), 1)


# Operators that may stand between `input_ids` and the lookup, because they keep the ids' values and order.
_ORDER_KEEPING_OPS = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity"}
_LOOKUP_OPS = {("", "Gather"), ("com.microsoft", "GatherBlockQuantized")}
_IDS_POSITION = 1  # of the ids among the inputs of both


@dataclass(frozen=True)
class EmbeddingNode:
    """The node that looks up token ids in a table.

    form: see `EmbeddingForm`.
    data: the node's inputs without the ids.
    rows, hidden: the shape of the table after dequantisation.
    """

    node: ir.Node
    form: EmbeddingForm
    data: tuple[ir.Value, ...]
    rows: int
    hidden: int


def find_embedding(graph: ir.Graph) -> EmbeddingNode:
    """Find the node that looks up `input_ids`.

    Of several (Gemma 4 also has embeddings for each layer), it is the one whose table the head shares.
    Raises UnsupportedModelError if there is none, or more than one.
    """
    lookups = lookups_of(graph, "input_ids")
    if len(lookups) > 1:
        lookups = [node for node in lookups if _is_tied(node)] or lookups
    if not lookups:
        raise UnsupportedModelError(
            "the decoder has no input embeddings: no Gather or GatherBlockQuantized of a constant table is fed by "
            "input_ids; export with --metric uniform, which needs none."
        )
    if len(lookups) > 1:
        names = ", ".join(node.name or node.op_type for node in lookups)
        raise UnsupportedModelError(
            f"the decoder looks input_ids up in {len(lookups)} tables ({names}), so the token geometry is ambiguous; "
            "export with --metric uniform."
        )
    return _describe(lookups[0])


def lookups_of(graph: ir.Graph, name: str) -> list[ir.Node]:
    """All nodes that look the graph's input `name` up in a constant matrix."""
    ids = find_input(graph, name)
    waiting, seen, lookups = [ids] if ids is not None else [], set(), []
    while waiting:
        for node, position in waiting.pop().uses():
            if node.op_type in _ORDER_KEEPING_OPS and node.domain == "" and position == 0:
                if id(node) not in seen:
                    seen.add(id(node))
                    waiting.append(node.outputs[0])
            elif (node.domain, node.op_type) in _LOOKUP_OPS and position == _IDS_POSITION:
                table = node.inputs[0]
                if is_constant(table) and table is not None and table.shape is not None and len(table.shape) == 2:
                    lookups.append(node)
    return lookups


def _is_tied(lookup: ir.Node) -> bool:
    """Whether other nodes use the table too: the head, or the sampler in a finished graph.

    Follows the table back through the nodes that make it, as a transposed or cast table is shared before them.
    """
    value, user = lookup.inputs[0], lookup
    while value is not None:
        if any(node is not user for node in value.consumers()):
            return True
        producer = value.producer()
        if producer is None:
            return False
        value, user = producer.inputs[0], producer
    return False


def _describe(node: ir.Node) -> EmbeddingNode:
    """Describe a lookup. Raises UnsupportedModelError for an omitted input or an unknown type or shape."""
    data = tuple(value for index, value in enumerate(node.inputs) if index != _IDS_POSITION and value is not None)
    if len(data) != len(node.inputs) - 1:
        raise UnsupportedModelError(f"the embedding node {node.name} omits an optional input; write it explicitly.")
    inputs = tuple(
        (_element_type(value), tuple(fixed_size(value, axis) for axis in range(len(value.shape or (0, 0)))))
        for value in data
    )
    attributes = tuple(
        sorted(
            (name, tuple(a.value) if isinstance(a.value, list | tuple) else a.value)
            for name, a in node.attributes.items()
        )
    )
    form = EmbeddingForm(node.domain, node.op_type, attributes, inputs, _IDS_POSITION)
    stored, (rows, width) = inputs[0]
    if node.op_type == "GatherBlockQuantized" and stored == ir.DataType.UINT8:  # several codes in a byte
        width *= 8 // int(number_attribute(node, "bits", 4))
    return EmbeddingNode(node, form, data, rows, width)


def _element_type(value: ir.Value) -> ir.DataType:
    """The element type of a table. If the graph does not state it, that of the input of the node that makes it."""
    dtype = value.dtype if value.dtype is not None else getattr(value.const_value, "dtype", None)
    if dtype is not None:
        return dtype
    producer = value.producer()
    source = producer.inputs[0] if producer is not None else None  # nodes that make a table (Transpose) keep the type
    if source is None:
        raise UnsupportedModelError(
            f"the embedding table {value.name} has no element type; export the decoder with types inferred."
        )
    return _element_type(source)


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
        rows = slice(*index.indices(self.shape[0])) if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        return self._read(rows).astype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole table, for callers that cannot read blocks."""
        return self[:].astype(dtype or self.dtype)


def _stored_rows(embedding: EmbeddingNode) -> Read | None:
    """A function that reads rows of the initializer of a Gather; None for other lookups."""
    if embedding.node.op_type != "Gather":
        return None
    transpose = producer(embedding.data[0], "Transpose")
    value = embedding.data[0] if transpose is None else transpose.inputs[0]
    if value is None or value.producer() is not None or value.const_value is None:
        return None
    read = part_reader(value.const_value)
    return read if transpose is None else lambda rows: read((slice(None), rows)).T


def part_reader(tensor: ir.TensorProtocol) -> Read:
    """A function that reads the part of `tensor` at an index.

    It maps a data file for each read, which then releases the pages.
    """
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        return tensor.read
    if isinstance(tensor, ir.ExternalTensor):
        return lambda index: stored_array(tensor)[index]
    array = tensor.numpy()
    return lambda index: array[index]


def stored_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor's values. Memory-maps data files itself, because onnx_ir refuses hard-linked ones.

    onnx_ir reads types of less than a byte.
    """
    whole_bytes = tensor.dtype.itemsize >= 1
    if not isinstance(tensor, ir.ExternalTensor) or not whole_bytes:
        return tensor.numpy()
    shape = tuple(int(size) for size in tensor.shape)
    return np.memmap(tensor.path, dtype=tensor.dtype.numpy(), mode="r", offset=tensor.offset or 0, shape=shape)


def _looked_up_rows(embedding: EmbeddingNode) -> Read:
    """A function that looks rows up with the decoder's own nodes, in onnxruntime."""
    import onnxruntime

    model, feeds = _lookup_model(embedding)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    ids = np.arange(embedding.rows)
    return lambda rows: np.asarray(session.run(["rows"], {"ids": ids[rows], **feeds})[0])


def _lookup_model(embedding: EmbeddingNode) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """A model with the lookup alone, from `ids` int64 [n] to `rows` float32 [n, hidden], and its weights as feeds."""
    node, position = embedding.node, embedding.form.indices_position
    assert node.graph is not None
    graph = ir.convenience.extract(node.graph, [node.inputs[position]], [node.outputs[0]])  # type: ignore[list-item]
    ids, (rows,) = graph.inputs[0], graph.outputs
    ids.name, ids.type, ids.shape = "ids", ir.TensorType(ir.DataType.INT64), ir.Shape(["n"])
    rows.shape = None  # as in the decoder, of [batch, sequence] ids
    feeds: dict[str, np.ndarray] = {}
    for name in list(graph.initializers):  # a file of the model could not hold a large table
        value = graph.initializers.pop(name)
        feeds[name], value.const_value = stored_array(constant_of(value)), None
        graph.inputs.append(value)
    editor = GraphEditor(graph, "lookup")
    kind = ir.DataType.FLOAT
    graph.outputs[0] = editor.op("Cast", [rows], to=kind, dtype=kind, shape=["n", embedding.hidden], name="rows")
    return ir.Model(graph, ir_version=10), feeds
