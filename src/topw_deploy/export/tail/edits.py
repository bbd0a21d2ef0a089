"""Sparse edits of the logits (docs/contract/graph.md, section 6), and the shape that the search for candidates
wants.
"""

from __future__ import annotations

import numpy as np

from topw_deploy.export.tail.ops import Ops, Tensor, step

BLOCK = 128
"""Tokens per block of the candidate search: maxima of shorter blocks cost more, longer ones leave more to sort."""


def padded_width(vocab_size: int) -> int:
    """Columns of the padded logits: whole blocks, and at least one column behind the vocabulary."""
    return (vocab_size // BLOCK + 1) * BLOCK


@step
def apply_edits(op: Ops, logits: Tensor, ids: Tensor, penalty: Tensor, bias: Tensor, vocab_size: int) -> Tensor:
    """Edited logits, widened with -inf to whole blocks: float32 [batch, vocab] -> [batch, padded].

    ids int64 [batch, edits], distinct within a row where >= 0; penalty and bias float32 [batch, edits]; edits may be
    0. Token by token: l / penalty if l > 0 else l * penalty, then + bias. An id outside the vocabulary, -1 above all,
    has no effect: its edit lands in the column behind the vocabulary, where -inf stands and stays. A penalty that is
    not > 0 makes the logit NaN, and so the row invalid.

    Widening copies the logits; the scatter then works on the copy in place (onnxruntime), so edits cost no second one.
    """
    spare = op.constant(vocab_size, np.int64)
    nothing = op.constant(-np.inf)
    widths = op.constant([0, 0, 0, padded_width(vocab_size) - vocab_size], np.int64)
    wide = op.Pad(logits, widths, nothing)
    column = op.Min(op.Where(op.Less(ids, op.constant(0, np.int64)), spare, ids), spare)
    zero = op.constant(0.0)
    old = op.GatherElements(wide, column, axis=1)
    scaled = op.Where(op.Greater(old, zero), op.Div(old, penalty), op.Mul(old, penalty))
    new = op.Where(op.Greater(penalty, zero), op.Add(scaled, bias), op.constant(np.nan))
    return op.ScatterElements(wide, column, new, axis=1)


@step
def without_padding(op: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    """The vocabulary's columns of edited logits [batch, padded]: float32 [batch, vocab]."""
    start, end = op.constant([0], np.int64), op.constant([vocab_size], np.int64)
    return op.Slice(logits, start, end, op.constant([1], np.int64))
