"""The prefix objective of many rows at once, summed in the reference's order (docs/graph.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT
from topw_deploy.sampling.tensors.largest import Largest
from topw_deploy.sampling.tensors.rows import Rows


@dataclass(frozen=True)
class Scan:
    """The base scan over each row's tokens in pool order; all [B, n] but `K`.

    Weights are in units of the largest. log_p and p: -inf logits, which belong to no pool, have log_p = 0 and p = 0;
    real: which ones are not. Gamma, Phi: inclusive sums of p and lam p log p. J: the objective without geometry.
    K [B, 1]: the size of its first best prefix.
    """

    log_p: Tensor
    p: Tensor
    real: Tensor
    Gamma: Tensor
    Phi: Tensor
    J: Tensor
    K: Tensor


def base_scan(found: Largest, rows: Rows) -> Scan:
    """The objective with f = 0 over the prefixes of the logits found, in float64 (float32 on MPS)."""
    logits = found.logits.to(rows.lam.dtype)
    real = logits.isfinite()
    log_p = torch.where(real, (logits - logits[:, :1]) / rows.selection, 0.0)
    p = torch.where(real, log_p.clamp(min=SMALLEST_LOG_WEIGHT).exp(), 0.0)
    Gamma = p.cumsum(1)
    Phi = (p * (rows.lam * log_p)).cumsum(1)
    J = Phi / Gamma + rows.reward * Gamma.log()
    K = first_maximiser(J, rows.reward)
    return Scan(log_p, p, real, Gamma, Phi, J, torch.where(rows.greedy, 1, K))


def first_maximiser(J: Tensor, reward: Tensor) -> Tensor:
    """k* [B, 1], the first maximiser of J [B, n]; 1 where reward <= 0, whatever rounding says (singleton collapse)."""
    return torch.where(reward > 0, J.argmax(1, keepdim=True) + 1, 1)  # argmax answers the first one
