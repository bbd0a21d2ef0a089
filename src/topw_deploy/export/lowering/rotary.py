"""Rewrite rotary embeddings as RotaryEmbedding operators.

    x * cos + rotated(x) * sin      cos = f(Cos(pairs(angles))), sin = f(Sin(pairs(angles)))

Most families pair elements half a head apart: rotated(x) = concat(-x[half:], x[:half]), pairs(angles) = concat(angles,
angles). Cohere, GLM, Ernie and Helium interleave: rotated(x) = (-x[1], x[0], -x[3], ...); pairs repeats each angle, or
each element in the first half of f(Cos(concat(angles, angles))).

The tracer finds only the first kind, and only without `f`, which is a half-precision cast or a factor (YaRN,
LongRoPE). As `f` is elementwise, the operator takes `f(Cos(angles))`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import onnx_ir as ir

from topw_deploy.export.graph.editor import (
    GraphEditor,
    attributes_of,
    constant_integer,
    fixed_size,
    is_constant,
    is_op,
    producer,
    rewrite_each,
)
from topw_deploy.export.lowering.layers import HALF


def fuse_rotary(model: ir.Model) -> int:
    """Rewrite rotations of [batch, heads, sequence, head_dim]. Returns their number."""
    return rewrite_each(model, "topw.rotary", "Add", partial(_fuse, {}))


def narrow_rotary(model: ir.Model) -> int:
    """Remove float32 casts around RotaryEmbedding. Returns the number of nodes changed.

    OLMo, Cohere and Ernie rotate in float32, which prevents rotation inside attention. Cosines and sines are cast
    instead.
    """
    return rewrite_each(model, "topw.narrow_rotary", "Cast", partial(_narrow, {}))


def fuse_partial_rotary(model: ir.Model) -> int:
    """Replace rotations of part of each head by one operator. Returns their number.

    For Phi, StableLM, GPT-NeoX, Nemotron and GLM.
    """
    return rewrite_each(model, "topw.partial_rotary", "Concat", _fuse_partial)


def rotary_producer(value: ir.Value | None) -> ir.Node | None:
    """The RotaryEmbedding that makes `value`, if it has no position ids."""
    node = producer(value, "RotaryEmbedding")
    return node if node is not None and len(node.inputs) == 3 and node.inputs[0] is not None else None


def rotary_kind(rotary: ir.Node) -> tuple[int, int]:
    """The node's `interleaved` and `rotary_embedding_dim` (0: the whole head)."""
    names = ("interleaved", "rotary_embedding_dim")
    interleaved, width = (rotary.attributes[n].as_int() if n in rotary.attributes else 0 for n in names)
    return interleaved, width


def _fuse(made: dict[ir.Value, ir.Value], editor: GraphEditor, add: ir.Node) -> bool:
    parts = _rotation(add)
    if parts is None:
        return False
    x, cosines, sines, interleaved = parts
    found = [_angles(cosines, "Cos", interleaved), _angles(sines, "Sin", interleaved)]
    if None in found:
        return False
    cos, sin = (_apply(editor, *one, made) for one in found if one is not None)
    new = editor.op(
        "RotaryEmbedding",
        [x, cos, sin],
        dtype=x.dtype,
        shape=list(x.shape),
        interleaved=int(interleaved),
        num_heads=fixed_size(x, 1),
    )
    editor.replace(add, new)
    return True


def _narrow(narrowed: dict[ir.Value, ir.Value], editor: GraphEditor, back: ir.Node) -> bool:
    rotary = rotary_producer(back.inputs[0])
    wide = producer(rotary.inputs[0] if rotary else None, "Cast")
    x = wide.inputs[0] if wide is not None else None
    if rotary is None or x is None or x.dtype not in HALF or x.dtype != back.outputs[0].dtype:
        return False
    tables = rotary.inputs[1:]
    for table in tables:
        if table not in narrowed:
            narrowed[table] = editor.op("Cast", [table], to=x.dtype, dtype=x.dtype, shape=table.shape)
    inputs = [x, *(narrowed[table] for table in tables)]
    new = editor.op("RotaryEmbedding", inputs, dtype=x.dtype, shape=x.shape, **attributes_of(rotary))
    editor.replace(back, new)
    return True


