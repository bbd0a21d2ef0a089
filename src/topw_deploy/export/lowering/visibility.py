"""Masks and score biases from positions: windows, chunks, ALiBi and biases by distance."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, fixed_size
from topw_deploy.export.lowering.layers import AttentionLayer


class Positions:
    """Positions of queries, int64 [batch, 1, sequence, 1], and of keys, int64 [..., tokens]; made when first needed."""

    def __init__(self, editor: GraphEditor, make: Callable[[], tuple[ir.Value, ir.Value]]) -> None:
        self._editor = editor
        self._make = make
        self._made: tuple[ir.Value, ir.Value] | None = None
        self._distance: ir.Value | None = None
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._places: dict[tuple[int, int], ir.Value] = {}

    def both(self) -> tuple[ir.Value, ir.Value]:
        """Positions of queries and keys."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def limits(self, layer: AttentionLayer) -> list[ir.Value]:
        """bool, True for keys inside the layer's window and in the query's chunk."""
        op, constant = self._editor.op, self._editor.constant
        limits = []
        if layer.window:
            queries, keys = self.both()
            start = op("Sub", [queries, constant(np.int64(layer.window))])
            limits.append(op("Greater", [keys, start]))
        if layer.chunk:
            queries, keys = self.both()
            start = op("Sub", [queries, op("Mod", [queries, constant(np.int64(layer.chunk))])])
            limits.append(op("GreaterOrEqual", [keys, start]))
        return limits

    def ends(self, layer: AttentionLayer) -> ir.Value:
        """bool, True for keys at the end of a block of `stride` tokens."""
        op, constant = self._editor.op, self._editor.constant
        _, keys = self.both()
        number = op("Mod", [op("Add", [keys, constant(np.int64(1))]), constant(np.int64(layer.stride))])
        return op("Equal", [number, constant(np.int64(0))])

    def bias(self, layer: AttentionLayer) -> ir.Value | None:
        """The bias of scores in the query's type, [batch or 1, heads, sequence or 1, tokens], or None."""
        if layer.relative is not None:
            return self._by_distance(layer, layer.relative)
        return None if layer.slopes is None else self._alibi(layer, layer.slopes)

    def _by_distance(self, layer: AttentionLayer, relative: ir.Value) -> ir.Value:
        op, constant = self._editor.op, self._editor.constant
        extent = fixed_size(relative, 3)
        key = (layer.heads, extent)
        if key not in self._places:
            queries, keys = self.both()
            distance = op("Max", [op("Sub", [queries, keys]), constant(np.int64(0))])
            # Half of int64's memory, for each head.
            place = op("Cast", [op("Min", [distance, constant(np.int64(extent - 1))])], to=ir.DataType.INT32)
            self._places[key] = op("Expand", [place, constant(np.array([1, layer.heads, 1, 1]))])
        bias = op("GatherElements", [relative, self._places[key]], axis=3, dtype=relative.dtype)
        return self._cast(bias, layer.dtype)

    def _alibi(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        rounded = slopes.dtype == ir.DataType.BFLOAT16
        key = (_identity(slopes), layer.dtype, layer.scale if rounded else None)
        if key not in self._biases:
            bias = self._rounded_alibi(layer, slopes) if rounded else self._exact_alibi(layer, slopes)
            self._biases[key] = self._cast(bias, layer.dtype)
        return self._biases[key]

    def _exact_alibi(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        op, constant = self._editor.op, self._editor.constant
        if self._distance is None:
            queries, keys = self.both()
            self._distance = self._cast(op("Sub", [keys, queries]), ir.DataType.FLOAT)
        slopes = op("Reshape", [slopes, constant(np.array([1, layer.heads, 1, 1]))])
        return op("Mul", [self._distance, slopes])

    def _rounded_alibi(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        """Falcon's bias: slopes, the keys' positions and their products in bfloat16, then scaled as the scores are."""
        op, constant = self._editor.op, self._editor.constant
        _, keys = self.both()
        slopes = self._cast(slopes, ir.DataType.FLOAT)
        slopes = op("Reshape", [slopes, constant(np.array([1, layer.heads, 1, 1]))])
        product = op("Mul", [self._rounded(self._cast(keys, ir.DataType.FLOAT)), slopes])
        return op("Mul", [self._rounded(product), constant(np.float32(layer.scale))])

    def _rounded(self, value: ir.Value) -> ir.Value:
        return self._cast(self._cast(value, ir.DataType.BFLOAT16), ir.DataType.FLOAT)

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self._editor.op("Cast", [value], to=dtype, dtype=dtype)


class Masks:
    """Which keys each layer's queries see, for attention in standard operators.

    visible: bool, True for keys up to the query.
    own: bool, True for keys that are always visible, so that no row of a softmax is empty; None if there are none.
    """

    def __init__(
        self, editor: GraphEditor, positions: Positions, visible: ir.Value, own: ir.Value | None = None
    ) -> None:
        self._editor, self._positions = editor, positions
        self._visible, self._own = visible, own
        self._masks: dict[tuple[int, int, int], ir.Value] = {}
        self._biased: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def of(self, layer: AttentionLayer) -> ir.Value:
        """The layer's mask: bool, True for visible, or with a bias its type. Broadcasts to all heads."""
        mask = self._mask(layer)
        bias = self._positions.bias(layer)
        if bias is None:
            return mask
        if (mask, bias) not in self._biased:
            hidden = self._editor.constant(lowest(layer.dtype))
            self._biased[mask, bias] = self._editor.op("Where", [mask, bias, hidden], dtype=bias.dtype)
        return self._biased[mask, bias]

    def _mask(self, layer: AttentionLayer) -> ir.Value:
        key = (layer.window, layer.chunk, layer.stride)
        if key not in self._masks:
            mask = self._visible
            for limit in self._positions.limits(layer):
                mask = self._editor.op("And", [mask, limit], dtype=ir.DataType.BOOL)
            if self._own is not None:
                mask = self._editor.op("Or", [mask, self._own], dtype=ir.DataType.BOOL)
            self._masks[key] = self._with_blocks(layer, mask) if layer.stride else mask
        return self._masks[key]

    def _with_blocks(self, layer: AttentionLayer, mask: ir.Value) -> ir.Value:
        """`mask` with a second column per token, of the block that ends there: [batch, 1, sequence, 2 * tokens]."""
        op, last = self._editor.op, self._editor.constant(np.array([-1]))
        blocks = op("And", [self._visible, self._positions.ends(layer)])
        pairs = op("Concat", [op("Unsqueeze", [each, last]) for each in (mask, blocks)], axis=-1)
        shape = self._editor.constant(np.array([0, 0, 0, -1]))
        return op("Reshape", [pairs, shape], dtype=ir.DataType.BOOL)


def lowest(dtype: ir.DataType) -> np.generic:
    """The lowest finite number of `dtype`: with -inf, a row whose keys are all hidden would become NaN."""
    number = dtype.numpy().type
    found: np.generic = number(ml_dtypes.finfo(number).min)
    return found


def _identity(value: ir.Value) -> object:
    """Equal for equal constants."""
    tensor = ir.convenience.get_const_tensor(value)
    return value if tensor is None else (tensor.dtype, tensor.tobytes())
