"""Whether a graph that writes its cache in place takes rows of different lengths, as its mask tells them."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import find_input

_OPERATOR = "GroupQueryAttention"
_LENGTHS = 5  # the operator's input seqlens_k: a row's tokens, less one
_STEPS = ("Cast", "Sub", "Squeeze")  # between a row's sum and that input


def takes_right_padding(graph: ir.Graph) -> bool:
    """Whether every GroupQueryAttention is told how long each row is by the sum of the row's mask.

    False where one keeps a sliding window alone: it finds a row's slots by the longest row, or refuses.
    """
    mask = find_input(graph, "attention_mask")
    nodes = [node for node in graph if node.op_type == _OPERATOR]
    return bool(nodes) and all(not kept_window(node) and _sums(node.inputs[_LENGTHS], mask) for node in nodes)


def kept_window(node: ir.Node) -> int:
    """The sliding window that `node` may keep alone, so that a shorter buffer is an error; 0 where it keeps all."""
    keeps = node.attributes.get("sliding_window_cache")
    return node.attributes["local_window_size"].as_int() if keeps is not None and keeps.as_int() else 0


def _sums(value: ir.Value | None, mask: ir.Value | None) -> bool:
    """Whether `value` is made of the sums of the rows of `mask`."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _STEPS:
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    return node is not None and node.op_type == "ReduceSum" and mask is not None and node.inputs[0] is mask
