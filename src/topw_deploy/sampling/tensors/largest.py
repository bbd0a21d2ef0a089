"""The largest logits of each row by (logit descending, id ascending), without sorting the row.

No backend's topk promises an order among equals, so equal logits are told apart before it: logit and id are packed
into one integer, and no two integers of a row are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ID_BITS = 32
_LOWEST = (1 << _ID_BITS) - 1
_MAGNITUDE = 0x7FFFFFFF  # every bit of a float32 but its sign


@dataclass(frozen=True)
class Largest:
    """logits float32 [B, n], descending; ids int64 [B, n]; top [B, 1]: the row's largest, NaN if it holds a NaN."""

    logits: Tensor
    ids: Tensor
    top: Tensor


def largest_logits(logits: Tensor, count: int, block: int) -> Largest:
    """The `count` <= V largest logits of each row [B, V], float32.

    One pass takes the maxima of blocks of `block` neighbouring tokens; the `count` blocks that come first by (maximum
    descending, position ascending) hold all the tokens wanted. For a token outside them is behind `count` others: in
    each of them one is larger, or equal with a lower id. Tokens behind the last whole block are always looked at.
    """
    batch, vocab = logits.shape
    blocks = vocab // block
    if blocks <= count:
        return Largest(*_first(logits, None, count), logits.amax(1, keepdim=True))
    grid = logits[:, : blocks * block].unflatten(1, (blocks, block))
    maxima = grid.amax(2)  # [B, blocks]
    _, index = _first(maxima, None, count)
    searched = grid.gather(1, index[:, :, None].expand(-1, -1, block)).flatten(1)  # [B, count * block]
    ids = torch.add(index[:, :, None] * block, torch.arange(block, device=logits.device)).flatten(1)
    if blocks * block < vocab:
        rest = torch.arange(blocks * block, vocab, device=logits.device).expand(batch, -1)
        searched, ids = torch.cat([searched, logits[:, blocks * block :]], 1), torch.cat([ids, rest], 1)
        top = torch.maximum(maxima.amax(1, keepdim=True), logits[:, blocks * block :].amax(1, keepdim=True))
    else:
        top = maxima.amax(1, keepdim=True)
    return Largest(*_first(searched, ids, count), top)


def _first(values: Tensor, ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [B, count] of the first by (value descending, id ascending); ids None: their positions."""
    ids = torch.arange(values.shape[1], device=values.device) if ids is None else ids
    # As integers, float32 numbers keep their order once the magnitude of negative ones is inverted; + 0.0 makes -0 a 0.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    packed = (ordered.to(torch.int64) << _ID_BITS) | (_LOWEST - ids)
    keys = packed.topk(count, dim=1).values
    ordered = (keys >> _ID_BITS).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & _MAGNITUDE)
    return bits.view(torch.float32), _LOWEST - (keys & _LOWEST)
