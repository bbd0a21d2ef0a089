"""Stage C: the alternation of one row over its pool (docs/contract/theory.md, sections 3 and 4), and the literal one.

Each step depends on values computed before, so it syncs the device. Only uncertified rows need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from topw_deploy.sampling.torch.geometry import TensorGeometry

_FIRST_ROWS = 64  # as in `fast.alternation`
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-5}  # of J, in its unit; with it, rounding only lets more tokens pass


class SetDistances:
    """`fast.alternation.SetDistances` for tensors."""

    def __init__(self, geometry: TensorGeometry, C: Tensor, neighbours: int) -> None:
        self._geometry, self._C, self._neighbours = geometry, C, neighbours
        none = geometry.features(C[:0])
        self._features = none.new_empty(len(C), none.shape[1])
        self._has_features = torch.zeros_like(C, dtype=torch.bool)
        self._store = none.new_empty(len(C), len(C))
        # As in `fast.alternation`: the rows of a group have the same columns filled.
        self._group = torch.zeros_like(C)
        self._known = [torch.zeros_like(self._has_features)]
        self.computed_distances = 0

    def __call__(self, rows: Tensor, S: Tensor) -> Tensor:
        for group in self._group[rows].unique().tolist():
            missing = S & ~self._known[group]
            if missing.any():
                same = rows[self._group[rows] == group]
                self._compute(same, missing.nonzero()[:, 0])
                self._group[same] = self._group_with_columns(self._known[group] | missing)
        to_members = self._store[rows[:, None], S.nonzero()[:, 0]]
        count = min(self._neighbours or 1, to_members.shape[1])
        return to_members.amin(1) if count == 1 else to_members.topk(count, dim=1, largest=False).values.mean(1)

    def _compute(self, rows: Tensor, columns: Tensor) -> None:
        x, y = self._features_at(rows), self._features_at(columns)
        self._store[rows[:, None], columns] = self._geometry.point_distances(x, y)
        self.computed_distances += len(rows) * len(columns)

    def _features_at(self, positions: Tensor) -> Tensor:
        new = positions[~self._has_features[positions]]
        if len(new):
            self._features[new] = self._geometry.features(self._C[new])
            self._has_features[new] = True
        return self._features[positions]

    def _group_with_columns(self, columns: Tensor) -> int:
        for group, known in enumerate(self._known):
            if torch.equal(known, columns):
                return group
        self._known.append(columns)
        return len(self._known) - 1


@dataclass(frozen=True)
class Alternation:
    """`fast.alternation.Alternation` for tensors; the fields without a line here are the same.

    scale: geom_scale.
    distances: None if every distance to a set is 1 or geom_scale is 0.
    bound: lower bounds of each token's distance to any other token, [n], or one number for all.
    """

    p: Tensor
    scores: Tensor
    c: float
    unit: float
    scale: float
    distances: SetDistances | None
    bound: Tensor | float
    final_size: int

    def run(self, S: Tensor, most_steps: int) -> tuple[Tensor, Tensor]:
        """Alternate from the warm start S, a mask [n]. Returns (last set, union of the sets before each step)."""
        seen = S.clone()
        for step in range(most_steps):
            before, S = S, self._step(S)
            grown = bool((S & ~before).any())
            if not grown and (int(S.sum()) >= self.final_size or torch.equal(S, before)):
                break
            if step + 1 < most_steps:
                seen |= S
        return S, seen

    def run_literally(self, distances: SetDistances, S: Tensor, most_steps: int) -> Tensor:
        """Alternate from the warm start S without shortcuts, for geom_scale < 0. Returns the last set."""
        everyone = torch.arange(len(S), device=S.device)
        for _ in range(most_steps):
            phi = torch.where(S, 0.0, -self.scale * distances(everyone, S)) + self.scores
            order = sort_by_phi(phi, everyone)
            k = (
                int(objective(self.p[order], phi[order], self.c).argmax()) + 1 if self.c > 0 else 1
            )  # singleton collapse
            before, S = S, torch.zeros_like(S)
            S[order[:k]] = True
            if torch.equal(S, before):
                break
        return S

    def _step(self, S: Tensor) -> Tensor:
        # Upper bounds of phi, replaced by phi once the distances are computed.
        phi = torch.where(S, self.scores, self.scores - self.scale * self.bound)
        known = torch.ones_like(S) if self.distances is None else S.clone()
        rows = _FIRST_ROWS
        while True:
            best, lead = self._best_prefix(phi, known)
            batch = (~known & self._may_be_kept(phi, lead)).nonzero()[:rows, 0]
            if self.distances is None or not len(batch):
                after = torch.zeros_like(S)
                after[best] = True
                return after
            phi[batch] = self.scores[batch] - self.scale * self.distances(batch, S)
            known[batch] = True
            rows *= 2

    def _best_prefix(self, phi: Tensor, known: Tensor) -> tuple[Tensor, float]:
        order = sort_by_phi(phi, known.nonzero()[:, 0])
        J = objective(self.p[order], phi[order], self.c)
        k = int(J.argmax()) + 1
        return order[:k], float(J[k - 1])

    def _may_be_kept(self, phi: Tensor, best: float) -> Tensor:
        slack = _SLACK[phi.dtype]
        G = float(self.p.sum())
        while True:
            threshold = best - self.c * math.log(G) - self.c * _loss_of_share(self.p / G) - slack * self.unit
            passes = phi >= threshold
            mass = float(self.p[passes].sum()) * (1.0 + 1e-3 * slack)
            if mass >= 0.999 * G:
                return passes
            G = mass


def sort_by_phi(phi: Tensor, positions: Tensor) -> Tensor:
    """Sort ascending `positions` by phi descending, keeping pool order among ties."""
    return positions[phi[positions].neg().argsort(stable=True)]


def objective(p: Tensor, phi: Tensor, c: float) -> Tensor:
    Gamma = p.cumsum(0)
    return (p * phi).cumsum(0) / Gamma + c * Gamma.log()


def _loss_of_share(y: Tensor) -> Tensor:
    y = y.clamp(max=1.0 - torch.finfo(y.dtype).eps)
    return -(1.0 - y) / y * torch.log1p(-y)
