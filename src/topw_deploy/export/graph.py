"""Edit ONNX graphs, and initializers whose values are loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.manifest import DecoderInfo, SourceTensors

CONTRIB_DOMAIN = "com.microsoft"
"""The domain of onnxruntime's own operators."""

BLOCK_BYTES = 64 << 20
"""The largest number of bytes of a weight to hold while it is written or compared, unless one row is larger."""

Input: TypeAlias = ir.Value | np.ndarray | np.generic | int | Sequence[int] | None
"""An input of a node that `GraphEditor` adds. Python's integers become int64."""

Found = TypeVar("Found")

Read = Callable[[Any], np.ndarray]
"""Returns the values of a weight at a NumPy index, which consists of slices or ids."""


class LazyWeight(ir.LazyTensor):
    """A tensor that loads its values whenever they are read, and does not cache them.

    key: equal for tensors of the same weight, such as a tied table.
    whole: loads the whole tensor.
    read: loads the part at an index; None if parts cannot be loaded.
    """

    __slots__ = ("key", "read")

    def __init__(
        self,
        key: Hashable,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        whole: Callable[[], ir.TensorProtocol],
        read: Read | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(whole, dtype, ir.Shape(shape), name=name)
        self.key, self.read = key, read


def transpose_tensor(tensor: ir.TensorProtocol, permutation: tuple[int, ...]) -> LazyWeight:
    """A tensor with the axes of `tensor` permuted, which permutes the values when they are read."""
    shape = tuple(int(tensor.shape[axis]) for axis in permutation)
    read = None
    if permutation == (1, 0):
        read = lambda source, index: source(index[::-1] if isinstance(index, tuple) else (slice(None), index)).T  # noqa: E731
    return derive_weight(tensor, shape, lambda whole: whole.transpose(permutation), read, permutation)


def derive_weight(
    tensor: ir.TensorProtocol,
    shape: tuple[int, ...],
    change: Callable[[np.ndarray], np.ndarray],
    read: Callable[[Read, Any], np.ndarray] | None,
    label: Hashable,
) -> LazyWeight:
    """The tensor of this shape that `change` makes of the whole `tensor`, whenever it is read.

    read: reads the part at an index by the function that reads parts of `tensor`, if there is one.
    label: differs between the tensors that are derived from one.
    """
    source = tensor.read if isinstance(tensor, LazyWeight) else None
    key = tensor.key if isinstance(tensor, LazyWeight) else id(tensor)

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(change(tensor.numpy())), dtype=tensor.dtype)

    part = None if source is None or read is None else partial(read, source)
    return LazyWeight((key, label), tensor.dtype, shape, whole, part, f"{tensor.name}.{label}")


