"""Certify rows without computing a distance: by a few candidates (stage A), or by the whole pool (stage B).

Both stages compute the objective without geometry over a prefix of the tokens (docs/contract/theory.md, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT
from topw_deploy.sampling.torch.largest import Largest, largest_logits
from topw_deploy.sampling.torch.rows import ParameterColumns

CANDIDATES = 64
"""Number of largest logits that stage A reads. With the defaults, crops of language models have a handful of tokens."""

_CANDIDATE_BLOCK, _POOL_BLOCK = 64, 8  # block sizes for `largest_logits`
# (Margin of J, in its unit; relative margin of the warm start's mass). Rows within a margin go to stage B, so stage A
# settles no row that stage B would not certify.
_SLACK = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-5)}


@dataclass(frozen=True)
class TensorCandidates:
    """The outcome of stage A; all but `found` are [B, 1].

    found: the largest logits.
    valid: whether the parameters are in range and the logits have no NaN or +inf and are not all -inf.
    settled: whether the first K tokens of `found` are the crop of a greedy or certified row.
    K: see `Scan`.
    """

    found: Largest
    valid: Tensor
    settled: Tensor
    K: Tensor


def settle_by_candidates(logits: Tensor, rows: ParameterColumns, top_m: int) -> TensorCandidates:
    """Run stage A on logits [B, V], without syncing the device."""
    count = min(CANDIDATES, top_m, logits.shape[1])
    found = largest_logits(logits, count, _CANDIDATE_BLOCK, any_last=True)
    valid = (found.top.abs() < torch.inf) & rows.in_range
    scan = base_scan(found, rows)
    settled = valid & (_inside_warm_start(scan, rows) & _covers_the_pool(scan, rows, logits, top_m) | rows.greedy)
    if count < logits.shape[1]:  # `largest_logits` leaves ties with the last candidate undefined
        settled &= found.logits.gather(1, scan.K - 1) > found.logits[:, -1:]
    return TensorCandidates(found, valid, settled, scan.K)


def _inside_warm_start(scan: Scan, rows: ParameterColumns) -> Tensor:
    """Whether K <= k0 is proven: the mass before token K is less than `init_top_p` times the candidates' mass."""
    slack = _SLACK[scan.p.dtype][1]
    before = (scan.Gamma - scan.p).gather(1, scan.K - 1)  # 0 for K = 1
    return (rows.geom_scale >= 0) & (before < rows.init_top_p * (1.0 - slack) * scan.Gamma[:, -1:])


def _covers_the_pool(scan: Scan, rows: ParameterColumns, logits: Tensor, top_m: int) -> Tensor:
    """Whether every prefix longer than the candidates is proven not to be the first maximiser.

    The last candidate's weight and score bound those of every other pool token.
    """
    outside = min(top_m, logits.shape[1]) - scan.p.shape[1]
    nothing_left = scan.banned[:, -1:]
    if outside == 0:
        return torch.ones_like(nothing_left)
    mass = scan.p[:, -1:] * outside
    whole = scan.Gamma[:, -1:] + mass
    longest = (scan.Phi[:, -1:] + mass * (rows.lam * scan.log_p[:, -1:])) / whole + rows.reward * whole.log()
    slack = _SLACK[scan.p.dtype][0] * rows.unit
    return (longest < scan.J.gather(1, scan.K - 1) - slack) | nothing_left | (rows.compares_prefixes == 0)


@dataclass(frozen=True)
class TensorPool:
    """The pool of each row.

    found: the pool's tokens in order, -inf logits last.
    scan: the objective without geometry over the pool's prefixes.
    size, k0: number of tokens in the pool and in the warm start, int64 [B, 1].
    certified: bool [B, 1], see `reference.Crop`.
    """

    found: Largest
    scan: Scan
    size: Tensor
    k0: Tensor
    certified: Tensor


def take_pool(logits: Tensor, rows: ParameterColumns, top_m: int) -> TensorPool:
    """Run stage B on logits [B, V] of valid rows."""
    found = largest_logits(logits, min(top_m, logits.shape[1]), _POOL_BLOCK)
    scan = base_scan(found, rows)
    size = (~scan.banned).sum(1, keepdim=True)
    reached = rows.init_top_p * scan.Gamma[:, -1:] <= scan.Gamma
    k0 = torch.where(rows.init_top_p < 1, reached.int().argmax(1, keepdim=True) + 1, size)
    return TensorPool(found, scan, size, k0, rows.greedy | ((rows.geom_scale >= 0) & (k0 >= scan.K)))


@dataclass(frozen=True)
class Scan:
    """The objective without geometry over each row's prefixes; all [B, n] but `K`.

    log_p, p: log weights and weights, in units of the largest weight.
    banned: whether the logit is -inf; such a token is outside every pool, and its log_p and p are 0.
    Gamma, Phi: inclusive sums of p and of lam p log p.
    J: the objective.
    K: int64 [B, 1], the size of the first best prefix; 1 if greedy or beta <= lam (singleton collapse), whatever
        rounding does to J.
    """

    log_p: Tensor
    p: Tensor
    banned: Tensor
    Gamma: Tensor
    Phi: Tensor
    J: Tensor
    K: Tensor


def base_scan(found: Largest, rows: ParameterColumns) -> Scan:
    """Scan the tokens `found`. Sums in the reference's order, in float64 (float32 on MPS)."""
    logits = found.logits.to(rows.lam.dtype)
    banned = logits == -torch.inf
    log_p = ((logits - logits[:, :1]) / rows.selection).masked_fill_(banned, 0.0)
    p = log_p.clamp(min=SMALLEST_LOG_WEIGHT).exp_().masked_fill_(banned, 0.0)
    Gamma = p.cumsum(1)
    Phi = (rows.lam * log_p).mul_(p).cumsum(1)
    J = (Phi / Gamma).add_(rows.reward * Gamma.log())
    K = J.argmax(1, keepdim=True) * rows.compares_prefixes + 1  # argmax returns the first maximiser
    return Scan(log_p, p, banned, Gamma, Phi, J, K)
