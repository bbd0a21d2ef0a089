"""Trace one layer of each kind, and copy its nodes for the other layers of the kind.

Tracing takes time in proportion to the number of layers, and most layers of a model differ in their weights alone. The
first layer of a kind is traced between two placeholders, LayerInput and LayerOutput. Each other layer leaves one
placeholder Layer, which `copy_layers` replaces by copies of the nodes between those two, with the layer's own weights.

Layers are of one kind if all that their trace can depend on is equal: the classes and attributes of their modules, the
shapes of their weights, the values of their buffers, and all arguments of the call but the hidden states. Their own
numbers may differ, because nothing can be computed with a `LayerNumber`. Layers that do anything else, such as
returning more than hidden states, raise IrregularLayersError; the whole model then has to be traced.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from topw_deploy.export.source.text_decoder import decoder_layers, replaced
from topw_deploy.export.trace.placeholders import PLACEHOLDER_DOMAIN, LayerNumber, leave_placeholder

INPUT, OUTPUT, LAYER = "LayerInput", "LayerOutput", "Layer"
_NUMBERS = {"layer_idx", "layer_id"}  # attributes that hold a layer's number
_HIDDEN = "hidden_states"
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SUBGRAPHS = {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}
_MODULE_PARTS = {"_parameters", "_buffers", "_modules"}


class IrregularLayersError(Exception):
    """Layers that cannot be traced once for all of their kind."""


@dataclass
class _Kind:
    """The layers of one kind.

    number: of the layer that is traced.
    dtype, shape: of the output.
    others: what the layer returns after its output, None for each; None if it returns no tuple.
    """

    number: int
    dtype: torch.dtype = torch.float32
    shape: Any = ()
    others: tuple[None, ...] | None = None

    def outputs(self, output: Tensor) -> Any:
        return output if self.others is None else (output, *self.others)


class RepeatedLayers:
    """The layers of a model, and which of them have the same structure.

    Make it before the trace changes the attributes of the model's modules.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        name, self._layers = decoder_layers(model)
        self._names = [f"{name}.{number}" for number in range(len(self._layers))]
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self._structures = [_structure(layer, number, uses) for number, layer in enumerate(self._layers)]
        self._repeats = Counter(self._structures)
        self._kinds: dict[Any, _Kind] = {}
        self._called: set[int] = set()

    def __bool__(self) -> bool:
        """Whether any two layers have the same structure."""
        return len(self._repeats) < len(self._layers)

    def traced_once(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, one call of the model traces one layer of each kind."""
        self._kinds.clear()
        self._called.clear()
        return replaced(
            *(
                (layer, "forward", partial(self._call, number, layer.forward))
                for number, layer in enumerate(self._layers)
                if self._repeats[self._structures[number]] > 1
            )
        )

    def _call(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of layer `number` while it is traced."""
        if number in self._called:
            raise IrregularLayersError(f"layer {number} is called twice")
        self._called.add(number)
        hidden = args[0] if args else kwargs.pop(_HIDDEN, None)
        if not isinstance(hidden, Tensor):
            raise IrregularLayersError(f"layer {number} takes no hidden states")
        others = (bool(args), args[1:], kwargs)
        key = self._structures[number], hidden.dtype, _sizes(hidden), _key(others, _argument_key)
        kind = self._kinds.get(key)
        if kind is not None:
            attributes = {"layer": number, "traced": kind.number}
            return kind.outputs(leave_placeholder(LAYER, [hidden], attributes, kind.dtype, kind.shape))
        self._kinds[key] = kind = _Kind(number)
        hidden = leave_placeholder(INPUT, [hidden], {"layer": number}, hidden.dtype, hidden.shape)
        with self._opaque_number(number):
            found = forward(hidden, *args[1:], **kwargs) if args else forward(**{_HIDDEN: hidden}, **kwargs)
        if isinstance(found, tuple):
            found, *rest = found
            kind.others = tuple(rest)
        if not isinstance(found, Tensor) or any(each is not None for each in kind.others or ()):
            raise IrregularLayersError(f"layer {number} returns more than hidden states")
        kind.dtype, kind.shape = found.dtype, found.shape
        return kind.outputs(leave_placeholder(OUTPUT, [found], {"layer": number}, found.dtype, found.shape))

    def _opaque_number(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the number that the layer's modules hold is a LayerNumber."""
        return replaced(
            *(
                (part, name, LayerNumber(number))
                for part in self._layers[number].modules()
                for name in _NUMBERS
                if vars(part).get(name) == number
            )
        )

    def copy_layers(self, graph: ir.Graph, weight: Callable[[str], ir.Value]) -> None:
        """Replace all placeholders of layers in `graph`, which is sorted.

        weight: returns the initializer of the weight with this name.
        """
        nodes = [node for node in graph if node.domain == PLACEHOLDER_DOMAIN]
        starts, ends, layers = (
            {layer: node for node in nodes if node.op_type == op_type and (layer := _layer_of(node)) is not None}
            for op_type in (INPUT, OUTPUT, LAYER)
        )
        traced = {number: self._nodes_between(graph, starts[number], end) for number, end in ends.items()}
        for number, node in layers.items():
            original = traced[node.attributes["traced"].as_int()]
            weights = {
                value: weight(f"{self._names[number]}.{name}")
                for name, _ in self._layers[original.number].named_parameters()
                if (value := graph.initializers.get(f"{self._names[original.number]}.{name}")) is not None
            }
            _replace(graph, node, original.copy_before(node, number, weights))
        for node in (*starts.values(), *ends.values()):
            _replace(graph, node, node.inputs[0])

    def _nodes_between(self, graph: ir.Graph, start: ir.Node, end: ir.Node) -> _LayerNodes:
        number = start.attributes["layer"].as_int()
        names = (f"{self._names[number]}.{name}" for name, _ in self._layers[number].named_parameters())
        weights = {graph.initializers[name] for name in names if name in graph.initializers}
        return _LayerNodes(graph, number, start.outputs[0], end.inputs[0], weights)


class _LayerNodes:
    """The nodes of layer `number` that depend on its input or weights, and its placeholders, in order."""

    def __init__(
        self, graph: ir.Graph, number: int, start: ir.Value, end: ir.Value | None, weights: set[ir.Value]
    ) -> None:
        assert end is not None
        self.number, self._input, self._output = number, start, end
        needed = _nodes_before(end, start)
        self._nodes: list[ir.Node] = []
        own = {start, *weights}
        for node in graph:
            if node in needed and (not own.isdisjoint(node.inputs) or _layer_of(node) == number):
                self._nodes.append(node)
                own.update(node.outputs)
        if any(attribute.type in _SUBGRAPHS for node in self._nodes for attribute in node.attributes.values()):
            raise IrregularLayersError(f"layer {number} has branches")

    def copy_before(self, place: ir.Node, number: int, weights: dict[ir.Value, ir.Value]) -> ir.Value:
        """Insert copies for layer `number` before the node `place`, whose input they get. Returns their output.

        weights: weights of the traced layer -> those of the copy.
        """
        graph = place.graph
        assert graph is not None
        copies: dict[ir.Value | None, ir.Value | None] = {self._input: place.inputs[0], **weights}
        for node in self._nodes:
            copy = ir.Node(
                node.domain,
                node.op_type,
                [copies.get(value, value) for value in node.inputs],
                [self._attribute(node, attribute, number) for attribute in node.attributes.values()],
                overload=node.overload,
                num_outputs=len(node.outputs),
                name=f"{node.name}.layer_{number}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.name, new.type, new.shape = f"{old.name}.layer_{number}", old.type, old.shape
                copies[old] = new
            graph.insert_before(place, copy)
        output = copies.get(self._output, self._output)
        assert output is not None
        return output

    def _attribute(self, node: ir.Node, attribute: ir.Attr, number: int) -> ir.Attr:
        """The attribute of a copy: a placeholder's layer is the copy's."""
        if attribute.name != "layer" or _layer_of(node) is None:
            return attribute
        if _layer_of(node) != self.number:
            raise IrregularLayersError(f"layer {self.number} has a placeholder of layer {_layer_of(node)}")
        return ir.AttrInt64("layer", number)


def _layer_of(node: ir.Node) -> int | None:
    """The layer of a placeholder; None for other nodes, and for placeholders without one."""
    layer = node.attributes.get("layer") if node.domain == PLACEHOLDER_DOMAIN else None
    return None if layer is None else layer.as_int()


def _nodes_before(value: ir.Value, start: ir.Value) -> set[ir.Node]:
    """The nodes from which `value` is computed, but not those before `start`."""
    found: set[ir.Node] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        node = value.producer()
        if value is not start and node is not None and node not in found:
            found.add(node)
            pending += [source for source in node.inputs if source is not None]
    return found


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value | None) -> None:
    """Replace the output of `node` by `value`, and remove the node."""
    assert value is not None
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    """The shape of `tensor`, with the sample size for a symbolic one: two symbols may stand for one size."""
    return tuple(size if isinstance(size, int) else ("symbol", size.node.hint) for size in tensor.shape)


@dataclass(frozen=True, eq=False)
class _Object:
    """An object in a key: equal to itself alone. The key keeps it, so that no other object gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _key(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A key that equal plain values, and containers of them, share. `leaf` gives the key of another object."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Mapping):
        return tuple((name, _key(each, leaf)) for name, each in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), tuple(_key(each, leaf) for each in value)
    return leaf(value)


def _argument_key(value: Any) -> Any:
    """A key that only the same object has."""
    if isinstance(value, Tensor | Cache | SimpleNamespace | FunctionType):
        return _Object(value)
    raise IrregularLayersError(f"layers get an argument of {type(value).__name__}")


def _structure(layer: nn.Module, number: int, uses: Counter[int]) -> Any:
    """A key that is equal for layers whose traces differ only in weights, arguments and the layer's number.

    uses: of each parameter in the whole model, by id. A layer that shares a parameter equals no other layer.
    """
    parameters = list(layer.named_parameters(remove_duplicate=False))
    if any(uses[id(parameter)] > 1 for _, parameter in parameters):
        return object()
    parts = {id(part): name for name, part in layer.named_modules()}

    def leaf(value: Any) -> Any:
        """The key of a module by its place in the layer, of a function by its arguments, else of the object alone."""
        if isinstance(value, partial):
            return _key((value.func, value.args, value.keywords), leaf)
        if isinstance(value, MethodType):
            return value.__func__, leaf(value.__self__)
        return parts.get(id(value), id(value))

    def attributes(part: nn.Module) -> Any:
        held = {name: value for name, value in vars(part).items() if name not in _MODULE_PARTS}
        numbers = {name for name in _NUMBERS if type(held.get(name)) is int and held[name] == number}
        return type(part), tuple((name, None if name in numbers else _key(value, leaf)) for name, value in held.items())

    shapes = tuple((name, tuple(parameter.shape), parameter.dtype) for name, parameter in parameters)
    buffers = tuple((name, _buffer_key(buffer)) for name, buffer in layer.named_buffers())
    return tuple(map(attributes, layer.modules())), tuple(parts.values()), shapes, buffers


def _buffer_key(buffer: Tensor) -> Any:
    """A key that buffers of equal values share."""
    if buffer.device.type != "cpu" or type(buffer) is not Tensor:
        return id(buffer)
    values = buffer.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    return buffer.dtype, tuple(buffer.shape), values
