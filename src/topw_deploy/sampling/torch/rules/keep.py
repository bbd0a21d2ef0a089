"""Apply each rule to a list of the best tokens (docs/contract/rules.md, section 4).

A function takes (the list, v0, v1) and returns (kept places bool [R, m], settled bool [R, 1]). A row is settled if no
token outside the list can change the kept set, provided that the list's last token is not kept. Every row whose list is
complete is settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from topw_deploy.sampling.torch.rules.best_tokens import BestTokens

Kept = tuple[Tensor, Tensor]
"""(Kept places, settled)."""


def top_k(best: BestTokens, k: float, _: float) -> Kept:
    return best.places < k, best.complete | (k <= best.logits.shape[1])


def keep_all(best: BestTokens, _: float, __: float) -> Kept:
    return best.finite, best.complete


def top_p(best: BestTokens, p: float, _: float) -> Kept:
    if p >= 1:
        return best.finite, best.complete
    k, reached = _shortest_prefix(best.w, p * best.Z)
    return best.places < k, reached | best.complete


def min_p(best: BestTokens, share: float, _: float) -> Kept:
    return _keep_above(best, torch.full_like(best.top, share))


def epsilon(best: BestTokens, cutoff: float, _: float) -> Kept:
    return _keep_above(best, cutoff * best.Z)


def eta(best: BestTokens, cutoff: float, _: float) -> Kept:
    return _keep_above(best, torch.minimum(cutoff * best.Z, math.sqrt(cutoff) * torch.exp(-best.mean)))


def p_less(best: BestTokens, _: float, __: float) -> Kept:
    return _keep_above(best, best.S / best.Z)


def top_n_sigma(best: BestTokens, n: float, _: float) -> Kept:
    drop, limit = best.top - best.logits, n * best.deviation
    return drop <= limit, best.complete | (drop[:, -1:] > limit)


def top_h(best: BestTokens, alpha: float, pool: float) -> Kept:
    """Each pool token outside the list adds between 0 and e(w_m) to the pool's sum E_n."""
    size = best.logits.shape[1]
    inside = best.places < pool
    surprise = torch.where(best.w > 0, best.y, 0.0)
    terms = torch.where(inside, best.w * (surprise + best.log_Z), 0.0)
    E = terms.cumsum(1)
    missing = (best.n.clamp(max=int(pool)) - size).clamp(min=0)
    least, most = alpha * E[:, -1:], alpha * (E[:, -1:] + missing * terms[:, -1:])
    keep = (least >= E) & inside & (least > 0) | (best.places == 0)
    certain = (missing == 0) | (((most >= E) & inside).sum(1, keepdim=True) == keep.sum(1, keepdim=True))
    return keep, best.complete | certain


def typical(best: BestTokens, mass: float, _: float) -> Kept:
    """A token outside the list precedes a kept one only if the list's last token is kept too: it is nearer to H."""
    distance = torch.where(best.finite, (best.y - best.mean).abs(), torch.inf)
    order = torch.sort(distance, dim=1, stable=True).indices
    k, reached = _shortest_prefix(best.w.gather(1, order), mass * best.Z)
    keep = torch.zeros_like(best.finite).scatter_(1, order, best.places < k)
    return keep, best.complete | reached


def min_k(best: BestTokens, tau: float, _: float) -> Kept:
    size = best.logits.shape[1]
    span = best.top - best.smallest_logit
    cliff, proven = torch.ones_like(best.n), best.complete
    if size > 1:
        decay = (best.logits[:, :-1] - best.logits[:, 1:]) / (best.places[:, :-1] + 1)
        decay = torch.where(best.finite[:, 1:], decay, -1.0)
        at = decay.argmax(1, keepdim=True)  # the first maximiser; max() may return another
        steepest = decay.gather(1, at)
        cliff = torch.where(steepest > 0, at + 1, cliff)
        proven = proven | (steepest >= (best.logits[:, -1:] - best.smallest_logit) / size)
    # Divide tensor by tensor: torch computes number / tensor as number * (1 / tensor), which may round an integer down.
    least_size = torch.where(span > 0, torch.full_like(span, tau) / span, math.inf if tau > 0 else 0.0)
    k = torch.maximum(cliff, least_size.clamp(max=2.0**31).floor().to(torch.int64))
    return best.places < k, best.complete | (proven & (k <= size))


def _keep_above(best: BestTokens, threshold: Tensor) -> Kept:
    """Keep the tokens with w >= `threshold` [R, 1], and the first."""
    return (best.w >= threshold) | (best.places == 0), best.complete | (best.w[:, -1:] < threshold)


def _shortest_prefix(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The size of the shortest prefix that reaches `target`.

    Returns (size int64 [R, 1], that of the whole list if no prefix reaches `target`; whether one does, bool [R, 1]).
    """
    reached = weights.cumsum(1) >= target
    any_does = reached.any(1, keepdim=True)
    first = reached.to(torch.uint8).argmax(1, keepdim=True) + 1
    return torch.where(any_does, first, weights.shape[1]), any_does


KEEP_BY_RULE: Mapping[str, Callable[[BestTokens, float, float], Kept]] = {
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
"""Name of a rule -> its function."""
