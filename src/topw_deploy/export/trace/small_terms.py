"""Small numbers that a graph adds, kept from torch's clean-up, which drops a term of up to 1e-8 as if it were 0.

That is the epsilon of some norms (Helium's): without it a row of zeros, such as the embedding of padding, becomes NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

_DROPPED = 1e-7  # the clean-up's tolerance is 1e-8; a larger bound costs nothing


@contextlib.contextmanager
def small_terms_kept(graph: ir.Graph) -> Iterator[None]:
    """Within the block the small constant terms of sums are inputs of `graph`, of which nothing is known; afterwards
    they are initializers."""
    hidden: dict[tuple[str, bytes], tuple[ir.Value, ir.TensorProtocol]] = {}
    for node in graph:
        for place, term in enumerate(node.inputs):
            tensor = _small_term(node, term)
            if tensor is None:
                continue
            key = (tensor.dtype.name, tensor.tobytes())
            if key not in hidden:
                name = f"small_term_{len(hidden)}"
                value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape))
                graph.inputs.append(value)
                hidden[key] = value, tensor
            node.replace_input_with(place, hidden[key][0])
    yield
    for value, tensor in hidden.values():
        graph.inputs.remove(value)
        value.const_value = tensor
        graph.register_initializer(value)


def _small_term(node: ir.Node, value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant that `value` is, if `node` adds or subtracts it and it is one small number but 0."""
    producer = None if value is None else value.producer()
    if node.domain or node.op_type not in ("Add", "Sub") or producer is None or producer.op_type != "Constant":
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return tensor if 0 < abs(float(tensor.numpy().reshape(-1)[0])) <= _DROPPED else None
