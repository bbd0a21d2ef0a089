"""Logit edits: penalties, biases and bans, before anything else sees the row (docs/contract/graph.md, section 6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError

PADDING = -1  # an edit id without effect: rows of a batch have different numbers of edits


def apply_edits(logits: ArrayLike, ids: ArrayLike, penalty: ArrayLike, bias: ArrayLike) -> NDArray[np.float32]:
    """One row of logits [V] with its edits applied, in float32 and in the graph's order of operations.

    ids: [N] int64, distinct token ids, -1 = padding. penalty: [N] > 0; l becomes l / penalty if l > 0, else
    l * penalty (Keskar et al. 2019, as transformers applies it); 1 = none. bias: [N], added afterwards; -inf bans.
    Returns float32 [V], a new array; a penalty that is not > 0 makes its logit NaN, and so the row invalid.
    Raises ParameterError for an id that is no token or comes twice.
    """
    edited = np.array(logits, dtype=np.float32)
    i = np.asarray(ids, dtype=np.int64)
    divide = np.asarray(penalty, dtype=np.float32)
    add = np.asarray(bias, dtype=np.float32)
    _check(i, divide, add, len(edited))
    divide = np.where(divide > 0, divide, np.float32(np.nan))
    real = i != PADDING
    i, divide, add = i[real], divide[real], add[real]
    with np.errstate(invalid="ignore", over="ignore"):  # what becomes NaN or infinite makes the row invalid, later
        old = edited[i]
        edited[i] = np.where(old > 0, old / divide, old * divide) + add
    return edited


def _check(ids: NDArray[np.int64], penalty: NDArray[np.float32], bias: NDArray[np.float32], vocab: int) -> None:
    if not ids.ndim == penalty.ndim == bias.ndim == 1 or not len(ids) == len(penalty) == len(bias):
        raise ParameterError(f"edits have shapes {ids.shape}, {penalty.shape}, {bias.shape}, but must be [N] each.")
    outside = ids[(ids < PADDING) | (ids >= vocab)]
    if len(outside):
        raise ParameterError(f"edit id {outside[0]} is no token: must be in 0..{vocab - 1}, or -1 for padding.")
    real = ids[ids != PADDING]
    if len(np.unique(real)) < len(real):
        raise ParameterError("a token is edited twice in one row; combine its edits into one.")
