"""Stage B: the pool itself, its warm start and the certificate, and no distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.torch.largest import Largest, largest_logits
from topw_deploy.sampling.torch.rows import Rows
from topw_deploy.sampling.torch.scan import Scan, base_scan

_BLOCK = 8


@dataclass(frozen=True)
class Pool:
    """found: the pool in its order, -inf logits last; size, k0, K [B, 1]: how many tokens it has, the warm start has,
    and the best prefix without geometry; certified [B, 1]."""

    found: Largest
    scan: Scan
    size: Tensor
    k0: Tensor
    certified: Tensor


def take_pool(logits: Tensor, rows: Rows, top_m: int) -> Pool:
    """The pools of valid rows [B, V]."""
    found = largest_logits(logits, min(top_m, logits.shape[1]), _BLOCK)
    scan = base_scan(found, rows)
    size = (~scan.banned).sum(1, keepdim=True)
    reached = rows.init_top_p * scan.Gamma[:, -1:] <= scan.Gamma
    k0 = torch.where(rows.init_top_p < 1, reached.int().argmax(1, keepdim=True) + 1, size)
    return Pool(found, scan, size, k0, rows.greedy | ((rows.geom_scale >= 0) & (k0 >= scan.K)))
