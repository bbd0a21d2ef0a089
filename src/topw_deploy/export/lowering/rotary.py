"""Rewrite rotary embeddings as RotaryEmbedding operators.

    x * cos + rotated(x) * sin      cos = f(Cos(pairs(angles))), sin = f(Sin(pairs(angles)))

Here f is the identity, a half-precision cast or a factor (YaRN, LongRoPE). Most families pair elements half a head
apart: rotated(x) = concat(-x[half:], x[:half]) and pairs(angles) = concat(angles, angles). Cohere, GLM, Ernie and
Helium interleave: rotated(x) = (-x[1], x[0], -x[3], ...), and pairs(angles) repeats each angle; or cos repeats each
element in the first half of f(Cos(concat(angles, angles))).

The tracer finds only the first kind, and only if f is the identity. As f is elementwise, the operator's table is
f(Cos(angles)).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import onnx_ir as ir

from topw_deploy.export.graph import (
    GraphEditor,
    attribute_values,
    chain,
    constant_integer,
    fixed_size,
    is_constant,
    is_op,
    producer,
    rewrite_each,
)
from topw_deploy.export.lowering.attention import HALF


def fuse_rotary(model: ir.Model) -> int:
    """Rewrite rotations of values [batch, heads, sequence, head_dim] as operators. Returns their number."""
    return rewrite_each(model, "topw.rotary", "Add", partial(_fuse_rotation, {}))


def narrow_rotary(model: ir.Model) -> int:
    """Remove the casts to float32 and back around RotaryEmbedding. Returns the number of changed nodes.

    OLMo, Cohere and Ernie rotate half-precision heads in float32, which attention cannot do inside its operator. The
    cosines and sines are cast to half precision instead.
    """
    return rewrite_each(model, "topw.narrow_rotary", "Cast", partial(_remove_casts, {}))


def fuse_partial_rotary(model: ir.Model) -> int:
    """Replace each rotation of the first part of a head by one operator. Returns the number of rotations.

    Phi, StableLM, GPT-NeoX, Nemotron and GLM slice each head, rotate the first part and join both parts.
    """
    return rewrite_each(model, "topw.partial_rotary", "Concat", _fuse_partial_rotation)


def rotary_producer(value: ir.Value | None) -> ir.Node | None:
    """The RotaryEmbedding without position ids that makes `value`, else None."""
    node = producer(value, "RotaryEmbedding")
    return node if node is not None and len(node.inputs) == 3 and node.inputs[0] is not None else None


def rotary_kind(rotary: ir.Node) -> tuple[int, int]:
    """The node's attributes `interleaved` and `rotary_embedding_dim` (0: the whole head)."""
    names = ("interleaved", "rotary_embedding_dim")
    interleaved, width = (rotary.attributes[n].as_int() if n in rotary.attributes else 0 for n in names)
    return interleaved, width


def _fuse_rotation(half_head_tables: dict[ir.Value, ir.Value], editor: GraphEditor, add: ir.Node) -> bool:
    """Replace the rotation whose last node is `add`, if there is one. Returns whether there is.

    half_head_tables: cosines or sines of a whole head -> those of half a head, shared by the rotations of a graph.
    """
    rotation = _rotation(add)
    if rotation is None:
        return False
    x, cosines, sines, interleaved = rotation
    cos_source, sin_source = _angles(cosines, "Cos", interleaved), _angles(sines, "Sin", interleaved)
    if cos_source is None or sin_source is None:
        return False
    cos, sin = (_repeat_steps(editor, *source, half_head_tables) for source in (cos_source, sin_source))
    attributes: dict[str, Any] = {"interleaved": int(interleaved), "num_heads": fixed_size(x, 1)}
    new = editor.op("RotaryEmbedding", [x, cos, sin], dtype=x.dtype, shape=list(x.shape), **attributes)
    editor.replace(add, new)
    return True


def _remove_casts(half_precision_tables: dict[ir.Value, ir.Value], editor: GraphEditor, back: ir.Node) -> bool:
    """Replace the RotaryEmbedding between two casts, of which `back` is the second. Returns whether there is one.

    half_precision_tables: float32 cosines or sines -> those in half precision, shared by the rotations of a graph.
    """
    rotary = rotary_producer(back.inputs[0])
    wide = None if rotary is None else producer(rotary.inputs[0], "Cast")
    x = None if wide is None else wide.inputs[0]
    if rotary is None or x is None or x.dtype not in HALF or x.dtype != back.outputs[0].dtype:
        return False
    tables = rotary.inputs[1:]
    for table in tables:
        if table not in half_precision_tables:
            half_precision_tables[table] = editor.op("Cast", [table], to=x.dtype, dtype=x.dtype, shape=table.shape)
    inputs = [x, *(half_precision_tables[table] for table in tables)]
    new = editor.op("RotaryEmbedding", inputs, dtype=x.dtype, shape=x.shape, **attribute_values(rotary))
    editor.replace(back, new)
    return True


