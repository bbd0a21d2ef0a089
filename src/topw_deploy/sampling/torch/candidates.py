"""Stage A: a few candidates and the proof that they settle the row (docs/contract/theory.md, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.torch.largest import Largest, largest_logits
from topw_deploy.sampling.torch.rows import Rows
from topw_deploy.sampling.torch.scan import Scan, base_scan

CANDIDATES = 64
"""Largest logits looked at; crops of language models at the defaults have a handful."""

_BLOCK = 64
# Slacks against calling a row settled that the pool would not call certified: of J, in its unit, and of the warm
# start's mass, relative. A row in between goes to the pool, where nothing is estimated.
_SLACK = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-5)}


@dataclass(frozen=True)
class Candidates:
    """found: the largest logits; valid [B, 1]: see `Largest.top`, and usable parameters; settled [B, 1]: the top K of
    them are the crop, greedy or certified; K [B, 1]."""

    found: Largest
    valid: Tensor
    settled: Tensor
    K: Tensor


def settle_by_candidates(logits: Tensor, rows: Rows, top_m: int) -> Candidates:
    """The rows [B, V] whose largest `CANDIDATES` logits prove the certificate; nothing here waits for the device."""
    count = min(CANDIDATES, top_m, logits.shape[1])
    found = largest_logits(logits, count, _BLOCK, any_last=True)
    valid = (found.top.abs() < torch.inf) & rows.usable
    scan = base_scan(found, rows)
    settled = valid & (_inside_warm_start(scan, rows) & _covers_the_pool(scan, rows, logits, top_m) | rows.greedy)
    if count < logits.shape[1]:  # which of the tokens equal to the last candidate are candidates is left open
        settled &= found.logits.gather(1, scan.K - 1) > found.logits[:, -1:]
    return Candidates(found, valid, settled, scan.K)


def _inside_warm_start(scan: Scan, rows: Rows) -> Tensor:
    """K <= k0 (certificate without the pool): token K begins before `init_top_p` of the candidates' mass is reached."""
    slack = _SLACK[scan.p.dtype][1]
    before = (scan.Gamma - scan.p).gather(1, scan.K - 1)  # 0 for K = 1
    return (rows.geom_scale >= 0) & (before < rows.init_top_p * (1.0 - slack) * scan.Gamma[:, -1:])


def _covers_the_pool(scan: Scan, rows: Rows, logits: Tensor, top_m: int) -> Tensor:
    """No prefix longer than the candidates is the first maximiser (block stop).

    The pool's other tokens weigh at most as much as the last candidate, and so many of them with its score are the
    best that could follow.
    """
    outside = min(top_m, logits.shape[1]) - scan.p.shape[1]
    nothing_left = scan.banned[:, -1:]
    if outside == 0:
        return torch.ones_like(nothing_left)
    mass = scan.p[:, -1:] * outside
    whole = scan.Gamma[:, -1:] + mass
    longest = (scan.Phi[:, -1:] + mass * (rows.lam * scan.log_p[:, -1:])) / whole + rows.reward * whole.log()
    slack = _SLACK[scan.p.dtype][0] * rows.unit
    return (longest < scan.J.gather(1, scan.K - 1) - slack) | nothing_left | (rows.scanned == 0)