def _fuse_partial(editor: GraphEditor, concat: ir.Node) -> bool:
    if len(concat.inputs) != 2 or not _on_last_axis(concat):
        return False
    rotary, rest = rotary_producer(concat.inputs[0]), producer(concat.inputs[1], "Slice")
    first = producer(rotary.inputs[0] if rotary else None, "Slice")
    if rotary is None or first is None or rest is None or "num_heads" not in rotary.attributes:
        return False
    x = first.inputs[0]
    width = x.shape[3] if x is not None and x.shape is not None and len(x.shape) == 4 else None
    if x is None or x is not rest.inputs[0] or not isinstance(width, int):
        return False
    rotated, kept = _slice_of(first, width), _slice_of(rest, width)
    if rotated is None or rotated[0] != 0 or rotated[2] != 1 or kept != (rotated[1], width, 1):
        return False
    attributes = {**attributes_of(rotary), "rotary_embedding_dim": rotated[1]}
    new = editor.op("RotaryEmbedding", [x, *rotary.inputs[1:]], dtype=x.dtype, shape=x.shape, **attributes)
    editor.replace(concat, new)
    return True


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, bool] | None:
    """The x [batch, heads, sequence, head_dim], cos, sin and `interleaved` of x * cos + rotated(x) * sin, else None."""
    for straight, crossed in permutations(producer(value, "Mul") for value in add.inputs):
        if straight is None or crossed is None:
            continue
        for rotated, sin in permutations(crossed.inputs):
            for x, cos in permutations(straight.inputs):
                interleaved = _pairing(x, rotated)
                if x is not None and cos is not None and sin is not None and interleaved is not None:
                    return x, cos, sin, interleaved
    return None


def _pairing(x: ir.Value | None, rotated: ir.Value | None) -> bool | None:
    """Whether `rotated` is the interleaved rotated(x); None if it is not rotated(x). Both may be cast."""
    if x is None or rotated is None:
        return None
    if _half_rotated(rotated) is x:
        return False
    if _pair_rotated(rotated) is x:
        return True
    casts = [producer(value, "Cast") for value in (x, rotated)]
    if x.dtype is None or x.dtype != rotated.dtype or casts[0] is None or casts[1] is None:
        return None
    return _pairing(casts[0].inputs[0], casts[1].inputs[0])