def _fuse_partial_rotation(editor: GraphEditor, concat: ir.Node) -> bool:
    """Replace the partial rotation whose last node is `concat`, if there is one. Returns whether there is."""
    part, other = _joined_pair(concat.outputs[0])
    rotary, rest = rotary_producer(part), producer(other, "Slice")
    first = None if rotary is None else producer(rotary.inputs[0], "Slice")
    if rotary is None or first is None or rest is None or "num_heads" not in rotary.attributes:
        return False
    x = first.inputs[0]
    width = _head_width(x)
    if x is None or x is not rest.inputs[0] or width is None:
        return False
    rotated, kept = _slice_of(first, width), _slice_of(rest, width)
    if rotated is None or rotated[0] != 0 or rotated[2] != 1 or kept != (rotated[1], width, 1):
        return False
    attributes = {**attribute_values(rotary), "rotary_embedding_dim": rotated[1]}
    new = editor.op("RotaryEmbedding", [x, *rotary.inputs[1:]], dtype=x.dtype, shape=x.shape, **attributes)
    editor.replace(concat, new)
    return True


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, bool] | None:
    """The parts of x * cos + rotated(x) * sin, whose sum is `add`; None if it is another sum.

    Returns x [batch, heads, sequence, head_dim], cos, sin and whether the rotation interleaves.
    """
    for straight, crossed in permutations(producer(value, "Mul") for value in add.inputs):
        if straight is None or crossed is None:
            continue
        for rotated, sin in permutations(crossed.inputs):
            for x, cos in permutations(straight.inputs):
                interleaved = _interleaves(x, rotated)
                if x is not None and cos is not None and sin is not None and interleaved is not None:
                    return x, cos, sin, interleaved
    return None


def _interleaves(x: ir.Value | None, rotated: ir.Value | None) -> bool | None:
    """True if `rotated` is the interleaved rotated(x), False if it is the other one, None if it is neither.

    Both may be cast to the same type.
    """
    if x is None or rotated is None:
        return None
    if _source_of_rotated_halves(rotated) is x:
        return False
    if _source_of_rotated_pairs(rotated) is x:
        return True
    casts = [producer(value, "Cast") for value in (x, rotated)]
    if x.dtype is None or x.dtype != rotated.dtype or casts[0] is None or casts[1] is None:
        return None
    return _interleaves(casts[0].inputs[0], casts[1].inputs[0])


