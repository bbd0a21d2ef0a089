"""Rotary embeddings as one operator, where the tracer leaves them spelled out:

    x * cos + concat(-x[half:], x[:half]) * sin       cos = f(Cos(concat(angles, angles))), sin alike

It knows them where `f` is nothing. In half precision `f` is a cast, and with attention scaling (YaRN, LongRoPE) a
factor. Either acts number by number and leaves both halves equal, so the operator gets `f(Cos(angles))`.
"""

from __future__ import annotations

from itertools import permutations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.editor import GraphEditor, is_constant


def fuse_rotary(model: ir.Model) -> int:
    """Replace every rotation of [batch, heads, sequence, head_dim] with a RotaryEmbedding; how many were."""
    editor = GraphEditor(model.graph, "topw.rotary")
    halves: dict[ir.Value, ir.Value] = {}
    fused = sum(_fuse(editor, node, halves) for node in list(model.graph) if _is(node, "Add"))
    if fused:
        editor.finish()
        RemoveUnusedNodesPass()(model)
    return fused


def _fuse(editor: GraphEditor, add: ir.Node, halves: dict[ir.Value, ir.Value]) -> bool:
    parts = _rotation(add)
    if parts is None:
        return False
    x, *factors = parts
    angles = [_angles(factor, name) for factor, name in zip(factors, ("Cos", "Sin"), strict=True)]
    if None in angles:
        return False
    cos, sin = (_through(editor, *found, halves) for found in angles if found is not None)
    assert x.shape is not None
    heads, old = x.shape[1], add.outputs[0]
    assert isinstance(heads, int)
    new = editor.op("RotaryEmbedding", [x, cos, sin], dtype=x.dtype, shape=list(x.shape), num_heads=heads)
    new.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    editor.graph.remove(add, safe=True)
    return True


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """x [batch, heads, sequence, head_dim], and the factors of x and of x turned by half, of the sum of a rotation."""
    for straight, crossed in permutations(_producer(value, "Mul") for value in add.inputs):
        if straight is None or crossed is None:
            continue
        for turned, sin in permutations(crossed.inputs):
            x = _turned_by_half(turned)
            cos = [value for value in straight.inputs if value is not x]
            if x is not None and sin is not None and len(cos) == 1 and cos[0] is not None:
                return x, cos[0], sin
    return None


def _turned_by_half(value: ir.Value | None) -> ir.Value | None:
    """The x of concat(-x[half:], x[:half])."""
    both = _producer(value, "Concat")
    if both is None or len(both.inputs) != 2 or not _on_last_axis(both):
        return None
    negated = _producer(both.inputs[0], "Neg")
    second, first = _producer(negated.inputs[0] if negated else None, "Slice"), _producer(both.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[1], int):
        return None
    width = x.shape[3]
    if not isinstance(width, int) or width % 2:
        return None
    ranges = [_range(node, width) for node in (first, second)]
    return x if ranges == [(0, width // 2), (width // 2, width)] else None


def _range(node: ir.Node, width: int) -> tuple[int, int] | None:
    """What a Slice takes of the last of four axes, which is so wide."""
    start, stop, axis, step = (_number(value) for value in (*node.inputs[1:], None, None, None)[:4])
    if start is None or stop is None or axis not in (-1, 3) or step not in (None, 1):
        return None
    return start, min(stop, width)


def _angles(factor: ir.Value, function: str) -> tuple[ir.Value, list[ir.Node]] | None:
    """Of a factor [batch, 1, sequence, head_dim] of equal halves: the angles of one, [batch, sequence, head_dim / 2],
    and the nodes from `function` of them on."""
    unsqueezed = _producer(factor, "Unsqueeze")
    if unsqueezed is None or _number(unsqueezed.inputs[1]) != 1:
        return None
    steps: list[ir.Node] = []
    value = unsqueezed.inputs[0]
    while (node := value.producer() if value is not None else None) is not None:
        if _is(node, function):
            both = _producer(node.inputs[0], "Concat")
            if both is None or not _on_last_axis(both) or len(both.inputs) != 2:
                return None
            first, second = both.inputs
            return (first, [node, *steps]) if first is not None and first is second else None
        if not _is(node, "Cast") and not _is_scaling(node):
            return None
        steps.insert(0, node)
        value = node.inputs[_changing(node)]
    return None


def _through(editor: GraphEditor, value: ir.Value, steps: list[ir.Node], halves: dict[ir.Value, ir.Value]) -> ir.Value:
    """`value` through copies of the steps. halves: what came of each step so far, by what it gives of both halves."""
    for step in steps:
        whole = step.outputs[0]
        if whole not in halves:
            inputs = list(step.inputs)
            inputs[_changing(step)] = value
            attributes = {name: attribute.value for name, attribute in step.attributes.items()}
            halves[whole] = editor.op(step.op_type, inputs, dtype=whole.dtype, **attributes)
        value = halves[whole]
    return value


def _is_scaling(node: ir.Node) -> bool:
    """A product with one constant number."""
    if not _is(node, "Mul"):
        return False
    factor = node.inputs[1 - _changing(node)]
    return is_constant(factor) and factor is not None and factor.shape in ((), (1,))


def _changing(node: ir.Node) -> int:
    """Which input is not constant."""
    return int(is_constant(node.inputs[0]))


def _on_last_axis(concat: ir.Node) -> bool:
    output = concat.outputs[0]
    rank = len(output.shape) if output.shape is not None else 0
    return concat.attributes["axis"].as_int() in (-1, rank - 1)


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == ("", op_type)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it is such an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and _is(node, op_type) else None


def _number(value: ir.Value | None) -> int | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None
