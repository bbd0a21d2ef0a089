"""ONNX operators as Python calls, which `Ops` records as nodes.

onnxscript's `@script` is not used: it turns every `if` and `for` into an ONNX node and passes only single tensors. The
sampler's code passes dataclasses of tensors, and its `if` and `for` run while the function is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

Tensor: TypeAlias = ir.Value

Input: TypeAlias = Tensor | np.ndarray | np.generic | float | Sequence[int] | None
"""An operator's input. A number or array becomes a constant: float32 for a Python float, int64 for integers."""

BranchBody = Callable[[], Sequence[Tensor]]
"""Computes one side of a branch and returns its outputs. Both sides return equally many tensors of the same types."""

_OUTPUT_COUNTS = {"TopK": 2}  # of operators with several outputs
P = ParamSpec("P")
R = TypeVar("R")


class _Scope:
    """A graph or subgraph while it is recorded.

    nodes: in the order of their recording.
    results: a node's outputs, by operator, inputs and attributes.
    """

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.results: dict[Hashable, Sequence[ir.Value]] = {}


class Ops:
    """Operators as methods, `op.TopK(x, k, axis=1)`. Each call is recorded as a node of an ONNX function.

    A call that is equal to an earlier one of the same graph or an enclosing graph adds no node and returns the earlier
    outputs. So the sampler's code may compute a value wherever it needs it.

    branches: whether `branch` records an If.
    nodes: those of the function itself.
    domains: of all recorded operators; "" is ONNX's own.
    """

    def __init__(self, branches: bool) -> None:
        self._branches = branches
        self._scopes = [_Scope()]
        self._path: list[str] = []
        self._counter = 0
        self.domains: set[str] = {""}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def record(*inputs: Input, **attributes: Any) -> Any:
            outputs = self._record_once("", op_type, inputs, attributes, _OUTPUT_COUNTS.get(op_type, 1))
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return record

    @property
    def nodes(self) -> list[ir.Node]:
        return self._scopes[0].nodes

    def constant(self, value: Any) -> ir.Value:
        """Record a constant, see `Input`."""
        array = np.asarray(
            value, np.float32 if isinstance(value, float) and not isinstance(value, np.generic) else None
        )
        key = (str(array.dtype), array.shape, array.tobytes())
        return self._find_or_add(key, lambda: self._add_node("", "Constant", (), {"value": ir.tensor(array)}, 1))[0]

    def custom_op(self, domain: str, op_type: str, inputs: Sequence[Input], attributes: Mapping[str, Any]) -> ir.Value:
        """Apply an operator of any domain that has one output."""
        self.domains.add(domain)
        return self._record_once(domain, op_type, inputs, attributes, 1)[0]

    def branch(self, condition: Tensor, then: BranchBody, otherwise: BranchBody) -> list[Tensor]:
        """Compute one of two sides (`If`). condition: bool scalar.

        `otherwise` is the general side: its results are right also where the condition holds. Without branches, only
        this side is recorded.
        """
        if not self._branches:
            return list(otherwise())
        sides = {"then_branch": self._subgraph("then", then), "else_branch": self._subgraph("otherwise", otherwise)}
        return list(self._add_node("", "If", (condition,), sides, len(sides["then_branch"].outputs)).outputs)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """A context inside which names of nodes begin with `name`."""
        self._path.append(name)
        yield
        self._path.pop()

    def _subgraph(self, name: str, body: BranchBody) -> ir.Graph:
        scope = _Scope()
        self._scopes.append(scope)
        outputs: list[ir.Value] = []
        with self.name_scope(name):
            for value in body():
                # ONNX requires that nodes of the subgraph make its outputs, each output once.
                is_own = value.producer() in scope.nodes and value not in outputs
                outputs.append(value if is_own else self._add_node("", "Identity", (value,), {}, 1).outputs[0])
        self._scopes.pop()
        self._counter += 1
        return ir.Graph((), outputs, nodes=scope.nodes, name=f"{name}_{self._counter}")

    def _find_or_add(self, key: Hashable, add: Callable[[], ir.Node]) -> Sequence[ir.Value]:
        """Return the outputs of the node with this key in the current or an enclosing graph; without one, `add` it."""
        for scope in self._scopes:
            if key in scope.results:
                return scope.results[key]
        outputs = add().outputs
        self._scopes[-1].results[key] = outputs
        return outputs

    def _record_once(
        self, domain: str, op_type: str, inputs: Sequence[Input], attributes: Mapping[str, Any], outputs: int
    ) -> Sequence[ir.Value]:
        tensors = [x if x is None or isinstance(x, ir.Value) else self.constant(x) for x in inputs]
        key = (domain, op_type, tuple(map(id, tensors)), repr(sorted(attributes.items())))
        return self._find_or_add(key, lambda: self._add_node(domain, op_type, tensors, attributes, outputs))

    def _add_node(
        self, domain: str, op_type: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int
    ) -> ir.Node:
        self._counter += 1
        name = "/".join([*self._path, f"{op_type}_{self._counter}"])
        node = ir.Node(
            domain, op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs, name=name
        )
        # Short names, because onnxruntime hashes and compares names of values many times when it opens a file.
        for position, value in enumerate(node.outputs):
            value.name = f"{op_type}_{self._counter}" if outputs == 1 else f"{op_type}_{self._counter}:{position}"
        self._scopes[-1].nodes.append(node)
        return node


def scope(function: Callable[Concatenate[Ops, P], R]) -> Callable[Concatenate[Ops, P], R]:
    """Prefix the names of the nodes that `function` records with the function's name; profilers show these names."""

    @functools.wraps(function)
    def call_in_scope(op: Ops, *args: P.args, **kwargs: P.kwargs) -> R:
        with op.name_scope(function.__name__):
            return function(op, *args, **kwargs)

    return call_in_scope


def remove_unused(graph: ir.Graph) -> None:
    """Remove the nodes on which no output of the graph depends, also from its subgraphs."""
    results = {id(value) for value in graph.outputs}
    for node in list(reversed(graph)):
        if not any(id(value) in results or value.uses() for value in node.outputs):
            graph.remove(node, safe=True)
            continue
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                remove_unused(attribute.as_graph())