def _source_of_rotated_halves(value: ir.Value | None) -> ir.Value | None:
    """The x of which `value` is concat(-x[half:], x[:half]), else None."""
    return _common_source(*_joined_pair(value), lambda width: [(0, width // 2, 1), (width // 2, width, 1)])


def _source_of_rotated_pairs(value: ir.Value | None) -> ir.Value | None:
    """The x of which `value` is (-x[1], x[0], -x[3], x[2], ...), else None."""
    whole = producer(value, "Reshape")
    odd, even = (producer(part, "Unsqueeze") for part in _joined_pair(whole.inputs[0] if whole else None))
    if value is None or odd is None or even is None:
        return None
    if not {constant_integer(odd.inputs[1]), constant_integer(even.inputs[1])} <= {-1, 4}:
        return None
    x = _common_source(odd.inputs[0], even.inputs[0], lambda width: [(0, width, 2), (1, width, 2)])
    return x if x is not None and value.shape == x.shape else None


def _common_source(
    negated: ir.Value | None, plain: ir.Value | None, ranges: Callable[[int], list[tuple[int, int, int]]]
) -> ir.Value | None:
    """The x [batch, heads, sequence, width] of which `plain` and -`negated` are slices, else None.

    ranges: for an even width, the start, end and step of both slices.
    """
    first, (_, second) = producer(plain, "Slice"), chain(negated, "Neg", "Slice") or (None, None)
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    width = _head_width(x)
    if x is None or width is None or width % 2 or not isinstance(x.shape[1], int):
        return None
    return x if [_slice_of(node, width) for node in (first, second)] == ranges(width) else None


def _angles(factor: ir.Value, function: str, interleaved: bool) -> tuple[ir.Value, list[ir.Node]] | None:
    """The source of the cosines or sines `factor` of whole heads; None for an unknown pattern.

    function: Cos or Sin.
    Returns the angles [batch, sequence, head_dim / 2], and the nodes from `function` on that compute `factor` of them.
    """
    steps: list[ir.Node] = []
    value: ir.Value | None = factor
    has_head_axis = is_repeated = False
    while (node := value.producer() if value is not None else None) is not None:
        if is_op(node, function):
            steps.insert(0, node)
            repeats = interleaved and not is_repeated
            angles = _source_of_repeated(node.inputs[0]) if repeats else _source_of_doubled(node.inputs[0])
            return (angles, steps) if angles is not None and has_head_axis else None
        if is_op(node, "Unsqueeze") and constant_integer(node.inputs[1]) == 1 and not has_head_axis:
            has_head_axis, value = True, node.inputs[0]
        elif is_op(node, "Reshape") and interleaved and not is_repeated:
            is_repeated, value = True, _source_of_first_half(_source_of_repeated(value))
        elif is_op(node, "Cast") or _is_scaling(node):
            steps.insert(0, node)
            value = node.inputs[_variable_input(node)]
        else:
            return None
    return None


def _source_of_doubled(value: ir.Value | None) -> ir.Value | None:
    """The a of which `value` is concat(a, a), else None."""
    first, second = _joined_pair(value)
    return first if first is second else None


def _source_of_first_half(value: ir.Value | None) -> ir.Value | None:
    """The a of which `value` is a[:half] on the last axis, else None."""
    part = producer(value, "Slice")
    whole = part.inputs[0] if part is not None else None
    width = whole.shape[-1] if whole is not None and whole.shape is not None else None
    if part is None or not isinstance(width, int) or _slice_of(part, width) != (0, width // 2, 1):
        return None
    return whole


def _source_of_repeated(value: ir.Value | None) -> ir.Value | None:
    """The a of which `value` is (a[0], a[0], a[1], ...) on the last axis, else None."""
    _, tile, unsqueeze = chain(value, "Reshape", "Tile", "Unsqueeze") or (None, None, None)
    if value is None or tile is None or unsqueeze is None:
        return None
    once = unsqueeze.inputs[0]
    if once is None or once.shape is None or value.shape is None or not isinstance(once.shape[-1], int):
        return None
    rank = len(once.shape)
    repeats = None if tile.inputs[1] is None else ir.convenience.get_const_tensor(tile.inputs[1])
    if constant_integer(unsqueeze.inputs[1]) not in (-1, rank) or repeats is None:
        return None
    is_twice = repeats.numpy().tolist() == [1] * rank + [2]
    return once if is_twice and list(value.shape) == [*once.shape[:-1], 2 * once.shape[-1]] else None


def _repeat_steps(
    editor: GraphEditor, angles: ir.Value, steps: list[ir.Node], copies: dict[ir.Value, ir.Value]
) -> ir.Value:
    """Copy the nodes `steps`, one after the other, so that they start from `angles`. Returns the last copy's output.

    copies: outputs of nodes -> those of their copies; adds to it.
    """
    value = angles
    for step in steps:
        whole = step.outputs[0]
        if whole not in copies:
            inputs = list(step.inputs)
            inputs[_variable_input(step)] = value
            copies[whole] = editor.op(step.op_type, inputs, dtype=whole.dtype, **attribute_values(step))
        value = copies[whole]
    return value


def _is_scaling(node: ir.Node) -> bool:
    """Whether `node` multiplies with one constant number."""
    if not is_op(node, "Mul"):
        return False
    factor = node.inputs[1 - _variable_input(node)]
    return is_constant(factor) and factor is not None and factor.shape in ((), (1,))


def _variable_input(node: ir.Node) -> int:
    """The index of the input that is not constant, of at most two."""
    return int(is_constant(node.inputs[0]))


def _slice_of(node: ir.Node, width: int) -> tuple[int, int, int] | None:
    """The start, end (at most `width`) and step of a Slice of the last axis; None if they are not constant."""
    start, stop, axis, step = (constant_integer(value) for value in (*node.inputs[1:], None, None, None)[:4])
    rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    if start is None or stop is None or axis not in (-1, rank - 1):
        return None
    return start, min(stop, width), 1 if step is None else step


def _joined_pair(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """The two values that a Concat on the last axis joins to `value`; two None if none does."""
    both = producer(value, "Concat")
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    if both is None or len(both.inputs) != 2 or both.attributes["axis"].as_int() not in (-1, rank - 1):
        return None, None
    return both.inputs[0], both.inputs[1]


def _head_width(x: ir.Value | None) -> int | None:
    """The last size of x [batch, heads, sequence, width] if it is a number, else None."""
    width = x.shape[3] if x is not None and x.shape is not None and len(x.shape) == 4 else None
    return width if isinstance(width, int) else None
