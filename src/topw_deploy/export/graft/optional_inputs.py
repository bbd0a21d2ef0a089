"""Sampler inputs that a tool may leave out which has never heard of them.

onnxruntime wants every graph input fed, except those that are initializers too: such a default counts where nobody
gives a value. So the maker's own tools run a grafted decoder as they ran it before, and do not see what the sampler
says.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.sampling.parameters import TopWParameters

_EMPTY = {"edit_ids": np.int64, "edit_penalty": np.float32, "edit_bias": np.float32}


def with_defaults(editor: GraphEditor, inputs: list[ir.Value], logits: ir.Value) -> list[ir.Value]:
    """Give each of the sampler's graph `inputs` a default; returns what the sampler is to read in their place.

    The default is one row without edits, greedy, which costs least; it stands for every row of `logits` [batch, vocab].
    """
    rows = editor.op("Shape", [logits], start=0, end=1)
    rows_and_one = editor.op("Concat", [rows, editor.constant(np.array([1]))], axis=0)
    read = []
    for value in inputs:
        name = value.name or ""
        value.const_value = ir.tensor(_default(name), name=name)
        editor.graph.register_initializer(value)
        shape = rows_and_one if name in _EMPTY else rows
        read.append(editor.op("Expand", [value, shape], dtype=value.dtype, shape=list(value.shape or ())))
    return read


def _default(name: str) -> np.ndarray:
    if name in _EMPTY:
        return np.zeros((1, 0), _EMPTY[name])
    greedy = TopWParameters(temperature=0.0)
    return np.array([getattr(greedy, name, 0.0)], np.float32)  # uniform is no parameter: 0
