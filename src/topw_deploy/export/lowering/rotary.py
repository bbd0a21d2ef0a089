"""Rotary embeddings as one operator, where the tracer leaves them spelled out:

    x * cos + turned(x) * sin       cos = f(Cos(both(angles))), sin alike

Most families pair a number with the one half a head away: turned(x) is concat(-x[half:], x[:half]), both(angles) is
concat(angles, angles). Others (Cohere, GLM, Ernie, Helium) pair neighbours: turned(x) is (-x[1], x[0], -x[3], ...)
and both repeats each angle, or each first half of f(Cos(concat(angles, angles))).

The tracer knows the first where `f` is nothing. In half precision `f` is a cast, and with attention scaling (YaRN,
LongRoPE) a factor. Either acts number by number and leaves both of a pair equal, so the operator gets `f(Cos(angles))`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, is_constant, rewrite_each


def fuse_rotary(model: ir.Model) -> int:
    """Replace every rotation of [batch, heads, sequence, head_dim] with a RotaryEmbedding; how many were."""
    return rewrite_each(model, "topw.rotary", "Add", partial(_fuse, {}))


def _fuse(halves: dict[ir.Value, ir.Value], editor: GraphEditor, add: ir.Node) -> bool:
    parts = _rotation(add)
    if parts is None:
        return False
    x, cosines, sines, interleaved = parts
    found = [_angles(cosines, "Cos", interleaved), _angles(sines, "Sin", interleaved)]
    if None in found:
        return False
    cos, sin = (_through(editor, *one, halves) for one in found if one is not None)
    assert x.shape is not None
    heads = x.shape[1]
    assert isinstance(heads, int)
    new = editor.op(
        "RotaryEmbedding",
        [x, cos, sin],
        dtype=x.dtype,
        shape=list(x.shape),
        interleaved=int(interleaved),
        num_heads=heads,
    )
    editor.replace(add, new)
    return True


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, bool] | None:
    """x [batch, heads, sequence, head_dim], the factors of x and of x turned, and whether neighbours are pairs, of the
    sum of a rotation."""
    for straight, crossed in permutations(producer(value, "Mul") for value in add.inputs):
        if straight is None or crossed is None:
            continue
        for turned, sin in permutations(crossed.inputs):
            for x, cos in permutations(straight.inputs):
                interleaved = _turns(x, turned)
                if x is not None and cos is not None and sin is not None and interleaved is not None:
                    return x, cos, sin, interleaved
    return None


def _turns(x: ir.Value | None, turned: ir.Value | None) -> bool | None:
    """Whether neighbours are the pairs, where `turned` is `x` turned; None where it is not. Both may be cast alike."""
    if x is None or turned is None:
        return None
    if _turned_by_half(turned) is x:
        return False
    if _turned_by_pairs(turned) is x:
        return True
    casts = [producer(value, "Cast") for value in (x, turned)]
    if x.dtype is None or x.dtype != turned.dtype or casts[0] is None or casts[1] is None:
        return None
    return _turns(casts[0].inputs[0], casts[1].inputs[0])


def _turned_by_half(value: ir.Value | None) -> ir.Value | None:
    """The x of concat(-x[half:], x[:half])."""
    both = producer(value, "Concat")
    if both is None or len(both.inputs) != 2 or not on_last_axis(both):
        return None
    return _cut(both.inputs[0], both.inputs[1], lambda width: [(0, width // 2, 1), (width // 2, width, 1)])


def _turned_by_pairs(value: ir.Value | None) -> ir.Value | None:
    """The x of (-x[1], x[0], -x[3], x[2], ...)."""
    whole = producer(value, "Reshape")
    pairs = producer(whole.inputs[0] if whole else None, "Concat")
    if value is None or pairs is None or len(pairs.inputs) != 2 or not on_last_axis(pairs):
        return None
    odd, even = (producer(part, "Unsqueeze") for part in pairs.inputs)
    if odd is None or even is None or not {number(odd.inputs[1]), number(even.inputs[1])} <= {-1, 4}:
        return None
    x = _cut(odd.inputs[0], even.inputs[0], lambda width: [(0, width, 2), (1, width, 2)])
    return x if x is not None and value.shape == x.shape else None


def _cut(
    negated: ir.Value | None, plain: ir.Value | None, ranges: Callable[[int], list[tuple[int, int, int]]]
) -> ir.Value | None:
    """The x [batch, heads, sequence, even] of which `plain` and, before its Neg, `negated` are the Slices that `ranges`
    gives for its width."""
    neg = producer(negated, "Neg")
    first, second = producer(plain, "Slice"), producer(neg.inputs[0] if neg else None, "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[1], int):
        return None
    width = x.shape[3]
    if not isinstance(width, int) or width % 2:
        return None
    return x if [slice_of(node, width) for node in (first, second)] == ranges(width) else None


def slice_of(node: ir.Node, width: int) -> tuple[int, int, int] | None:
    """Start, stop and step of what a Slice takes of the last axis, which is so wide."""
    start, stop, axis, step = (number(value) for value in (*node.inputs[1:], None, None, None)[:4])
    rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    if start is None or stop is None or axis not in (-1, rank - 1):
        return None
    return start, min(stop, width), 1 if step is None else step


def _angles(factor: ir.Value, function: str, interleaved: bool) -> tuple[ir.Value, list[ir.Node]] | None:
    """Of a factor [batch, 1, sequence, head_dim] of equal pairs: the angles of one each, [batch, sequence,
    head_dim / 2], and the nodes from `function` of them on."""
    steps: list[ir.Node] = []
    value: ir.Value | None = factor
    unsqueezed = repeated = False
    while (node := value.producer() if value is not None else None) is not None:
        if is_op(node, function):
            steps.insert(0, node)
            repeats = interleaved and not repeated
            angles = _repeated(node.inputs[0]) if repeats else _joined_to_itself(node.inputs[0])
            return (angles, steps) if angles is not None and unsqueezed else None
        if is_op(node, "Unsqueeze") and number(node.inputs[1]) == 1 and not unsqueezed:
            unsqueezed, value = True, node.inputs[0]
        elif is_op(node, "Reshape") and interleaved and not repeated:
            repeated, value = True, _halved(_repeated(value))
        elif is_op(node, "Cast") or _is_scaling(node):
            steps.insert(0, node)
            value = node.inputs[_changing(node)]
        else:
            return None
    return None


def _joined_to_itself(value: ir.Value | None) -> ir.Value | None:
    """The a of concat(a, a)."""
    both = producer(value, "Concat")
    if both is None or not on_last_axis(both) or len(both.inputs) != 2 or both.inputs[0] is not both.inputs[1]:
        return None
    return both.inputs[0]


def _halved(value: ir.Value | None) -> ir.Value | None:
    """The whole of which `value` is the first half."""
    part = producer(value, "Slice")
    whole = part.inputs[0] if part is not None else None
    width = whole.shape[-1] if whole is not None and whole.shape is not None else None
    if part is None or not isinstance(width, int) or slice_of(part, width) != (0, width // 2, 1):
        return None
    return whole


def _repeated(value: ir.Value | None) -> ir.Value | None:
    """The a of (a[0], a[0], a[1], a[1], ...) along the last axis."""
    reshape = producer(value, "Reshape")
    tile = producer(reshape.inputs[0] if reshape else None, "Tile")
    unsqueeze = producer(tile.inputs[0] if tile else None, "Unsqueeze")
    if value is None or tile is None or unsqueeze is None:
        return None
    once = unsqueeze.inputs[0]
    if once is None or once.shape is None or value.shape is None or not isinstance(once.shape[-1], int):
        return None
    rank = len(once.shape)
    repeats = None if tile.inputs[1] is None else ir.convenience.get_const_tensor(tile.inputs[1])
    if number(unsqueeze.inputs[1]) not in (-1, rank) or repeats is None:
        return None
    twice = repeats.numpy().tolist() == [1] * rank + [2]
    return once if twice and list(value.shape) == [*once.shape[:-1], 2 * once.shape[-1]] else None


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
    if not is_op(node, "Mul"):
        return False
    factor = node.inputs[1 - _changing(node)]
    return is_constant(factor) and factor is not None and factor.shape in ((), (1,))


def _changing(node: ir.Node) -> int:
    """Which input is not constant."""
    return int(is_constant(node.inputs[0]))


def on_last_axis(concat: ir.Node) -> bool:
    output = concat.outputs[0]
    rank = len(output.shape) if output.shape is not None else 0
    return concat.attributes["axis"].as_int() in (-1, rank - 1)


def is_op(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == ("", op_type)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it is such an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and is_op(node, op_type) else None


def number(value: ir.Value | None) -> int | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None
