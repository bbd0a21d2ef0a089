"""A rotary embedding of a part of each head as one operator.

Families that turn the first numbers of a head only (Phi, StableLM, GPT-NeoX, Nemotron, GLM) cut the head in two, turn
one part and join them again. The operator does that by itself, `rotary_embedding_dim` numbers of it.
"""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, rewrite_each
from topw_deploy.export.lowering.rotary import on_last_axis, producer, slice_of


def fuse_partial_rotary(model: ir.Model) -> int:
    """Replace every head joined from a turned part and the rest with a RotaryEmbedding of the whole; how many were."""
    return rewrite_each(model, "topw.partial_rotary", "Concat", _fuse)


def _fuse(editor: GraphEditor, concat: ir.Node) -> bool:
    if len(concat.inputs) != 2 or not on_last_axis(concat):
        return False
    rotary, rest = producer(concat.inputs[0], "RotaryEmbedding"), producer(concat.inputs[1], "Slice")
    first = producer(rotary.inputs[0] if rotary else None, "Slice")
    # With a fourth input the tables are looked up by position ids; such a node is left as it is.
    if (
        rotary is None
        or first is None
        or rest is None
        or len(rotary.inputs) != 3
        or "num_heads" not in rotary.attributes
    ):
        return False
    x = first.inputs[0]
    width = x.shape[3] if x is not None and x.shape is not None and len(x.shape) == 4 else None
    if x is None or x is not rest.inputs[0] or not isinstance(width, int):
        return False
    turned, kept = slice_of(first, width), slice_of(rest, width)
    if turned is None or turned[0] != 0 or turned[2] != 1 or kept != (turned[1], width, 1):
        return False
    attributes = {name: attribute.value for name, attribute in rotary.attributes.items()}
    attributes["rotary_embedding_dim"] = turned[1]
    new = editor.op("RotaryEmbedding", [x, *rotary.inputs[1:]], dtype=x.dtype, shape=x.shape, **attributes)
    editor.replace(concat, new)
    return True
