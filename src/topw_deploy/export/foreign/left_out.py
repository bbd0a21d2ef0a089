"""What a decoder of another exporter leaves out of its model, as far as graph and configuration tell without running.

A graph that lacks its model's sliding window is right up to the window and quietly wrong past it; one that lacks the
soft cap of the attention scores is wrong everywhere. Neither is seen by comparing a graft with the graph it was set
onto.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import onnx_ir as ir

# What exporters of plain operators write a window with: a distance, or a bound on positions, compared or subtracted.
_COMPARISONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Add"}
_FUSED = ("GroupQueryAttention", "Attention")
_BETWEEN_CAP_AND_SOFTMAX = {"Mul", "Add", "Where", "Cast", "Identity", "Reshape", "Max", "Clip"}
_CAP_TOLERANCE = 1e-3  # relative: a cap may have passed through half precision


@dataclass(frozen=True)
class Window:
    """A model's sliding window: a token sees `size` tokens, itself included. `layers`: how many layers have it, None
    where the configuration does not tell, which is then at least one."""

    size: int
    layers: int | None


def window_of(config: dict[str, Any], genai: dict[str, Any]) -> Window | None:
    """The sliding window that config.json (its text part) or, without one, genai_config.json (its decoder) states."""
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
    # The builder lists the layers that transformers' layer_types names; a model with a window in every layer, which
    # has no layer_types, gets an empty list.
    layers = stated.get("layers")
    return Window(stated["window_size"], len(layers) if isinstance(layers, list) and layers else None)


def applies_window(graph: ir.Graph, window: Window) -> bool:
    """Whether `graph` restricts attention to the window in as many layers as should have it.

    GroupQueryAttention states its window. In a graph of plain operators the window is a number that positions are
    compared with: found, it is believed; not found, it is not there.
    """
    fused = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if not fused:
        return any(_is_near(value, window.size) for value in _compared_with(graph))
    found = sum(_attribute(node, "local_window_size") == window.size for node in fused)
    return found >= (window.layers or 1)


def lost_soft_cap(graph: ir.Graph, config: dict[str, Any]) -> float | None:
    """The soft cap of attention scores that `config` states (Gemma 2) and `graph` does not apply; None if all is well.

    An operator for attention states its cap. In a graph of plain operators it is a Tanh on the way to the Softmax.
    """
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


def _compared_with(graph: ir.Graph) -> Iterator[int]:
    """Whole numbers, one at a time, that something is compared with, subtracted from or added to."""
    for node in graph.all_nodes():
        if node.domain == "" and node.op_type in _COMPARISONS:
            for value in node.inputs:
                tensor = ir.convenience.get_const_tensor(value) if value is not None else None
                if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
                    yield int(tensor.numpy().reshape(()))


def _is_near(value: int, window: int) -> bool:
    """The window itself, or the last position in or the first outside it; negative where it was added."""
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
    """The number that `node` has as attribute `name`; 0 where it has none, the default of all that are read here."""
    attribute = node.attributes.get(name)
    return float(attribute.value) if attribute is not None else 0.0


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
