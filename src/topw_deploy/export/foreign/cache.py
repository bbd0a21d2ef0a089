"""Key-value caches of other exporters' decoders."""

from __future__ import annotations

import re

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph.editor import find_input, required_input

PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
# It takes one length per row, so it silently misplaces left-padded rows, and it writes the cache in place.
IN_PLACE = "GroupQueryAttention"
_LENGTHS = 5  # the operator's input seqlens_k: row lengths - 1
_TYPES = ("float", "float16", "bfloat16")
_AFTER_SUM = ("Cast", "Sub", "Squeeze")  # allowed between the mask's row sum and seqlens_k


def cache_type(graph: ir.Graph) -> str:
    """The element type of the cache. Raises UnsupportedModelError for a quantised cache."""
    name = (required_input(graph, "past_key_values.0.key").dtype or ir.DataType.FLOAT).name.lower()
    if name not in _TYPES:
        raise UnsupportedModelError(
            f"the decoder keeps its cache as {name}, but only {', '.join(_TYPES)} are supported; "
            "export it without a quantised cache."
        )
    return name


def is_written_in_place(graph: ir.Graph) -> bool:
    """Whether only GroupQueryAttention reads the cache."""
    pasts = [value for value in graph.inputs if PAST.fullmatch(value.name or "")]
    return all({node.op_type for node, _ in value.uses()} == {IN_PLACE} for value in pasts)


def takes_right_padding(graph: ir.Graph) -> bool:
    """Whether every GroupQueryAttention takes the mask's row sums as lengths.

    False if a node caches only a window: such a node places all rows by the longest one, or fails.
    """
    mask = find_input(graph, "attention_mask")
    nodes = [node for node in graph if node.op_type == IN_PLACE]
    return bool(nodes) and all(not kept_window(node) and _sums_rows(node.inputs[_LENGTHS], mask) for node in nodes)


def kept_window(node: ir.Node) -> int:
    """The number of tokens to which the node limits its cache; 0 for no limit."""
    keeps = node.attributes.get("sliding_window_cache")
    return node.attributes["local_window_size"].as_int() if keeps is not None and keeps.as_int() else 0


def _sums_rows(value: ir.Value | None, mask: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _AFTER_SUM:
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    return node is not None and node.op_type == "ReduceSum" and mask is not None and node.inputs[0] is mask
