"""Rotary embeddings in the type of the heads that they turn.

Some families (OLMo, Cohere, Ernie) widen half-precision heads to float32 to turn them, and narrow them after. That
keeps attention from turning them itself. Their cosines and sines are narrowed instead, once for all layers, which is
what most families do (Llama, Qwen): they are rounded as the heads themselves are.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, rewrite_each
from topw_deploy.export.lowering.rotary import producer

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def narrow_rotary(model: ir.Model) -> int:
    """Replace every RotaryEmbedding between a cast from half precision and one back with one that has none; how many
    were."""
    return rewrite_each(model, "topw.narrow_rotary", "Cast", partial(_fuse, {}))


def _fuse(narrowed: dict[ir.Value, ir.Value], editor: GraphEditor, back: ir.Node) -> bool:
    rotary = producer(back.inputs[0], "RotaryEmbedding")
    wide = producer(rotary.inputs[0] if rotary else None, "Cast")
    x = wide.inputs[0] if wide is not None else None
    if (
        rotary is None
        or x is None
        or len(rotary.inputs) != 3
        or x.dtype not in _HALF
        or x.dtype != back.outputs[0].dtype
    ):
        return False
    tables = [_narrow(editor, value, x.dtype, narrowed) for value in rotary.inputs[1:] if value is not None]
    attributes = {name: attribute.value for name, attribute in rotary.attributes.items()}
    new = editor.op("RotaryEmbedding", [x, *tables], dtype=x.dtype, shape=x.shape, **attributes)
    editor.replace(back, new)
    return True


def _narrow(editor: GraphEditor, value: ir.Value, dtype: ir.DataType, narrowed: dict[ir.Value, ir.Value]) -> ir.Value:
    if value not in narrowed:
        narrowed[value] = editor.op("Cast", [value], to=dtype, dtype=dtype, shape=value.shape)
    return narrowed[value]
