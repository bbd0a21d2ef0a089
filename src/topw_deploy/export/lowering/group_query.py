"""The lowering for onnxruntime: com.microsoft.GroupQueryAttention over one buffer bound as past and as present.

The operator takes [batch, sequence, heads * head_dim], so no transpose is left, reads only the slots in use, and may
turn queries and keys itself. Three of its habits shape what is fed to it (onnxruntime 1.24 to 1.31):
- it takes a call as the start of all rows when total_sequence_length equals the columns of the call; else a batch of
  several rows may bring one new token each only, which the manifest says by `ragged_chunks: false`;
- it reads total_sequence_length on the host, so that is an input and not computed, which would copy it from a GPU;
- seqlens_k is one less than a row's tokens *after* the call. Padded columns are counted as if they were real, since it
  finds the past by subtracting the columns.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.flat import flattened
from topw_deploy.export.lowering.layers import AttentionLayer, attention_layers
from topw_deploy.export.lowering.packed_qkv import packed
from topw_deploy.export.lowering.rotary_tables import RotaryTables
from topw_deploy.export.lowering.skip_norm import fuse_skip_norms
from topw_deploy.export.lowering.static import StaticInputs, finish, replace_present
from topw_deploy.export.trace.trace import TracedDecoder

PREFIX = "topw.attention"
DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"
_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def refusal(decoder: TracedDecoder) -> str | None:
    """Why GroupQueryAttention cannot serve this decoder, or None."""
    for layer in attention_layers(decoder):
        if layer.head_dim != layer.value_dim:
            return f"layer {layer.index} has keys of {layer.head_dim} and values of {layer.value_dim} numbers"
        if layer.head_dim % 8:
            return f"layer {layer.index} has heads of {layer.head_dim} numbers, which is no multiple of 8"
        if layer.heads % layer.kv_heads:
            return f"layer {layer.index} has {layer.heads} query heads for {layer.kv_heads} key heads"
        if layer.query.dtype not in _DTYPES:
            return f"layer {layer.index} computes in {layer.query.dtype}"
    return None


def lower(decoder: TracedDecoder, context_length: int) -> None:
    """Replace every marker of `decoder.model` in place, for a decoder that `refusal` has nothing against.

    context_length: most tokens of a sequence, the rows of rotary tables.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    inputs = StaticInputs(editor)
    last_slots = _last_slots(editor, inputs, in_half=layers[0].query.dtype != ir.DataType.FLOAT)
    lengths = [last_slots, inputs.host_length()]
    tables = RotaryTables(editor, decoder, context_length)
    for layer in layers:
        _lower_layer(editor, layer, lengths, tables)
    model.opset_imports[DOMAIN] = 1
    finish(model, editor, inputs)
    fuse_skip_norms(model)


def _last_slots(editor: GraphEditor, inputs: StaticInputs, *, in_half: bool) -> ir.Value:
    """int32 [batch], where each row's last token is after this call if every column is real.

    in_half: whether the operator has kernels for CUDA. There the number of columns, a shape and so on the host, cannot
    be added to what is on the device without a copy, but it can say how long a range is.
    """
    op, constant = editor.op, editor.constant
    if in_half:
        columns = op("Range", [constant(np.int64(0)), op("Squeeze", [inputs.sequence]), constant(np.int64(1))])
        last = op("Add", [inputs.write_indices, op("Gather", [columns, constant(np.array(-1))])])
    else:
        last = op("Sub", [inputs.total, constant(np.array([1]))])
    return op("Cast", [last], to=ir.DataType.INT32)


def _lower_layer(editor: GraphEditor, layer: AttentionLayer, lengths: list[ir.Value], tables: RotaryTables) -> None:
    query, key = flattened(editor, layer.query), flattened(editor, layer.new_key)
    value = flattened(editor, layer.new_value).unturned
    turned = tables.of(query, key, layer.head_dim)
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": layer.scale,
        "do_rotary": int(turned is not None),
    }
    if layer.window:
        attributes["local_window_size"] = layer.window
    if layer.softcap:
        attributes["softcap"] = layer.softcap
    if turned is not None:
        attributes["rotary_interleaved"] = turned.interleaved
    sources = (query.unturned, key.unturned, value) if turned else (query.turned(editor), key.turned(editor), value)
    parts = packed(editor, sources) or sources
    output, keys, values = editor.outputs(
        OPERATOR,
        [*parts, layer.past_key, layer.past_value, *lengths, *((turned.cos, turned.sin) if turned else ())],
        3,
        domain=DOMAIN,
        **attributes,
    )
    output.type = layer.output.type
    output.shape = ir.Shape(["batch_size", "sequence_length", layer.heads * layer.head_dim])
    _replace_output(editor, layer, output)
    replace_present(editor.graph, layer, keys, values)


def _replace_output(editor: GraphEditor, layer: AttentionLayer, output: ir.Value) -> None:
    """Give the marker's readers `output` [batch, sequence, heads * head_dim]; most of them only join the heads."""
    separate = None
    for node, place in list(layer.output.uses()):
        joined = node.outputs[0]
        if node.op_type == "Reshape" and joined.shape is not None and len(joined.shape) == 3:
            ir.convenience.replace_all_uses_with(joined, output)
        else:
            if separate is None:
                shape = editor.constant(np.array([0, 0, layer.heads, layer.head_dim]))
                separate = editor.op("Reshape", [output, shape], dtype=output.dtype)
            node.replace_input_with(place, separate)
