"""Sequence limits of another exporter's decoder, and features of the model that its graph lacks.

A graph that lacks the model's sliding window is silently wrong for sequences longer than the window, and one that lacks
its soft cap for all sequences. A comparison of the graft with the same graph cannot show either.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import onnx_ir as ir

from topw_deploy.export.graph import find_input, is_constant

_KEEP_VALUES = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity"}  # operators
_COS_CACHE_INPUTS = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}  # index in com.microsoft's operators
# Graphs of standard operators apply a window by comparing with its size, or by adding or subtracting it.
_WINDOW_OPERATORS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Add"}
_ATTENTION_OPERATORS = ("GroupQueryAttention", "Attention")
_BETWEEN_CAP_AND_SOFTMAX = {"Mul", "Add", "Where", "Cast", "Identity", "Reshape", "Max", "Clip"}
_CAP_TOLERANCE = 1e-3  # relative: the graph's cap may be rounded to half precision


@dataclass(frozen=True)
class Window:
    """A sliding window of a model.

    size: number of visible tokens, including the query.
    layers: number of layers that have it; None for an unknown number, at least one.
    """

    size: int
    layers: int | None


@dataclass(frozen=True)
class SequenceLimit:
    """The longest sequence that a decoder supports.

    tokens: its length.
    notices: the reasons why it is shorter than the configured context, as sentences for the user.
    """

    tokens: int
    notices: tuple[str, ...] = ()


def sequence_limit(graph: ir.Graph, configured: int, window: Window | None) -> SequenceLimit:
    """The smallest of the configured context, the tables of positions in `graph`, and a window that `graph` ignores.

    configured: the context in tokens.
    window: the model's sliding window, or None.
    """
    tokens, notices = configured, []
    rows = min(_position_rows(graph), default=tokens)
    if rows < tokens:
        notices.append(
            f"the decoder's table of positions has {rows} rows, fewer than the context of {tokens} tokens that its "
            f"configuration states, so a sequence may have at most {rows} tokens"
        )
        tokens = rows
    if window is not None and window.size < tokens and not applies_window(graph, window):
        notices.append(
            f"the decoder ignores the model's sliding window, so a sequence may have at most {window.size} tokens: "
            "a longer one would need the window"
        )
        tokens = window.size
    return SequenceLimit(tokens, tuple(notices))


def window_of(config: dict[str, Any], genai: dict[str, Any]) -> Window | None:
    """The sliding window that the configuration states, or None.

    config: config.json, or its part for text.
    genai: the decoder's part of genai_config.json, which is used only if `config` is empty.
    """
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
    """Whether `graph` applies `window`.

    If it has GroupQueryAttention: in enough layers, by the operator's attribute. If not: somewhere, by a comparison.
    """
    operators = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if not operators:
        return any(_is_near(value, window.size) for value in _compared_numbers(graph))
    layers = sum(number_attribute(node, "local_window_size") == window.size for node in operators)
    return layers >= (window.layers or 1)


def lost_soft_cap(graph: ir.Graph, config: dict[str, Any]) -> float | None:
    """The soft cap on attention scores in `config` (Gemma 2) if `graph` does not apply it, else None.

    A graph applies a cap by an attribute of the attention operator, or by a Tanh before each Softmax.
    """
    cap = config.get("attn_logit_softcapping")
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
        return None
    if cap > sys.float_info.max:  # an integer beyond any score
        return None
    operators = [node for node in graph if node.op_type in _ATTENTION_OPERATORS]
    if operators:
        caps = [number_attribute(node, "softcap") for node in operators]
        is_applied = all(abs(applied - cap) <= _CAP_TOLERANCE * cap for applied in caps)
    else:
        scores = [optional_input(node, 0) for node in graph if node.op_type == "Softmax"]
        is_applied = bool(scores) and all(_comes_from_tanh(value) for value in scores)
    return None if is_applied else float(cap)


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """The input `index` of `node`; None if it is empty or missing, as required ones may be in a damaged file."""
    return node.inputs[index] if index < len(node.inputs) else None


def number_attribute(node: ir.Node, name: str) -> float:
    """The attribute `name` of `node`; 0 if it is missing or not a number."""
    attribute = node.attributes.get(name)
    is_number = attribute is not None and attribute.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT)
    return float(attribute.value) if attribute is not None and is_number else 0.0


def _position_rows(graph: ir.Graph) -> Iterator[int]:
    """The numbers of rows of the tables that positions index: rotary caches and learned embeddings."""
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _COS_CACHE_INPUTS:
            yield from _table_rows(optional_input(node, _COS_CACHE_INPUTS[node.op_type]))
    positions = find_input(graph, "position_ids")
    pending = [positions] if positions is not None else []
    while pending:
        for node, place in pending.pop().uses():
            if node.domain == "" and node.op_type in _KEEP_VALUES and place == 0:
                pending += node.outputs
            elif node.domain == "" and node.op_type == "Gather" and place == 1:
                yield from _table_rows(node.inputs[0])


def _table_rows(table: ir.Value | None) -> Iterator[int]:
    """The number of rows of `table`, if it is constant and has a known number."""
    if table is not None and is_constant(table) and table.shape is not None and len(table.shape) == 2:
        rows = table.shape[0]
        if isinstance(rows, int):
            yield rows


def _compared_numbers(graph: ir.Graph) -> Iterator[int]:
    """The constant integers that `graph` compares with, adds or subtracts."""
    for node in graph.all_nodes():
        if node.domain == "" and node.op_type in _WINDOW_OPERATORS:
            for value in node.inputs:
                tensor = ir.convenience.get_const_tensor(value) if value is not None else None
                if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
                    yield int(tensor.numpy().reshape(()))


def _is_near(value: int, window: int) -> bool:
    """Whether `value` or -`value`, which a graph may add, is `window` or differs from it by one."""
    return abs(value) in (window - 1, window, window + 1)


def _comes_from_tanh(value: ir.Value | None) -> bool:
    """Whether operators that may stand between a soft cap and a softmax compute `value` from a Tanh."""
    pending, seen = [value], set()
    while pending:
        node = source.producer() if (source := pending.pop()) is not None else None
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Tanh":
            return True
        if node.op_type in _BETWEEN_CAP_AND_SOFTMAX:
            pending += node.inputs
    return False


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
