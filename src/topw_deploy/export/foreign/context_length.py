"""How many tokens a sequence may have in a decoder that another exporter wrote.

Three things end it: the context that the configuration states, the rows of the tables that positions are looked up in,
and the model's sliding window where the graph attends to everything instead: up to the window both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from topw_deploy.export.foreign.left_out import Window, applies_window
from topw_deploy.export.graph.editor import find_input, is_constant

_TRANSPARENT = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity"}
_COS_CACHE_AT = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}  # of com.microsoft's operators


@dataclass(frozen=True)
class Reach:
    """Most tokens of a sequence; `notices`: why they are fewer than the configuration says."""

    tokens: int
    notices: tuple[str, ...] = ()


def reach(graph: ir.Graph, configured: int, window: Window | None) -> Reach:
    """The smallest of the `configured` context, the position tables of `graph`, and a `window` that it lacks."""
    tokens, notices = configured, []
    rows = min(position_rows(graph), default=tokens)
    if rows < tokens:
        notices.append(
            f"the decoder's table of positions has {rows} rows, fewer than the context of {tokens} tokens that its "
            f"configuration states, so sequences end at {rows} tokens"
        )
        tokens = rows
    if window is not None and window.size < tokens and not applies_window(graph, window):
        notices.append(
            f"the decoder ignores the model's sliding window, so sequences end at {window.size} tokens, where it would "
            "begin to matter"
        )
        tokens = window.size
    return Reach(tokens, tuple(notices))


def position_rows(graph: ir.Graph) -> Iterator[int]:
    """Rows of every constant table that positions are looked up in: rotary caches and learnt embeddings."""
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _COS_CACHE_AT:
            at = _COS_CACHE_AT[node.op_type]
            yield from _rows(node.inputs[at] if len(node.inputs) > at else None)
    positions = find_input(graph, "position_ids")
    waiting = [positions] if positions is not None else []
    while waiting:
        for node, place in waiting.pop().uses():
            if node.domain == "" and node.op_type in _TRANSPARENT and place == 0:
                waiting.append(node.outputs[0])
            elif node.domain == "" and node.op_type == "Gather" and place == 1:
                yield from _rows(node.inputs[0])


def _rows(table: ir.Value | None) -> Iterator[int]:
    if table is not None and is_constant(table) and table.shape is not None and len(table.shape) == 2:
        rows = table.shape[0]
        if isinstance(rows, int):
            yield rows