def _half_rotated(value: ir.Value | None) -> ir.Value | None:
    """The x of concat(-x[half:], x[:half])."""
    both = producer(value, "Concat")
    if both is None or len(both.inputs) != 2 or not _on_last_axis(both):
        return None
    return _common_source(both.inputs[0], both.inputs[1], lambda width: [(0, width // 2, 1), (width // 2, width, 1)])


def _pair_rotated(value: ir.Value | None) -> ir.Value | None:
    """The x of (-x[1], x[0], -x[3], x[2], ...)."""
    whole = producer(value, "Reshape")
    pairs = producer(whole.inputs[0] if whole else None, "Concat")
    if value is None or pairs is None or len(pairs.inputs) != 2 or not _on_last_axis(pairs):
        return None
    odd, even = (producer(part, "Unsqueeze") for part in pairs.inputs)
    if odd is None or even is None:
        return None
    if not {constant_integer(odd.inputs[1]), constant_integer(even.inputs[1])} <= {-1, 4}:
        return None
    x = _common_source(odd.inputs[0], even.inputs[0], lambda width: [(0, width, 2), (1, width, 2)])
    return x if x is not None and value.shape == x.shape else None


def _common_source(
    negated: ir.Value | None, plain: ir.Value | None, ranges: Callable[[int], list[tuple[int, int, int]]]
) -> ir.Value | None:
    """x [batch, heads, sequence, even width] if `plain` and -`negated` are its slices."""
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
    return x if [_slice_of(node, width) for node in (first, second)] == ranges(width) else None


def _angles(factor: ir.Value, function: str, interleaved: bool) -> tuple[ir.Value, list[ir.Node]] | None:
    """The angles [batch, sequence, head_dim / 2] of a cos or sin `factor`, and the nodes from `function` on."""
    steps: list[ir.Node] = []
    value: ir.Value | None = factor
    unsqueezed = repeated = False
    while (node := value.producer() if value is not None else None) is not None:
        if is_op(node, function):
            steps.insert(0, node)
            repeats = interleaved and not repeated
            angles = _repeated(node.inputs[0]) if repeats else _joined_to_itself(node.inputs[0])
            return (angles, steps) if angles is not None and unsqueezed else None
        if is_op(node, "Unsqueeze") and constant_integer(node.inputs[1]) == 1 and not unsqueezed:
            unsqueezed, value = True, node.inputs[0]
        elif is_op(node, "Reshape") and interleaved and not repeated:
            repeated, value = True, _halved(_repeated(value))
        elif is_op(node, "Cast") or _is_scaling(node):
            steps.insert(0, node)
            value = node.inputs[_variable_input(node)]
        else:
            return None
    return None


def _joined_to_itself(value: ir.Value | None) -> ir.Value | None:
    """The a of concat(a, a)."""
    both = producer(value, "Concat")
    if both is None or not _on_last_axis(both) or len(both.inputs) != 2 or both.inputs[0] is not both.inputs[1]:
        return None
    return both.inputs[0]


def _halved(value: ir.Value | None) -> ir.Value | None:
    """The v of v[:half]."""
    part = producer(value, "Slice")
    whole = part.inputs[0] if part is not None else None
    width = whole.shape[-1] if whole is not None and whole.shape is not None else None
    if part is None or not isinstance(width, int) or _slice_of(part, width) != (0, width // 2, 1):
        return None
    return whole


def _repeated(value: ir.Value | None) -> ir.Value | None:
    """The a of (a[0], a[0], a[1], ...) on the last axis."""
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
    if constant_integer(unsqueeze.inputs[1]) not in (-1, rank) or repeats is None:
        return None
    twice = repeats.numpy().tolist() == [1] * rank + [2]
    return once if twice and list(value.shape) == [*once.shape[:-1], 2 * once.shape[-1]] else None


def _apply(editor: GraphEditor, value: ir.Value, steps: list[ir.Node], made: dict[ir.Value, ir.Value]) -> ir.Value:
    for step in steps:
        whole = step.outputs[0]
        if whole not in made:
            inputs = list(step.inputs)
            inputs[_variable_input(step)] = value
            made[whole] = editor.op(step.op_type, inputs, dtype=whole.dtype, **attributes_of(step))
        value = made[whole]
    return value


def _is_scaling(node: ir.Node) -> bool:
    if not is_op(node, "Mul"):
        return False
    factor = node.inputs[1 - _variable_input(node)]
    return is_constant(factor) and factor is not None and factor.shape in ((), (1,))


def _variable_input(node: ir.Node) -> int:
    return int(is_constant(node.inputs[0]))


def _slice_of(node: ir.Node, width: int) -> tuple[int, int, int] | None:
    start, stop, axis, step = (constant_integer(value) for value in (*node.inputs[1:], None, None, None)[:4])
    rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    if start is None or stop is None or axis not in (-1, rank - 1):
        return None
    return start, min(stop, width), 1 if step is None else step


def _on_last_axis(concat: ir.Node) -> bool:
    output = concat.outputs[0]
    rank = len(output.shape) if output.shape is not None else 0
    return concat.attributes["axis"].as_int() in (-1, rank - 1)
