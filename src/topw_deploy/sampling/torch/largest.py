"""The largest logits of each row by (logit descending, id ascending), without sorting the row.

torch.topk leaves the order of ties undefined. Where that order matters, logit and position form one integer key that
is unique in the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_POSITION_BITS = 32
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 except the sign


@dataclass(frozen=True)
class Largest:
    """The largest logits of each row.

    logits: float32 [B, n], descending.
    ids: int64 [B, n].
    top: [B, 1], the row's largest; NaN if it holds a NaN.
    """

    logits: Tensor
    ids: Tensor
    top: Tensor


def largest_logits(logits: Tensor, count: int, block: int, *, any_last: bool = False) -> Largest:
    """The `count` <= V largest logits of each row [B, V], float32.

    Computes the maxima of blocks of `block` neighbouring tokens, then searches `count` blocks and any last, partial
    block. The first `count` blocks by (maximum descending, position ascending) contain the result, because each of them
    has a token that precedes all tokens of the other blocks.

    any_last: leave the choice among ties with the last token undefined, at half the cost. The tokens above the last one
        stay exact, because no block outside the search has a larger maximum than a block inside.
    """
    first = _first_by_value if any_last else _first_by_key
    vocab = logits.shape[1]
    blocks = vocab // block
    if blocks <= count:
        values, ids = first(logits, count)
        return Largest(values, ids, logits.amax(1, keepdim=True))
    grid = logits[:, : blocks * block].unflatten(1, (blocks, block))
    maxima = grid.amax(2)  # [B, blocks]
    top = maxima.amax(1, keepdim=True)
    chosen = maxima.topk(count, dim=1, sorted=False).indices if any_last else _first_by_key(maxima, count)[1]
    chosen = chosen.sort(1).values  # restores id order
    searched = grid.gather(1, chosen[:, :, None].expand(-1, -1, block)).flatten(1)  # [B, count * block]
    if blocks * block < vocab:
        rest = logits[:, blocks * block :]
        searched = torch.cat([searched, rest], 1)
        top = torch.maximum(top, rest.amax(1, keepdim=True))
        chosen = torch.nn.functional.pad(chosen, (0, 1), value=blocks)
    values, place = first(searched, count)
    whole = place // block
    return Largest(values, (chosen.gather(1, whole) - whole).mul_(block).add_(place), top)


def _first_by_value(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`_first_by_key`, except that ties with the last value are chosen at will."""
    found = values.topk(count, dim=1, sorted=False)
    place, order = found.indices.sort(1)
    ordered, order = torch.sort(found.values.gather(1, order), dim=1, descending=True, stable=True)
    return ordered, place.gather(1, order)


def _first_by_key(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and positions [B, count], by (value descending, position ascending)."""
    return _decode_keys(_sort_keys(values).topk(count, dim=1).values, values.shape[1])


def _sort_keys(values: Tensor) -> Tensor:
    """Unique int64 keys [B, n] whose descending order is (value descending, position ascending)."""
    # float32 bits sort as integers once the magnitudes of negative numbers are inverted. Adding 0.0 turns -0 into 0.
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & _MAGNITUDE)).to(torch.int64)
    return (ordered << _POSITION_BITS) | torch.arange(values.shape[1] - 1, -1, -1, device=values.device)


def _decode_keys(keys: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Values and positions of `_sort_keys` of rows with `length` values."""
    ordered = (keys >> _POSITION_BITS).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & _MAGNITUDE)
    return bits.view(torch.float32), (length - 1) - (keys & ((1 << _POSITION_BITS) - 1))
