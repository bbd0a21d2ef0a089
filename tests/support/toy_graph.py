"""The graph of toy_model.py, in each cache form of the runtime:

    concat    Concat
    scatter   static: TensorScatter, for ragged chunks; masked values are multiplied by zero
    grouped   static: GroupQueryAttention; after a prefill, one token per row or several for a single row
    shared    GroupQueryAttention with attention_mask, as in onnxruntime-genai's graphs

GroupQueryAttention only stores the cache: heads are zero-padded, the output unused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor

FORMS = ("concat", "scatter", "grouped", "shared")
OPSETS = {"concat": 21, "scatter": 24, "grouped": 21, "shared": 21}  # TensorScatter needs 24
HEAD_DIMS = {"concat": (4, 3), "scatter": (4, 3), "grouped": (8, 16), "shared": (8, 16)}
"""Of layer 0, with the features, and of layer 1, with their first three columns."""

_FLOAT, _INT32 = ir.DataType.FLOAT, ir.DataType.INT32
_IDS: dict[str, list[str | int]] = {"input_ids": ["batch", "sequence"]}
_MASK: dict[str, list[str | int]] = {**_IDS, "attention_mask": ["batch", "total"]}
_LENGTHS: dict[str, list[str | int]] = {**_IDS, "write_indices": ["batch"], "row_lengths": ["batch"]}
_INPUTS: dict[str, dict[str, list[str | int]]] = {
    "concat": {**_MASK, "position_ids": ["batch", "sequence"]},
    "scatter": _LENGTHS,
    "grouped": {**_LENGTHS, "total_sequence_length": [1]},
    "shared": _MASK,
}


def decoder_graph(
    numbers: Mapping[str, np.ndarray], form: str, max_length: int | None = None
) -> tuple[ir.Graph, ir.Value]:
    """A graph whose outputs are the caches, and its logits, float32 [B, V].

    numbers: from `Toy.numbers`.
    max_length: of a static cache.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSETS[form], "com.microsoft": 1}, name="toy")
    editor = GraphEditor(graph, "toy")
    op = editor.op
    given = {
        name: editor.input(name, _INT32 if name == "total_sequence_length" else ir.DataType.INT64, shape)
        for name, shape in _INPUTS[form].items()
    }
    table = {name: editor.constant(array, name) for name, array in numbers.items()}
    ids = given["input_ids"]
    slots = max_length or "max_length"
    past_length, length = ("past", "total") if form == "concat" else (slots, slots)
    sizes = HEAD_DIMS[form]
    pasts = [
        [editor.input(f"past_key_values.{layer}.{part}", _FLOAT, ["batch", 1, past_length, size]) for part in _PARTS]
        for layer, size in enumerate(sizes)
    ]
    if form in ("scatter", "grouped"):
        filled = op("Add", [given["write_indices"], given["row_lengths"]])
        last_of_run = op("Unsqueeze", [op("Sub", [given["row_lengths"], 1]), [1]])
        last_id = op("GatherND", [ids, last_of_run], batch_dims=1)
    else:
        filled = op("ReduceSum", [given["attention_mask"], [1]], keepdims=0)
        last_id = _last_column(editor, ids)
    if form == "concat":
        last_place = _last_column(editor, given["position_ids"])
        counts = op("Unsqueeze", [given["attention_mask"], [1, 3]])  # [B, 1, T, 1]
    else:
        last_place = op("Sub", [filled, 1])
        columns = op("Range", [0, op("Squeeze", [op("Shape", [pasts[0][0]], start=2, end=3)]), 1])
        counts = op("Unsqueeze", [op("Less", [columns, op("Unsqueeze", [filled, [1]])]), [1, 3]])  # [B, 1, L, 1]
    if form == "shared":
        width = op("Squeeze", [op("Shape", [given["attention_mask"]], start=1, end=2)])
        given["total_sequence_length"] = op("Cast", [width], to=_INT32)

    features = op("Unsqueeze", [op("Gather", [table["features"], ids]), [1]])  # [B, 1, S, 4]
    for layer, (past, size) in enumerate(zip(pasts, sizes, strict=True)):
        new = op("Slice", [features, [0], [4 - layer], [3]])
        new = op("Pad", [new, [0] * 7 + [size - 4 + layer]])
        if form == "concat":
            presents = [op("Concat", [each, new], axis=2) for each in past]
        elif form == "scatter":
            presents = [op("TensorScatter", [each, new, given["write_indices"]], axis=2) for each in past]
        else:
            flat = op("Squeeze", [new, [1]])  # [B, S, size]
            lengths = [op("Cast", [last_place], to=_INT32), given["total_sequence_length"]]
            _, *presents = editor.outputs(
                "GroupQueryAttention", [flat, flat, flat, *past, *lengths], 3,
                domain="com.microsoft", num_heads=1, kv_num_heads=1,
            )  # fmt: skip
        for present, part in zip(presents, _PARTS, strict=True):
            present.name, present.type = f"present.{layer}.{part}", ir.TensorType(_FLOAT)
            present.shape = ir.Shape(["batch", 1, length, size])
            graph.outputs.append(present)

    # Layer 1's values hold three columns of the history, layer 0's keys the fourth.
    keys, values = graph.outputs[0], graph.outputs[3]
    cached = op("Concat", [op("Slice", [values, [0], [3], [3]]), op("Slice", [keys, [3], [4], [3]])], axis=3)
    if form in ("concat", "scatter"):
        seen = op("Mul", [cached, op("Cast", [counts], to=_FLOAT)])
    else:  # unused columns are arbitrary
        seen = op("Where", [counts, cached, np.float32(0)])
    history = op("MatMul", [op("ReduceSum", [seen, [1, 2]], keepdims=0), table["mix"]])
    direct = op("Add", [op("Gather", [table["follow"], last_id]), op("Gather", [table["place"], last_place])])
    whole, shape = op("Add", [direct, history]), ("batch", len(numbers["follow"]))
    return graph, op("Mul", [whole, table["factor"]], name="logits", dtype=_FLOAT, shape=shape)


_PARTS = ("key", "value")


def _last_column(editor: GraphEditor, value: ir.Value) -> ir.Value:
    return editor.op("Squeeze", [editor.op("Gather", [value, [-1]], axis=1), [1]])
