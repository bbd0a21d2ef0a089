"""One matrix product for queries, keys and values instead of three.

Where the trace split one product into three parts (Phi-3, GPT-2), it is taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.one_product import joined

Parts = tuple[ir.Value, ir.Value | None, ir.Value | None]


def packed(editor: GraphEditor, parts: Sequence[ir.Value]) -> Parts | None:
    """The three `parts` [batch, sequence, n_i] as one value [batch, sequence, n] and two Nones; None if they are not
    products of one value with weights of the file, each with a bias or each without."""
    whole = _split_before(parts) or joined(editor, parts, "qkv")
    return None if whole is None else (whole, None, None)


def _split_before(parts: Sequence[ir.Value]) -> ir.Value | None:
    """The value that `parts` are consecutive slices of, leaving nothing out."""
    nodes = [part.producer() for part in parts]
    first = nodes[0]
    if first is None or first.domain:
        return None
    whole = first.inputs[0]
    if whole is None or whole.shape is None:
        return None
    if first.op_type == "Split":
        axis = first.attributes["axis"].as_int() if "axis" in first.attributes else 0
        return whole if list(first.outputs) == list(parts) and axis in (-1, len(whole.shape) - 1) else None
    end = 0
    for node in nodes:
        if node is None or node.op_type != "Slice" or node.domain or node.inputs[0] is not whole:
            return None
        start, stop, axis, step = (_number(value) for value in (*node.inputs[1:], None, None, None)[:4])
        plain = axis in (-1, len(whole.shape) - 1) and step in (None, 1)
        if not plain or start != end or stop is None or stop <= end:
            return None
        end = min(stop, whole.shape[-1])  # type: ignore[type-var]
    return whole if end == whole.shape[-1] else None


def _number(value: ir.Value | None) -> int | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return int(value.const_value.numpy().reshape(-1)[0])
