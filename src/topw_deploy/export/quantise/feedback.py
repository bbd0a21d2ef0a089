"""Round a weight so that its outputs change least, not the weight itself (GPTQ).

For the inputs x of a product, the error of its outputs is the sum of (e M) ** 2 with e = weight - rounded weight and
M M^T = sum(x^T x), the Gram matrix of the inputs. With an upper triangular M, column j of e M depends on the columns up
to j of e alone: so the columns are rounded one after the other, each with the target that cancels the errors before it.
This is the column order and the result of GPTQ (Frantar et al., 2022), by one Cholesky factorisation instead of an
inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from topw_deploy.export.quantise.rounding import Quantisation, search_blocks

DAMPING = 0.1
"""Added to the diagonal of a Gram matrix, relative to its mean: a few thousand tokens state the matrix inexactly."""
_COLUMNS = 64  # columns that are rounded between two products with those before them
_ROWS = 2048  # outputs that are rounded at a time
_LARGEST_VARIANCE = 10.0  # of an input, relative to the median, in that mean: some models have huge ones
_LEAST_IMPORTANCE = 1e-6  # of an input relative to the mean: those that the text never uses are rounded to nearest
_TINY = np.float32(np.finfo(np.float32).tiny)


def round_with_feedback(
    weight: np.ndarray, gram: np.ndarray, block_size: int, scheme: Quantisation, scale_type: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise `weight`, float32 [outputs, inputs], for inputs with this Gram matrix, float32 [inputs, inputs].

    Returns codes, scales and zero points as `search_blocks` does.
    """
    bits = scheme.bits
    variance = np.diagonal(gram)
    importance = variance / (variance.mean() + _TINY) + np.float32(_LEAST_IMPORTANCE)
    codes, scales, zeros = search_blocks(
        weight,
        block_size,
        bits,
        symmetric=scheme.symmetric,
        positive=scheme.positive,
        dtype=scale_type,
        importance=importance,
    )
    order = np.argsort(-variance, kind="stable")  # the inputs that matter most come first
    factors = torch.from_numpy(feedback_factors(gram[np.ix_(order, order)]))
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        targets, steps, middles = (
            torch.from_numpy(part.astype(np.float32, order="C"))
            for part in (weight[rows].T[order], scales[rows].T[order // block_size], zeros[rows].T[order // block_size])
        )
        found = _round_rows(targets, steps, middles, factors, bits)
        codes[rows, order] = found.numpy()
    return codes, scales, zeros


def feedback_factors(gram: np.ndarray) -> np.ndarray:
    """The factors C, float32 [inputs, inputs]: the target of input j is its weight plus the sum of C_ji e_i for i < j.

    More is added to the diagonal until the factorisation succeeds.
    """
    variance = np.diagonal(gram)
    used = variance[variance > 0]
    most = np.float32(_LARGEST_VARIANCE) * np.median(used) if len(used) else np.float32(0)
    damping = DAMPING
    while True:
        added = damping * np.minimum(variance, most).mean() + _TINY
        scale = 1 / np.sqrt(variance + added)
        normal = gram * scale[:, None] * scale
        np.fill_diagonal(normal, 1.0)
        # Of the reversed matrix, whose lower factor is the upper one reversed.
        lower, failed = torch.linalg.cholesky_ex(torch.from_numpy(np.ascontiguousarray(normal[::-1, ::-1])))
        if failed:
            damping *= 10
            continue
        upper = lower.numpy()[::-1, ::-1]
        factors = (upper / np.diagonal(upper) / scale[:, None] * scale).T
        return np.ascontiguousarray(factors, np.float32)


def _round_rows(weight: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, bits: int) -> Tensor:
    """The codes of the outputs `weight`, uint8 [outputs, inputs]. All arguments have inputs first, in one order."""
    inputs, outputs = weight.shape
    inverses = torch.where(scales != 0, 1 / scales, 0)
    codes, errors = torch.empty((inputs, outputs), dtype=torch.uint8), torch.empty_like(weight)
    for start in range(0, inputs, _COLUMNS):
        stop = min(start + _COLUMNS, inputs)
        targets = torch.addmm(weight[start:stop], factors[start:stop, :start], errors[:start])
        for column in range(start, stop):
            target = targets[column - start]
            target.addmv_(errors[start:column].T, factors[column, start:column])
            target.mul_(inverses[column]).add_(zeros[column]).round_().clamp_(0, (1 << bits) - 1)
            codes[column] = target
            torch.sub(weight[column], target.sub_(zeros[column]).mul_(scales[column]), out=errors[column])
    return codes.T
