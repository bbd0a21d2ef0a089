"""Sequence limits of another exporter's decoder, and model features that its graph lacks.

Without the model's sliding window, a graph is silently wrong for sequences longer than the window; without its soft
cap, for all sequences. Comparing a graft with the decoder that it was made from shows neither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import onnx_ir as ir

from topw_deploy.export.graph.editor import find_input, is_constant

_TRANSPARENT = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity"}
_COS_CACHE_AT = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}  # input of com.microsoft's operators
# Graphs of standard operators apply a window by comparing with its size, or by adding or subtracting it.
_COMPARISONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Add"}
_FUSED = ("GroupQueryAttention", "Attention")
_BETWEEN_CAP_AND_SOFTMAX = {"Mul", "Add", "Where", "Cast", "Identity", "Reshape", "Max", "Clip"}
_CAP_TOLERANCE = 1e-3  # relative: caps may be rounded to half precision


@dataclass(frozen=True)
class Window:
    """A sliding window of `size` tokens, including the query, in `layers` layers (None: at least one)."""

    size: int
    layers: int | None


@dataclass(frozen=True)
class SequenceLimit:
    """The longest sequence in tokens, and why it is below the configured one."""

    tokens: int
    notices: tuple[str, ...] = ()


def sequence_limit(graph: ir.Graph, configured: int, window: Window | None) -> SequenceLimit:
    """The smallest of the configured context, the graph's position tables, and a window that `graph` ignores."""
    tokens, notices = configured, []
    rows = min(_position_rows(graph), default=tokens)
    if rows < tokens:
        notices.append(
            f"the decoder's table of positions has {rows} rows, fewer than the context of {tokens} tokens that its "
            f"configuration states, so sequences end at {rows} tokens"
        )
        tokens = rows
    if window is not None and window.size < tokens and not applies_window(graph, window):
        notices.append(
            f"the decoder ignores the model's sliding window, so sequences end at {window.size} tokens: longer ones "
            "would need the window"
        )
        tokens = window.size
    return SequenceLimit(tokens, tuple(notices))


def window_of(config: dict[str, Any], genai: dict[str, Any]) -> Window | None:
    """The sliding window in config.json (text part) or, if it is empty, in genai_config.json (decoder part)."""
    if config:
        size, types = config.get("sliding_window"), config.get("layer_types")
        if not _is_size(size) or config.get("use_sliding_window") is False:
            return None
        if not isinstance(types, list):
            return Window(size, None)
        sliding = sum(kind == "sliding_attention" for kind in types)
        return Window(size, sliding) if sliding else None
    stated = genai.get("sliding_window")
    if not isinstance(stated, dict) or not _is_size(stated.get("window_size")):
        return None
    # Without layer_types the builder writes an empty list; every layer then has the window.
    layers = stated.get("layers")
    return Window(stated["window_size"], len(layers) if isinstance(layers, list) and layers else None)


def applies_window(graph: ir.Graph, window: Window) -> bool:
    """Whether enough layers apply the window, by GroupQueryAttention's attribute or a comparison."""
    fused = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if not fused:
        return any(_is_near(value, window.size) for value in _compared_numbers(graph))
    found = sum(_attribute(node, "local_window_size") == window.size for node in fused)
    return found >= (window.layers or 1)


def lost_soft_cap(graph: ir.Graph, config: dict[str, Any]) -> float | None:
    """The attention soft cap in `config` (Gemma 2) that `graph` does not apply, by attribute or Tanh before Softmax."""
    cap = config.get("attn_logit_softcapping")
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
        return None
    if cap > sys.float_info.max:  # an integer beyond any score
        return None
    fused = [node for node in graph if node.op_type in _FUSED]
    if fused:
        kept = all(abs(_attribute(node, "softcap") - cap) <= _CAP_TOLERANCE * cap for node in fused)
    else:
        scores = [node.inputs[0] for node in graph if node.op_type == "Softmax"]
        kept = bool(scores) and all(_comes_from_tanh(value) for value in scores)
    return None if kept else float(cap)


def _position_rows(graph: ir.Graph) -> Iterator[int]:
    """Row counts of tables indexed by position: rotary caches, learned embeddings."""
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _COS_CACHE_AT:
            at = _COS_CACHE_AT[node.op_type]
            yield from _table_rows(node.inputs[at] if len(node.inputs) > at else None)
    positions = find_input(graph, "position_ids")
    waiting = [positions] if positions is not None else []
    while waiting:
        for node, place in waiting.pop().uses():
            if node.domain == "" and node.op_type in _TRANSPARENT and place == 0:
                waiting.append(node.outputs[0])
            elif node.domain == "" and node.op_type == "Gather" and place == 1:
                yield from _table_rows(node.inputs[0])


def _table_rows(table: ir.Value | None) -> Iterator[int]:
    if table is not None and is_constant(table) and table.shape is not None and len(table.shape) == 2:
        rows = table.shape[0]
        if isinstance(rows, int):
            yield rows


def _compared_numbers(graph: ir.Graph) -> Iterator[int]:
    for node in graph.all_nodes():
        if node.domain == "" and node.op_type in _COMPARISONS:
            for value in node.inputs:
                tensor = ir.convenience.get_const_tensor(value) if value is not None else None
                if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
                    yield int(tensor.numpy().reshape(()))


def _is_near(value: int, window: int) -> bool:
    """Whether `value` is the window or differs by one; negative where a graph adds it."""
    return abs(value) in (window - 1, window, window + 1)


def _comes_from_tanh(value: ir.Value | None) -> bool:
    waiting, seen = [value], set()
    while waiting:
        node = source.producer() if (source := waiting.pop()) is not None else None
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Tanh":
            return True
        if node.op_type in _BETWEEN_CAP_AND_SOFTMAX:
            waiting += node.inputs
    return False


def _attribute(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return float(attribute.value) if attribute is not None else 0.0


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
