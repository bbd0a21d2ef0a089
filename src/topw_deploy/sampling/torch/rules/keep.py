"""Each rule on a list of the best tokens (docs/contract/rules.md, section 4).

A function takes (the list, v0, v1) and returns (kept places bool [R, m], settled bool [R, 1]). A row is settled if no
token outside the list can change the kept set, provided that the list's last token is not kept. If the list is
complete, every row is settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from topw_deploy.sampling.torch.rules.listed import Listed

Kept = tuple[Tensor, Tensor]


def top_k(given: Listed, k: float, _: float) -> Kept:
    return given.places < k, given.complete | (k <= given.logits.shape[1])


def keep_all(given: Listed, _: float, __: float) -> Kept:
    return given.finite, given.complete


def top_p(given: Listed, p: float, _: float) -> Kept:
    if p >= 1:
        return given.finite, given.complete
    k, reached = _shortest(given.w, p * given.Z)
    return given.places < k, reached | given.complete


def min_p(given: Listed, share: float, _: float) -> Kept:
    return _above(given, torch.full_like(given.top, share))


def epsilon(given: Listed, cutoff: float, _: float) -> Kept:
    return _above(given, cutoff * given.Z)


def eta(given: Listed, cutoff: float, _: float) -> Kept:
    return _above(given, torch.minimum(cutoff * given.Z, math.sqrt(cutoff) * torch.exp(-given.mean)))


def p_less(given: Listed, _: float, __: float) -> Kept:
    return _above(given, given.S / given.Z)


def top_n_sigma(given: Listed, n: float, _: float) -> Kept:
    drop, limit = given.top - given.logits, n * given.deviation
    return drop <= limit, given.complete | (drop[:, -1:] > limit)


def top_h(given: Listed, alpha: float, pool: float) -> Kept:
    """Each token of the pool that is not in the list adds between 0 and e(w_m) to the pool's sum."""
    size = given.logits.shape[1]
    inside = given.places < pool
    surprise = torch.where(given.w > 0, given.y, 0.0)
    terms = torch.where(inside, given.w * (surprise + given.log_Z), 0.0)
    E = terms.cumsum(1)
    missing = (given.n.clamp(max=int(pool)) - size).clamp(min=0)
    least, most = alpha * E[:, -1:], alpha * (E[:, -1:] + missing * terms[:, -1:])
    keep = (least >= E) & inside & (least > 0) | (given.places == 0)
    certain = (missing == 0) | (((most >= E) & inside).sum(1, keepdim=True) == keep.sum(1, keepdim=True))
    return keep, given.complete | certain


def typical(given: Listed, mass: float, _: float) -> Kept:
    """A token outside the list can precede a kept one only if the list's last token, which is nearer, is also kept."""
    distance = torch.where(given.finite, (given.y - given.mean).abs(), torch.inf)
    order = torch.sort(distance, dim=1, stable=True).indices
    k, reached = _shortest(given.w.gather(1, order), mass * given.Z)
    keep = torch.zeros_like(given.finite).scatter_(1, order, given.places < k)
    return keep, given.complete | reached


def min_k(given: Listed, tau: float, _: float) -> Kept:
    size = given.logits.shape[1]
    span = given.top - given.least
    cliff, proven = torch.ones_like(given.n), given.complete
    if size > 1:
        decay = (given.logits[:, :-1] - given.logits[:, 1:]) / (given.places[:, :-1] + 1)
        decay = torch.where(given.finite[:, 1:], decay, -1.0)
        at = decay.argmax(1, keepdim=True)  # the first maximiser; max() may return another
        steepest = decay.gather(1, at)
        cliff = torch.where(steepest > 0, at + 1, cliff)
        proven = proven | (steepest >= (given.logits[:, -1:] - given.least) / size)
    # Tensor by tensor: torch computes number / tensor as number * (1 / tensor), which may round a whole number down.
    flat = torch.where(span > 0, torch.full_like(span, tau) / span, math.inf if tau > 0 else 0.0)
    k = torch.maximum(cliff, flat.clamp(max=2.0**31).floor().to(torch.int64))
    return given.places < k, given.complete | (proven & (k <= size))


def _above(given: Listed, threshold: Tensor) -> Kept:
    return (given.w >= threshold) | (given.places == 0), given.complete | (given.w[:, -1:] < threshold)


def _shortest(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(Size of the shortest prefix that reaches `target`, int64 [R, 1], or of the whole list; whether one does)."""
    reached = weights.cumsum(1) >= target
    any_does = reached.any(1, keepdim=True)
    first = reached.to(torch.uint8).argmax(1, keepdim=True) + 1
    return torch.where(any_does, first, weights.shape[1]), any_does


KEEP: Mapping[str, Callable[[Listed, float, float], Kept]] = {
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "top_h": top_h,
    "typical": typical,
    "epsilon": epsilon,
    "eta": eta,
    "top_n_sigma": top_n_sigma,
    "p_less": p_less,
    "min_k": min_k,
    "none": keep_all,
}
"""Rule name -> function."""
