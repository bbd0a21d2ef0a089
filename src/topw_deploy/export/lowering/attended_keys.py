"""Attention that GroupQueryAttention lacks, over the used slots of a static cache.

ALiBi, biases by distance and chunks become a bias of its scores; latent attention becomes products and a softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.layers import AttentionLayer
from topw_deploy.export.lowering.standard_attention import attend
from topw_deploy.export.lowering.states import StaticStates
from topw_deploy.export.lowering.visibility import Masks, Positions, lowest

LATENT_OPSET = 24  # the first with TensorScatter


class AttendedKeys:
    """Attention to the first `total` slots.

    total: int32 [1], on the host.
    """

    def __init__(self, editor: GraphEditor, cache: StaticStates, total: ir.Value) -> None:
        self._editor, self._cache, self._total = editor, cache, total
        self._positions = Positions(editor, self._both)
        self._biases: dict[tuple[ir.Value | None, int], ir.Value] = {}
        self._masks: Masks | None = None

    def bias(self, layer: AttentionLayer) -> ir.Value | None:
        """The bias of scores, [batch or 1, heads or 1, sequence, total], or None; the operator hides later tokens."""
        bias = self._positions.bias(layer)
        if not layer.chunk and (bias is None or layer.relative is not None):
            return bias
        key = (bias, layer.chunk)
        if key not in self._biases:
            self._biases[key] = self._chunked(layer, bias) if layer.chunk else self._in_every_row(bias)
        return self._biases[key]

    def attend(self, layer: AttentionLayer, tokens: Sequence[ir.Value]) -> None:
        """Replace the marker by products over the states `tokens`."""
        op, constant = self._editor.op, self._editor.constant
        if self._masks is None:
            queries, keys = self._positions.both()
            visible = op("LessOrEqual", [keys, queries], dtype=ir.DataType.BOOL)
            self._masks = Masks(self._editor, self._positions, visible)
        ends = [constant(np.array([0])), op("Cast", [self._total], to=ir.DataType.INT64), constant(np.array([2]))]
        used = [op("Slice", [state, *ends]) for state in tokens]
        attend(self._editor, layer, used, self._masks.of(layer))

    def _chunked(self, layer: AttentionLayer, bias: ir.Value | None) -> ir.Value:
        constant, dtype = self._editor.constant, layer.dtype
        (inside,) = self._positions.limits(replace(layer, window=0))  # the operator applies windows
        shown = constant(dtype.numpy().type(0)) if bias is None else bias
        return self._editor.op("Where", [inside, shown, constant(lowest(dtype))], dtype=dtype)

    def _in_every_row(self, bias: ir.Value | None) -> ir.Value:
        """Expand `bias` to all columns: the operator broadcasts batch and heads only."""
        ones, one = (self._editor.constant(np.ones(count, np.int64)) for count in (2, 1))
        rows = self._editor.op("Concat", [ones, self._cache.sequence, one], axis=0)
        return self._editor.op("Expand", [bias, rows])

    def _both(self) -> tuple[ir.Value, ir.Value]:
        op, constant = self._editor.op, self._editor.constant
        total = op("Squeeze", [op("Cast", [self._total], to=ir.DataType.INT64)])
        keys = op("Range", [constant(np.int64(0)), total, constant(np.int64(1))])
        return op("Unsqueeze", [self._cache.positions(), constant(np.array([1, 3]))]), keys


def lower_latent(editor: GraphEditor, layer: AttentionLayer, cache: StaticStates, keys: AttendedKeys) -> ir.Value:
    """Replace the marker of a latent layer. Returns its state after the call."""
    (state,) = layer.states
    present = editor.op("TensorScatter", [cache.past(state), layer.new_key, cache.write_indices], axis=2)
    keys.attend(layer, [present])
    cache.present(state, present)
    return present
