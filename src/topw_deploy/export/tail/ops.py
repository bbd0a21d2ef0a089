"""Operator sets: `Recorder` records an ONNX function; `Eager` evaluates it in unit tests.

onnxscript's `@script` turns every `if` and `for` into an ONNX node and passes only single tensors. The sampler's code
passes dataclasses of tensors, and evaluates its own `if` and `for` while recording.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import onnx_ir as ir

Tensor = Any
"""An `onnx_ir.Value` while recording, an array-like while evaluating."""

Side = Callable[[], Sequence[Tensor]]
"""One side of a branch: a function that records or evaluates it and returns its tensors."""

Body = Callable[..., Sequence[Tensor]]
"""The body of a loop: states -> whether to continue, bool scalar, and the next states."""

_OUTPUTS = {"TopK": 2}
P = ParamSpec("P")
R = TypeVar("R")


class Ops(Protocol):
    """Operators as methods: `op.TopK(x, k, axis=1)`."""

    def __getattr__(self, op_type: str) -> Callable[..., Any]: ...

    def constant(self, value: Any, dtype: type = np.float32) -> Tensor:
        """A constant tensor; equal constants are recorded once."""

    def branch(self, condition: Tensor, then: Side, otherwise: Side) -> list[Tensor]:
        """`If` on a bool scalar."""

    def loop(self, trips: int, states: Sequence[Tensor], body: Body) -> list[Tensor]:
        """The states after at most `trips` >= 1."""

    def custom(self, domain: str, op_type: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Tensor:
        """An operator with one output, of any domain."""

    def named(self, name: str) -> Any:
        """Context that prefixes node names."""


def scope(function: Callable[Concatenate[Ops, P], R]) -> Callable[Concatenate[Ops, P], R]:
    """Prefix the names of nodes that `function` records, as seen in exported files, with the function's name."""

    @functools.wraps(function)
    def recorded(op: Ops, *args: P.args, **kwargs: P.kwargs) -> R:
        with op.named(function.__name__):
            return function(op, *args, **kwargs)

    return recorded


class _Scope:
    """A graph being recorded: its nodes, and their results by operation and inputs."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.known: dict[Hashable, Sequence[ir.Value]] = {}


class Recorder:
    """Records nodes.

    An operation on the same tensors is recorded once in a graph and its subgraphs, so the sampler's code may repeat
    itself.
    """

    def __init__(self) -> None:
        self._scopes = [_Scope()]
        self._path: list[str] = []
        self._counter = 0
        self.domains: set[str] = {""}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def record(*inputs: Tensor | None, **attributes: Any) -> Any:
            outputs = self._once("", op_type, inputs, attributes, _OUTPUTS.get(op_type, 1))
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return record

    @property
    def nodes(self) -> list[ir.Node]:
        return self._scopes[0].nodes

    def constant(self, value: Any, dtype: type = np.float32) -> ir.Value:
        array: np.ndarray = np.asarray(value, dtype=dtype)
        key = (str(array.dtype), array.shape, array.tobytes())
        return self._known(key, lambda: self._add("", "Constant", (), {"value": ir.tensor(array)}, 1))[0]

    def custom(self, domain: str, op_type: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> ir.Value:
        self.domains.add(domain)
        return self._once(domain, op_type, inputs, attributes, 1)[0]

    def branch(self, condition: Tensor, then: Side, otherwise: Side) -> list[Tensor]:
        sides = {"then_branch": self._subgraph("then", then), "else_branch": self._subgraph("otherwise", otherwise)}
        return list(self._add("", "If", (condition,), sides, len(sides["then_branch"].outputs)).outputs)

    def loop(self, trips: int, states: Sequence[Tensor], body: Body) -> list[Tensor]:
        self._counter += 1
        names = ("trip", "going", *(f"carried_{place}" for place in range(len(states))))
        trip, going, *carried = (ir.Value(name=f"{name}_{self._counter}") for name in names)
        for value, dtype in ((trip, ir.DataType.INT64), (going, ir.DataType.BOOL)):
            value.dtype, value.shape = dtype, ir.Shape([])
        graph = self._subgraph("loop", lambda: body(*carried), [trip, going, *carried])
        inputs = (self.constant(trips, np.int64), self.constant(True, np.bool_), *states)
        return list(self._add("", "Loop", inputs, {"body": graph}, len(states)).outputs)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self._path.append(name)
        yield
        self._path.pop()

    def _subgraph(self, name: str, body: Side, inputs: Sequence[ir.Value] = ()) -> ir.Graph:
        scope = _Scope()
        self._scopes.append(scope)
        outputs: list[ir.Value] = []
        with self.named(name):
            for value in body():
                # A branch must produce each of its outputs itself, so tensors from outside get an Identity.
                own = value.producer() in scope.nodes and value not in outputs
                outputs.append(value if own else self._add("", "Identity", (value,), {}, 1).outputs[0])
        self._scopes.pop()
        self._counter += 1
        return ir.Graph(inputs, outputs, nodes=scope.nodes, name=f"{name}_{self._counter}")

    def _known(self, key: Hashable, add: Callable[[], ir.Node]) -> Sequence[ir.Value]:
        """The outputs of the node with this key in the current graph or one around it, or else of a new one."""
        for scope in self._scopes:
            if key in scope.known:
                return scope.known[key]
        outputs = add().outputs
        self._scopes[-1].known[key] = outputs
        return outputs

    def _once(
        self, domain: str, op_type: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int
    ) -> Sequence[ir.Value]:
        key = (domain, op_type, tuple(map(id, inputs)), repr(sorted(attributes.items())))
        return self._known(key, lambda: self._add(domain, op_type, inputs, attributes, outputs))

    def _add(
        self, domain: str, op_type: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int
    ) -> ir.Node:
        self._counter += 1
        name = "/".join([*self._path, f"{op_type}_{self._counter}"])
        node = ir.Node(
            domain, op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs, name=name
        )
        # Values have short names: onnxruntime hashes and compares them many times when it opens a file.
        for position, value in enumerate(node.outputs):
            value.name = f"{op_type}_{self._counter}" if outputs == 1 else f"{op_type}_{self._counter}:{position}"
        self._scopes[-1].nodes.append(node)
        return node


def remove_unused(graph: ir.Graph) -> None:
    """Remove nodes that no output depends on, also in subgraphs."""
    results = {id(value) for value in graph.outputs}
    for node in list(reversed(graph)):
        if not any(id(value) in results or value.uses() for value in node.outputs):
            graph.remove(node, safe=True)
            continue
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                remove_unused(attribute.as_graph())


class Eager:
    def __init__(self, opset: int) -> None:
        import onnxscript

        self._opset = getattr(onnxscript, f"opset{opset}")

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return getattr(self._opset, op_type)

    def constant(self, value: Any, dtype: type = np.float32) -> np.ndarray:
        return np.asarray(value, dtype=dtype)

    def custom(self, domain: str, op_type: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Tensor:
        from onnxscript import values

        opset = self._opset if not domain else values.Opset(domain, 1)
        return values.Op(opset, op_type)(*inputs, **attributes)

    def branch(self, condition: Tensor, then: Side, otherwise: Side) -> list[Tensor]:
        return list(then() if bool(np.asarray(condition)) else otherwise())

    def loop(self, trips: int, states: Sequence[Tensor], body: Body) -> list[Tensor]:
        for _ in range(trips):
            going, *states = body(*states)
            if not bool(np.asarray(going)):
                break
        return list(states)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        yield