def byte_blocks(tensor: ir.TensorProtocol, largest: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield the tensor's bytes in order.

    A weight that can be read in parts comes in blocks of whole rows, of at most `largest` bytes or one row. Others come
    whole.
    """
    read = tensor.read if isinstance(tensor, LazyWeight) else None
    if read is None or len(tensor.shape) == 0 or tensor.nbytes <= largest or tensor.dtype.itemsize < 1:
        yield memoryview(tensor.tobytes())
        return
    rows = int(tensor.shape[0])
    step = max(1, largest // max(1, tensor.nbytes // rows))
    for start in range(0, rows, step):
        block = np.ascontiguousarray(read(slice(start, start + step)))
        yield block.reshape(-1).view(np.uint8).data


class GraphEditor:
    """Adds nodes, inputs and initializers to `graph`.

    New nodes are appended at the end: call `finish` once all are added, to sort them topologically. Names that the
    editor chooses are unique and start with `prefix`.
    """

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.graph = graph
        self._prefix = prefix
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._taken = set(graph.initializers) | {value.name for value in graph.inputs}
        self._taken |= {output.name for node in graph for output in node.outputs}

    def op(
        self,
        op_type: str,
        inputs: Sequence[Input],
        *,
        domain: str = "",
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | None = None,
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output. Returns the output. An input that is a number or an array becomes a constant.

        dtype, shape, name: of the output.
        """
        (output,) = self.outputs(op_type, inputs, 1, domain=domain, **attributes)
        if name is not None:
            output.name = name
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        if shape is not None:
            output.shape = ir.Shape(list(shape))
        return output

    def outputs(
        self, op_type: str, inputs: Sequence[Input], count: int, *, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Append a node with `count` outputs, see `op`. Returns the outputs."""
        values = [x if x is None or isinstance(x, ir.Value) else self.constant(x) for x in inputs]
        node = ir.node(
            op_type, values, attributes=attributes, domain=domain, name=self.unique(op_type), num_outputs=count
        )
        for output in node.outputs:
            output.name = self.unique(f"{op_type}_out")
        self.graph.append(node)
        return node.outputs

    def constant(self, array: Any, name: str | None = None) -> ir.Value:
        """Add an initializer with these values. Equal arrays of fewer than 64 values without a name share one."""
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size < 64 and name is None else None
        found = self._constants.get(key) if key is not None else None
        if found is not None:
            if found.name not in self.graph.initializers:  # a pass removed it, because no node used it any more
                self.graph.register_initializer(found)
            return found
        value = self.initializer(ir.tensor(array), name or self.unique("constant"))
        if key is not None:
            self._constants[key] = value
        return value

    def initializer(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Add an initializer with this tensor, which gets the name too."""
        tensor.name = name
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        self.graph.register_initializer(value)
        self._taken.add(name)
        return value

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Append a graph input."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        self.graph.inputs.append(value)
        self._taken.add(name)
        return value

    def unique(self, stem: str) -> str:
        """Choose and reserve a name that no value or node of the graph has."""
        number = 0
        while (name := f"{self._prefix}.{stem}_{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def replace(self, node: ir.Node, *values: ir.Value) -> None:
        """Replace `node` by `values`, one for each output, which get the outputs' names and uses."""
        for old, value in zip(node.outputs, values, strict=True):
            value.name, old.name = old.name, None
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def finish(self) -> None:
        """Sort the graph topologically."""
        self.graph.sort()


def rewrite_each(model: ir.Model, prefix: str, op_type: str, rewrite: Callable[[GraphEditor, ir.Node], bool]) -> int:
    """Call `rewrite` on each node of ONNX's own operator `op_type`, and remove nodes that are then unused.

    prefix: of the names that `rewrite` adds.
    rewrite: returns whether it rewrote the node.

    Returns the number of rewritten nodes.
    """
    editor = GraphEditor(model.graph, prefix)
    nodes = [node for node in model.graph if (node.domain, node.op_type) == ("", op_type)]
    done = sum(rewrite(editor, node) for node in nodes)
    if done:
        editor.finish()
        RemoveUnusedNodesPass()(model)
    return done


def find_input(graph: ir.Graph, name: str) -> ir.Value | None:
    """The graph input with this name, or None."""
    return next((value for value in graph.inputs if value.name == name), None)


def required_input(graph: ir.Graph, name: str) -> ir.Value:
    """The graph input with this name. Raises UnsupportedModelError if there is none."""
    value = find_input(graph, name)
    if value is None:
        raise UnsupportedModelError(f"the decoder has no input {name}; export it as text-generation-with-past.")
    return value


def _required(found: Found | None, what: str) -> Found:
    """`found`, which a valid graph has. Raises UnsupportedModelError for None."""
    if found is None:
        raise UnsupportedModelError(f"the decoder lacks {what}; export it again, with types inferred.")
    return found


def required_node_input(value: ir.Value | None) -> ir.Value:
    """The same value, an input that its node's operator requires. Raises UnsupportedModelError for None."""
    return _required(value, "an input that an operator requires")


def element_type(value: ir.Value) -> ir.DataType:
    """The element type of `value`. Raises UnsupportedModelError if the graph does not state it."""
    return _required(value.dtype, f"the element type of {value.name}")


def constant_of(initializer: ir.Value) -> ir.TensorProtocol:
    """The tensor of an initializer. Raises UnsupportedModelError for another value."""
    return _required(initializer.const_value, f"the data of the initializer {initializer.name}")


def is_constant(value: ir.Value | None) -> bool:
    """Whether `value` depends only on initializers, not on graph inputs."""
    if value is None or value.is_graph_input():
        return False
    node = value.producer()
    if node is None:
        return value.const_value is not None
    return all(source is None or is_constant(source) for source in node.inputs)


def external_files(model: ir.Model) -> dict[str, Path]:
    """The data files that the initializers refer to: location as written in the file -> path."""
    files: dict[str, Path] = {}
    for tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            files[str(tensor.location)] = Path(tensor.path)
    return files


def initializer_tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """The tensors of all initializers, also those of subgraphs."""
    return [constant_of(value) for value in initializers(model)]


def initializers(model: ir.Model) -> list[ir.Value]:
    """All initializers, also those of subgraphs."""
    return [value for graph in model.graphs() for value in graph.initializers.values() if value.const_value is not None]


ROUTER_PROPERTY = "topw.router"
"""The metadata property that marks the products which choose experts."""


def fixed_size(value: ir.Value, axis: int) -> int:
    """The size of one axis of `value`. Raises UnsupportedModelError if it is not a fixed number."""
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise UnsupportedModelError(
            f"the value {value.name} has the shape {value.shape}, but axis {axis} must be a number; "
            "export the decoder again with fixed sizes."
        )
    return size


def is_op(node: ir.Node, op_type: str) -> bool:
    """Whether `node` has this operator of ONNX's own domain."""
    return (node.domain, node.op_type) == ("", op_type)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node whose output `value` is, if it has this operator of ONNX's own domain; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_op(node, op_type) else None


def chain(value: ir.Value | None, *op_types: str) -> list[ir.Node] | None:
    """The nodes of ONNX's own domain with these operators, each made by the first input of the one before.

    The first makes `value`. None if there is no such chain.
    """
    nodes: list[ir.Node] = []
    for op_type in op_types:
        node = producer(value, op_type)
        if node is None:
            return None
        nodes.append(node)
        value = node.inputs[0]
    return nodes


def constant_integer(value: ir.Value | None) -> int | None:
    """The number in a constant of one element; None for all other values."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def attribute_values(node: ir.Node) -> dict[str, Any]:
    """The node's attributes by name, as Python values that `GraphEditor.op` accepts."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


@dataclass
class Decoder:
    """The decoder that each stage of an export passes to the next, which edits it in place.

    model: inputs input_ids, past_key_values.{i}.key|value and either attention_mask and (position_ids) or, with a
        static cache, write_indices and row_lengths; outputs logits [batch, sequence, vocab] and
        present.{i}.key|value. Quantising replaces weights and their products; attaching the sampler adds its inputs,
        node and outputs.
    info: its description in the manifest.
    foreign: whether another exporter made it; its nodes then stay as they are.
    notices: sentences for the user about what the decoder lacks or changes.
    source_tensors: what became of the checkpoint's tensors; None for another exporter's decoder.
    module: the traced torch model, with its weights in their files; None for another exporter's decoder.
    """

    model: ir.Model
    info: DecoderInfo
    foreign: bool
    notices: list[str] = field(default_factory=list)
    source_tensors: SourceTensors | None = None
    module: Any = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Raises UnsupportedModelError if it is symbolic."""
        logits = next(value for value in self.model.graph.outputs if value.name == "logits")
        width = logits.shape[-1] if logits.shape is not None else None
        if not isinstance(width, int):
            raise UnsupportedModelError(
                f"the decoder's logits have the shape {logits.shape}, but their last dimension must be a number; "
                "export the decoder with a fixed vocabulary."
            )
        return width

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return int(self.model.opset_imports[""])


def tidy(model: ir.Model, table: ir.Value | None) -> None:
    """Simplify a traced graph in place.

    Shares the table with a tied output layer, stores weights transposed, and removes duplicate and unused nodes.

    table: the embedding initializer, which a tied output layer may share; None if there is none.
    """
    graph = model.graph
    if table is not None:
        _share_tied_head(graph, table)
    _store_transposed(graph)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    graph.sort()


def _share_tied_head(graph: ir.Graph, table: ir.Value) -> None:
    """Replace hidden @ table^T by a Gemm, which needs no transposed copy of the table."""
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain or rank(node.inputs[0]) != 2:
            continue
        transpose = producer(node.inputs[1], "Transpose")
        if transpose is None or transpose.inputs[0] is not table:
            continue
        editor = GraphEditor(graph, "topw.head")
        product = editor.op("Gemm", [node.inputs[0], table], transB=1, dtype=node.outputs[0].dtype)
        product.shape = node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], product, replace_graph_outputs=True)
        if node.outputs[0].name is not None and node.outputs[0].name == "logits":
            node.outputs[0].name, product.name = None, "logits"
        graph.remove(node, safe=True)


def rank(value: ir.Value | None) -> int | None:
    """The number of axes of `value`; None if it is not known."""
    return None if value is None or value.shape is None else len(value.shape)


def _store_transposed(graph: ir.Graph) -> None:
    """Replace each Transpose of an initializer that no other node uses by an initializer with the permuted axes."""
    editor = GraphEditor(graph, "topw.transposed")
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" and node.domain == "" else None
        if source is None or source.const_value is None or len(source.uses()) != 1 or source.is_graph_input():
            continue
        permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(rank(source) or 0)[::-1]
        tensor = transpose_tensor(source.const_value, tuple(permutation))
        weight = editor.initializer(tensor, f"{source.name}.transposed")
        ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        graph.remove(node, safe=True)
        if source.name is not None:
            graph.initializers.pop(source.name)


FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The element types of weights."""


def stored_tensor(value: ir.Value | None, rank: int) -> ir.TensorProtocol | None:
    """The tensor of `value` if it is a float initializer of `rank` dimensions, else None."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    return tensor if tensor is not None and len(tensor.shape) == rank and tensor.dtype in FLOATS else None


def number_attribute(node: ir.Node, name: str, default: float = 0.0) -> float:
    """A numeric attribute of a node, or `default` if the node does not state it."""
    return float(node.attributes[name].value) if name in node.attributes else default
