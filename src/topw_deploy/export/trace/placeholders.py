"""Placeholder nodes of domain topw.trace for all that mixes tokens.

A trace has a placeholder for each attention, convolution, history and recurrence (and for experts, see `experts`).
Placeholders have no masks and no states, so one trace serves every target; `lowering` replaces them.

Attention: see `mark_attention`.

Convolution(x [B, C, S], weight [C, 1, K], bias [C] or none) -> [B, C, S]
    attributes layer, state, activation ("" or "silu").
    y_t = activation(sum_j weight_j x_(t-K+1+j) + bias), per channel. State: the last K-1 columns, [B, C, K-1].

History(x [B, C, S]) -> [B, C, N + S]
    attributes layer, state, columns (N).
    x after the N columns before it, which are zero before a row's first token. State: the last N columns, [B, C, N].

Recurrence(q [B, S, Hq, Dk], k [B, S, Hk, Dk], v [B, S, H, Dv], decay or none, beta or none) -> [B, S, max(Hq, H), Dv]
    attributes layer, state, scale, rule.
    decay: logarithm of the decay, at most 0, [B, S, H] or [B, S, H, Dk]; beta: [B, S, H].
    State S: [B, H, Dk, Dv], float32. The output is o_t = scale S_t^T q_t, with S_t by the attribute `rule`:
        linear       S_t = S_(t-1) + k_t v_t^T
        gated        S_t = exp(decay_t) S_(t-1) + k_t v_t^T
        delta        S_t = S_(t-1) + k_t beta_t (v_t - S_(t-1)^T k_t)^T
        gated_delta  as delta, with exp(decay_t) S_(t-1) in place of S_(t-1)
    Hk divides H, and Hq divides H or H divides Hq: consecutive heads share a key or a query.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from topw_deploy.errors import UnsupportedModelError

PLACEHOLDER_DOMAIN = "topw.trace"
ATTENTION = "Attention"
CONVOLUTION = "Convolution"
HISTORY = "History"
RECURRENCE = "Recurrence"


def untraceable(what: str) -> UnsupportedModelError:
    """The error for a model that cannot be traced. what: a clause."""
    return UnsupportedModelError(f"{what}; import an ONNX decoder made by another exporter.")


def attention_placeholders(graph: ir.Graph) -> list[ir.Node]:
    """The attention placeholders of `graph`, in layer order."""
    nodes = [node for node in graph if node.domain == PLACEHOLDER_DOMAIN and node.op_type == ATTENTION]
    return sorted(nodes, key=lambda node: node.attributes["layer"].as_int())


@dataclass(frozen=True)
class Visible:
    """Which of the keys up to a query are visible to it.

    window: only the last `window` keys, including the query's own; 0 for all.
    chunk: only the keys in the query's chunk of `chunk` tokens; 0 for all.
    """

    window: int = 0
    chunk: int = 0


def mark_attention(
    query: Tensor,  # [batch, heads, sequence, head_dim]
    key: Tensor,  # [batch, kv_heads, sequence, head_dim]
    value: Tensor | None,  # [batch, kv_heads, sequence, value_dim]
    *,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    visible: Visible | None = None,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    relative: Tensor | None = None,
    latent: int = 0,
    stride: int = 0,
) -> Tensor:
    """Leave an attention placeholder. Returns its output, [batch, sequence, heads, value_dim].

    layer: the layer's number, which no other attention placeholder has.
    scale: factor of the products of queries and keys.
    softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
    visible: which keys a query sees; None for all up to the query.
    sink: [heads], scores that take part in the softmax but have no value.
    slopes: [heads], ALiBi: score += slope * (key position - query position). Slopes in bfloat16 follow Falcon: score +=
        scale * slope * key position, with positions and products rounded to bfloat16.
    relative: [batch, heads, sequence, extent], what each query adds to the score of a key, by the distance from the
        query's position back to the key's. The last column holds for all greater distances too.
    latent: above 0, and `value` None, if the values are the first `latent` columns of the keys.
    stride: above 0, with `latent`, if each key holds two keys of `latent` columns, which are their own values. The
        first is the token's. The second stands for the block of tokens that ends with the token. It is visible where
        the token's position + 1 is a multiple of `stride`, to the token's own and all later queries.
    """
    keys_seen = visible or Visible()
    attributes: dict[str, Any] = {
        "scale": float(scale),
        "softcap": float(softcap),
        "window": keys_seen.window,
        "chunk": keys_seen.chunk,
        "latent": latent,
        "stride": stride,
        "layer": int(layer),
    }
    inputs = [query, key, value, None if sink is None else sink.to(query.dtype), slopes, relative]
    batch, heads, sequence, _ = query.shape
    shape = (batch, sequence, heads, latent if value is None else value.shape[-1])
    return leave_placeholder(ATTENTION, inputs, attributes, query.dtype, shape)


def leave_placeholder(
    op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any], dtype: torch.dtype, shape: Any
) -> Tensor:
    """Leave the placeholder `op_type`. Returns its output, of this type and shape. Omits None at the end of inputs."""
    given = list(inputs)
    while given[-1] is None:
        given.pop()
    return torch.onnx.ops.symbolic(
        f"{PLACEHOLDER_DOMAIN}::{op_type}", given, attributes, dtype=dtype, shape=tuple(shape), version=1
    )


class MixerPlaceholders:
    """Leaves the placeholders of convolutions, histories and recurrences in one call of a model.

    The module's docstring has their formulas and shapes. The states of a layer are numbered from 0, recurrences apart
    from the others.

    cache: a `trace.TracedCache`, of which the attributes convolution and recurrence are read: placeholders belong to
        the layer that last requested a state from it.
    """

    _leave = staticmethod(leave_placeholder)

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._layer: int | None = None
        self._counts: dict[tuple[str, int], int] = {}

    def of_layer(self, layer: int) -> MixerPlaceholders:
        """The placeholders of this layer."""
        found = copy.copy(self)  # shares the counts
        found._layer = layer
        return found

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "") -> Tensor:
        return self._mark_state(CONVOLUTION, (x, weight, bias), x.dtype, x.shape, {"activation": activation})

    def history(self, x: Tensor, columns: int) -> Tensor:
        shape = (*x.shape[:2], columns + x.shape[2])
        return self._mark_state(HISTORY, (x,), x.dtype, shape, {"columns": columns})

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rule: str,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        batch, sequence, heads, size = v.shape
        shape = (batch, sequence, max(q.shape[2], heads), size)
        attributes = {"rule": rule, "scale": float(scale)}
        return self._mark_state(RECURRENCE, (q, k, v, decay, beta), v.dtype, shape, attributes)

    def _mark_state(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        dtype: torch.dtype,
        shape: Sequence[int],
        attributes: dict[str, Any],
    ) -> Tensor:
        """Leave a placeholder with the attributes layer and state besides `attributes`."""
        kind, layer = RECURRENCE if op_type == RECURRENCE else CONVOLUTION, self._layer
        if layer is None:
            pending = self._cache.convolution if kind == CONVOLUTION else self._cache.recurrence
            if pending is None:
                raise untraceable(f"a {op_type.lower()} requests no state from the cache, so its layer is unknown")
            layer = int(pending[0])
        state = self._counts.get((kind, layer), 0)
        self._counts[kind, layer] = state + 1
        return self._leave(op_type, inputs, {**attributes, "layer": layer, "state": state}, dtype, shape)


class LayerNumber:
    """A layer's number in a trace that stands for other layers too: the trace must not depend on it.

    It can be passed on and, by this package alone, converted by int(). All else that a model could do with a number
    raises TypeError.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number

    def __eq__(self, _other: object) -> bool:
        raise TypeError("the trace of a layer depends on its number")

    def __bool__(self) -> bool:
        raise TypeError("the trace of a layer depends on its number")
