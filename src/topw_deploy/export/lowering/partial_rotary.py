"""A rotary embedding of a part of each head as one operator.

Families that turn the first numbers of a head only (Phi, StableLM, GPT-NeoX, Nemotron, GLM) cut the head in two, turn
one part and join them again. The operator does that by itself, `rotary_embedding_dim` numbers of it.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.editor import GraphEditor
from topw_deploy.export.lowering.rotary import is_op, on_last_axis, producer, slice_of


def fuse_partial_rotary(model: ir.Model) -> int:
    """Replace every head joined from a turned part and the rest with a RotaryEmbedding of the whole; how many were."""
    editor = GraphEditor(model.graph, "topw.partial_rotary")
    fused = sum(_fuse(editor, node) for node in list(model.graph) if is_op(node, "Concat"))
    if fused:
        editor.finish()
        RemoveUnusedNodesPass()(model)
    return fused


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
    old = concat.outputs[0]
    new = editor.op("RotaryEmbedding", [x, *rotary.inputs[1:]], dtype=x.dtype, shape=x.shape, **attributes)
    new.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    editor.graph.remove(concat, safe=True)
    return True
