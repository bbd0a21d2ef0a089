"""The prefix objective of many rows at once, summed in the reference's order (docs/contract/graph.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT
from topw_deploy.sampling.torch.largest import Largest
from topw_deploy.sampling.torch.rows import Rows


@dataclass(frozen=True)
class Scan:
    """The base scan over each row's tokens in pool order; all [B, n] but `K`.

    Weights are in units of the largest. banned: the -inf logits, which belong to no pool, with log_p = 0 and p = 0.
    Gamma, Phi: inclusive sums of p and lam p log p. J: the objective without geometry. K [B, 1]: the size of its
    first best prefix, 1 for greedy rows and for beta <= lam, whatever rounding says (singleton collapse).
    """

    log_p: Tensor
    p: Tensor
    banned: Tensor
    Gamma: Tensor
    Phi: Tensor
    J: Tensor
    K: Tensor


def base_scan(found: Largest, rows: Rows) -> Scan:
    """The objective with f = 0 over the prefixes of the logits found, in float64 (float32 on MPS)."""
    logits = found.logits.to(rows.lam.dtype)
    banned = logits == -torch.inf
    log_p = ((logits - logits[:, :1]) / rows.selection).masked_fill_(banned, 0.0)
    p = log_p.clamp(min=SMALLEST_LOG_WEIGHT).exp_().masked_fill_(banned, 0.0)
    Gamma = p.cumsum(1)
    Phi = (rows.lam * log_p).mul_(p).cumsum(1)
    J = (Phi / Gamma).add_(rows.reward * Gamma.log())
    K = J.argmax(1, keepdim=True) * rows.scanned + 1  # argmax answers the first maximiser
    return Scan(log_p, p, banned, Gamma, Phi, J, K)
