"""The graph of toy_model.py, in each cache form of the runtime:

    concat    Concat
    scatter   static: TensorScatter, for ragged chunks; masked values are multiplied by zero
    grouped   static: GroupQueryAttention; after a prefill, one token per row or several for a single row
    shared    GroupQueryAttention with attention_mask, as in onnxruntime-genai's graphs

GroupQueryAttention only stores the cache: heads are zero-padded, the output unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FORMS = ("concat", "scatter", "grouped", "shared")
OPSETS = {"concat": 21, "scatter": 24, "grouped": 21, "shared": 21}  # TensorScatter needs 24
HEAD_DIMS = {"concat": (4, 3), "scatter": (4, 3), "grouped": (8, 16), "shared": (8, 16)}
"""Of layer 0, with the features, and of layer 1, with their first three columns."""

_make = helper.make_node
_InputShapes = list[tuple[str, list[str | int | None]]]
_MASK_INPUTS: _InputShapes = [("input_ids", ["batch", "sequence"]), ("attention_mask", ["batch", "total"])]
_LENGTH_INPUTS: _InputShapes = [
    ("input_ids", ["batch", "sequence"]),
    ("write_indices", ["batch"]),
    ("row_lengths", ["batch"]),
]
_INPUTS: dict[str, _InputShapes] = {
    "concat": [*_MASK_INPUTS, ("position_ids", ["batch", "sequence"])],
    "scatter": _LENGTH_INPUTS,
    "grouped": [*_LENGTH_INPUTS, ("total_sequence_length", [1])],
    "shared": _MASK_INPUTS,
}


def decoder_graph(
    numbers: Mapping[str, np.ndarray], form: str, max_length: int | None = None
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], list[onnx.ValueInfoProto], list[onnx.TensorProto]]:
    """Nodes, inputs, outputs and constants that compute `logits` [B, V].

    numbers: from `Toy.numbers`.
    max_length: of a static cache.
    """
    widths = HEAD_DIMS[form]
    tables = {
        **numbers,
        "nothing": np.float32(0),
        "head_axis": np.array([1], np.int64),
        "mask_axes": np.array([1, 3], np.int64),
        "sum_axes": np.array([1, 2], np.int64),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "last_column": np.array([-1], np.int64),
        "first": np.array([0], np.int64),
        "three": np.array([3], np.int64),
        "four": np.array([4], np.int64),
        "feature_axis": np.array([3], np.int64),
        "widen_0": np.array([widths[0] - 4], np.int64),
        "widen_1": np.array([widths[1] - 3], np.int64),
        "no_pads": np.zeros(7, np.int64),
    }
    inputs = [helper.make_tensor_value_info(name, _type_of(name), shape) for name, shape in _INPUTS[form]]
    outputs: list[onnx.ValueInfoProto] = []
    nodes = [*_features(), *_PLACES[form]()]
    slots: int | str = max_length or "max_length"
    lengths: tuple[int | str, int | str] = ("past", "total") if form == "concat" else (slots, slots)
    for layer, size in enumerate(widths):
        pasts, presents = ([f"{side}.{layer}.{part}" for part in ("key", "value")] for side in _SIDES)
        for names, into, length in ((pasts, inputs, lengths[0]), (presents, outputs, lengths[1])):
            shape: list[str | int | None] = ["batch", 1, length, size]
            into += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
        nodes += _keep(form, layer, pasts, presents)
    nodes += _logits(form)
    return nodes, inputs, outputs, [numpy_helper.from_array(np.asarray(value), name) for name, value in tables.items()]


def _type_of(name: str) -> int:
    return TensorProto.INT32 if name == "total_sequence_length" else TensorProto.INT64


_SIDES = ("past_key_values", "present")


def _features() -> list[onnx.NodeProto]:
    return [
        _make("Gather", ["features", "input_ids"], ["gathered_features"]),
        _make("Unsqueeze", ["gathered_features", "head_axis"], ["narrow_0"]),  # [B, 1, S, 4]
        _make("Slice", ["narrow_0", "first", "three", "feature_axis"], ["narrow_1"]),  # [B, 1, S, 3]
        *(
            node
            for layer in (0, 1)
            for node in (
                _make("Concat", ["no_pads", f"widen_{layer}"], [f"pads_{layer}"], axis=0),
                _make("Pad", [f"narrow_{layer}", f"pads_{layer}"], [f"new_{layer}"]),
            )
        ),
    ]


def _keep(form: str, layer: int, pasts: list[str], presents: list[str]) -> list[onnx.NodeProto]:
    new, flat = f"new_{layer}", f"flat_{layer}"
    pairs = list(zip(pasts, presents, strict=True))
    if form == "concat":
        return [_make("Concat", [past, new], [present], axis=2) for past, present in pairs]
    if form == "scatter":
        return [_make("TensorScatter", [past, new, "write_indices"], [present], axis=2) for past, present in pairs]
    return [
        _make("Squeeze", [new, "head_axis"], [flat]),  # [B, S, size]
        _make(
            "GroupQueryAttention",
            [flat, flat, flat, *pasts, "seqlens_k", "total_sequence_length"],
            [f"attended_{layer}", *presents],
            domain="com.microsoft",
            num_heads=1,
            kv_num_heads=1,
        ),
    ]


def _logits(form: str) -> list[onnx.NodeProto]:
    """Layer 1's values hold three columns of the history, layer 0's keys the fourth."""
    if form in ("concat", "scatter"):
        masked = _make("Mul", ["cached", "mask"], ["seen"])
    else:  # unused columns are arbitrary
        masked = _make("Where", ["counts_4d", "cached", "nothing"], ["seen"])
    return [
        _make("Slice", ["present.1.value", "first", "three", "feature_axis"], ["three_columns"]),
        _make("Slice", ["present.0.key", "three", "four", "feature_axis"], ["fourth"]),
        _make("Concat", ["three_columns", "fourth"], ["cached"], axis=3),
        masked,
        _make("ReduceSum", ["seen", "sum_axes"], ["total"], keepdims=0),  # [B, 4]
        _make("MatMul", ["total", "mix"], ["history"]),
        _make("Gather", ["follow", "last_id"], ["followers"]),
        _make("Gather", ["place", "last_place"], ["placed"]),
        _make("Add", ["followers", "placed"], ["direct"]),
        _make("Add", ["direct", "history"], ["whole"]),
        _make("Mul", ["whole", "factor"], ["logits"]),
    ]


def _concat_places() -> list[onnx.NodeProto]:
    """`last_id` and `last_place` [B], and `mask` [B, 1, T, 1]."""
    return [
        _make("Cast", ["attention_mask"], ["mask_float"], to=TensorProto.FLOAT),
        _make("Unsqueeze", ["mask_float", "mask_axes"], ["mask"]),
        *_last_column("input_ids", "last_id"),
        *_last_column("position_ids", "last_place"),
    ]


def _static_places() -> list[onnx.NodeProto]:
    return [
        _make("Add", ["write_indices", "row_lengths"], ["filled"]),
        _make("Sub", ["row_lengths", "one"], ["last_of_run"]),
        _make("Unsqueeze", ["last_of_run", "head_axis"], ["last_index"]),
        _make("GatherND", ["input_ids", "last_index"], ["last_id"], batch_dims=1),
        *_filled_places(),
    ]


def _shared_places() -> list[onnx.NodeProto]:
    return [
        _make("ReduceSum", ["attention_mask", "head_axis"], ["filled"], keepdims=0),
        *_last_column("input_ids", "last_id"),
        _make("Shape", ["attention_mask"], ["mask_width"], start=1, end=2),
        _make("Squeeze", ["mask_width"], ["total_length"]),
        _make("Cast", ["total_length"], ["total_sequence_length"], to=TensorProto.INT32),
        *_filled_places(),
    ]


def _filled_places() -> list[onnx.NodeProto]:
    """From row lengths `filled` [B]."""
    return [
        _make("Sub", ["filled", "one"], ["last_place"]),
        _make("Cast", ["last_place"], ["seqlens_k"], to=TensorProto.INT32),
        _make("Shape", ["past_key_values.0.key"], ["buffer_shape"], start=2, end=3),
        _make("Squeeze", ["buffer_shape"], ["buffer_length"]),
        _make("Range", ["zero", "buffer_length", "one"], ["columns"]),
        _make("Unsqueeze", ["filled", "head_axis"], ["filled_column"]),
        _make("Less", ["columns", "filled_column"], ["counts"]),  # [B, L]
        _make("Unsqueeze", ["counts", "mask_axes"], ["counts_4d"]),
        _make("Cast", ["counts_4d"], ["mask"], to=TensorProto.FLOAT),
    ]


def _last_column(name: str, result: str) -> list[onnx.NodeProto]:
    return [
        _make("Gather", [name, "last_column"], [f"{result}_column"], axis=1),
        _make("Squeeze", [f"{result}_column", "head_axis"], [result]),
    ]


_PLACES: dict[str, Callable[[], list[onnx.NodeProto]]] = {
    "concat": _concat_places,
    "scatter": _static_places,
    "grouped": _static_places,
    "shared": _shared_places,
}
