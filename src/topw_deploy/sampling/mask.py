"""Packed masks of allowed tokens (docs/contract/graph.md, section 6).

Bit `id % 32` of word `id // 32`, the least significant first, is 1 if the token is allowed: the layout of llguidance,
xgrammar and vLLM.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError

WORD_BITS = 32
ALL_ALLOWED = np.int32(-1)  # every bit set
_LITTLE_ENDIAN = np.dtype("<i4")


def mask_words(vocab: int) -> int:
    """The number of words in one row's mask: ceil(vocab / 32)."""
    return -(-vocab // WORD_BITS)


def pack_mask(allowed: ArrayLike) -> NDArray[np.int32]:
    """Pack flags bool [..., V] into words int32 [..., ceil(V / 32)]; the bits beyond V are 0.

    Raises ParameterError for another type or for a scalar.
    """
    flags = np.asarray(allowed)
    if flags.dtype != np.bool_ or flags.ndim == 0:
        raise ParameterError(f"the mask is {flags.dtype} {list(flags.shape)}, but must be bool [..., vocab].")
    vocab = flags.shape[-1]
    octets = np.zeros((*flags.shape[:-1], mask_words(vocab) * 4), np.uint8)
    octets[..., : -(-vocab // 8)] = np.packbits(flags, axis=-1, bitorder="little")
    return octets.view(_LITTLE_ENDIAN).astype(np.int32, copy=False)


def unpack_mask(words: ArrayLike, vocab: int) -> NDArray[np.bool_]:
    """Unpack words int32 [..., ceil(V / 32)] into flags bool [..., vocab].

    Raises ParameterError for another type or width.
    """
    given = np.asarray(words)
    if given.dtype != np.int32 or given.ndim == 0 or given.shape[-1] != mask_words(vocab):
        raise ParameterError(
            f"the mask is {given.dtype} {list(given.shape)}, but must be int32 [..., {mask_words(vocab)}] for "
            f"{vocab} tokens."
        )
    octets = np.ascontiguousarray(given, _LITTLE_ENDIAN).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab, bitorder="little").view(np.bool_)


def apply_mask(logits: ArrayLike, words: ArrayLike) -> NDArray[np.float32]:
    """Set the logits [..., V] of tokens that `words` [..., ceil(V / 32)] does not allow to -inf. Returns float32.

    Raises the errors of `unpack_mask`.
    """
    row = np.asarray(logits, dtype=np.float32)
    return np.where(unpack_mask(words, row.shape[-1]), row, np.float32(-np.inf))
