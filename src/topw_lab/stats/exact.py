"""`topw stats --exact`: the kept sets of several rules at a step under the paper's exact objective F.

`Objective` computes F of a set, and proves the least F over all prefixes of an order of tokens. It needs the optimal
transport that Top-W avoids. `analyse_exact` compares the sets that rules keep.

    F(S) = W1(p, q_S) + lam H(q_S) - beta log Gamma_S           (docs/contract/theory.md, section 1)

p is the softmax at the selection temperature over a row's likeliest tokens, renormalised. The ground metric of W1 is
geom_scale times the export's distance. With this metric, the potential in Top-W's alternation step is 1-Lipschitz, and
the objective of that step bounds F for every geom_scale >= 0. All terms of F are >= 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError, VerificationError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters
from topw_deploy.sampling.parameters import GREEDY_BELOW
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT, candidate_pool, first_maximiser, objective, warm_start
from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.sampling.rules import RuleParameters, kept_set

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]

LARGEST_GAP = 1e-7
"""Largest accepted difference between the primal and the dual cost of a transport, in units of max(1, cost)."""

_MOST_ITERATIONS = 50_000_000  # of the transport solver

TOLERANCE = 1e-6
"""Two values of F are equal if they differ by at most this, in units of max(1, F)."""


def equal_objectives(value: float, other: float) -> bool:
    """Whether two values of F are equal within `TOLERANCE`."""
    return abs(value - other) <= TOLERANCE * max(1.0, other)


@dataclass(frozen=True, slots=True)
class ObjectiveValue:
    """F of one set S of tokens, and the terms of F.

    kept: number of tokens in S.
    mass: Gamma_S.
    transport: W1(p, q_S).
    entropy: H(q_S).
    total: F(S).
    """

    kept: int
    mass: float
    transport: float
    entropy: float
    total: float


@dataclass
class Objective:
    """F on one row of n tokens. Solved sets are kept, because their potentials bound F of other sets.

    p: float64 [n], positive, descending, with sum 1.
    distance: float64 [n, n], the ground metric: geom_scale times the export's distance.
    lam, beta: weights of the entropy and of the log-mass.
    metric: whether `distance` satisfies the triangle inequality.
    """

    p: Floats
    distance: Floats
    lam: float
    beta: float
    metric: bool = True
    _solved: dict[bytes, tuple[ObjectiveValue, Transport]] = field(default_factory=dict)

    def __call__(self, S: Mask) -> ObjectiveValue:
        """F of the set S, bool [n]."""
        return self._solve(S)[0]

    def best_prefix(self, order: Places) -> ObjectiveValue:
        """Find the least F over the prefixes order[:k], k = 1..m, and prove it: no F is lower by more than `TOLERANCE`.

        order: distinct places [m] among the n tokens, m <= n.

        Each prefix starts with a lower bound of F: mass outside the prefix travels at least to the nearest kept token.
        The sets of this row that are already solved raise the bounds. Then the prefix with the lowest bound is solved,
        and its potentials bound the transport of *every* prefix from below, in O(m). This repeats until no bound is
        below the best value.
        """
        p = self.p[order]
        Gamma = np.cumsum(p)
        entropy = np.log(Gamma) - np.cumsum(p * np.log(p)) / Gamma
        untransported = self.lam * entropy - self.beta * np.log(Gamma)  # F without the transport term, of each prefix

        def bounds(plan: Transport) -> Floats:
            """Lower bounds of F for every prefix, from the potentials of `plan`: [m]."""
            bound: Floats = untransported + (self.p @ plan.u + np.cumsum((self.p * plan.v)[order]) / Gamma)
            return bound

        lower = untransported + self.p @ np.minimum.accumulate(self.distance[:, order], axis=1)
        for _, plan in self._solved.values():
            np.maximum(lower, bounds(plan), out=lower)
        value: ObjectiveValue | None = None
        while True:
            k = int(np.argmin(lower)) + 1
            if value is not None and lower[k - 1] >= value.total - TOLERANCE * max(1.0, value.total):
                return value
            candidate, plan = self._solve(np.isin(np.arange(len(self.p)), order[:k]))
            if value is None or candidate.total < value.total:
                value = candidate
            np.maximum(lower, bounds(plan), out=lower)
            lower[k - 1] = max(lower[k - 1], candidate.total)

    def _solve(self, S: Mask) -> tuple[ObjectiveValue, Transport]:
        key = np.packbits(S).tobytes()
        if key not in self._solved:
            plan = solve_transport(self.p, S, self.distance, metric=self.metric)
            mass = float(self.p[S].sum())
            q = self.p[S] / mass
            entropy = max(0.0, float(-(q * np.log(q)).sum()))
            total = plan.cost + self.lam * entropy - self.beta * float(np.log(mass))
            self._solved[key] = ObjectiveValue(int(S.sum()), mass, plan.cost, entropy, total), plan
        return self._solved[key]


@dataclass(frozen=True, slots=True)
class Transport:
    """An optimal plan from p to q_S, and potentials that prove it.

    cost: the plan's cost, W1(p, q_S).
    u, v: float64 [n] with u_i + v_j <= d(i, j) for all i and j. So p.u + q.v is at most W1(p, q) for *every*
        distribution q (Kantorovich duality; Peyre and Cuturi, Computational Optimal Transport, section 2.5), and for
        q_S the two are equal.
    """

    cost: float
    u: Floats
    v: Floats


def solve_transport(p: Floats, S: Mask, distance: Floats, *, metric: bool = True) -> Transport:
    """Solve the transport from p to q_S, which is p restricted to S and renormalised.

    p: float64 [n], positive, with sum 1.
    S: bool [n], not empty.
    distance: float64 [n, n], not negative, 0 on the diagonal, in units of the objective.
    metric: whether the triangle inequality holds. If it holds, only mass outside S moves (docs/contract/theory.md,
        section 1); otherwise the mass of a token in S may move too.

    Needs the extra `exact`. Raises VerificationError if the solver's potentials do not prove its plan within
    `LARGEST_GAP`.
    """
    import ot

    q = np.where(S, p, 0.0) / p[S].sum()
    sources = ~S if metric else np.ones_like(S)
    moved = p[sources].sum()
    if S.all():
        return Transport(0.0, np.zeros_like(p), np.zeros_like(p))
    costs = np.ascontiguousarray(distance[np.ix_(sources, S)])
    _, log = ot.emd(p[sources] / moved, q[S], costs, numItermax=_MOST_ITERATIONS, log=True)
    cost = float(moved * log["cost"])
    u, v = _potentials(distance, S, log["v"])
    proven = float(p @ u + q @ v)
    if not cost - proven <= LARGEST_GAP * max(1.0, cost):
        raise VerificationError(
            f"the transport solver's cost is {cost!r}, but its potentials prove only {proven!r}; report this row."
        )
    return Transport(cost, u, v)


def _potentials(distance: Floats, S: Mask, v: Floats) -> tuple[Floats, Floats]:
    """The largest feasible u [n] for v on S, then the largest feasible v [n] for that u: two c-transforms."""
    u = (distance[:, S] - v).min(axis=1)
    return u, (distance - u[:, None]).min(axis=0)


TOP_W = "Top-W"
"""Top-W's name in reports."""

EVERY_TOKEN = "every token"
"""Plain sampling's name in reports. It keeps every token among which F is computed."""

COMPARED: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "Top-H 0.4": ("top_h", (0.4, 100)),
    "min-p 0.05": ("min_p", (0.05,)),
    "min-p 0.1": ("min_p", (0.1,)),
    "top-p 0.9": ("top_p", (0.9,)),
    "top-p 0.95": ("top_p", (0.95,)),
    EVERY_TOKEN: ("none", ()),
}
"""Name in reports -> (rule, values) as in `sampling.rules`, for the rules that every step is compared with."""


@dataclass(frozen=True, slots=True)
class ExactStep:
    """One step under F.

    tokens: number of tokens among which F is computed.
    mass: probability of these tokens under the softmax of all tokens.
    likeliest: F of the best prefix of the probability order.
    phi: F of the best prefix of the order by phi in Top-W's last alternation step.
    rules: F of each rule's kept set, by name. Tokens among which F is not computed are removed from the set first.
    cut: names of the rules whose kept set had such tokens, without plain sampling.
    metric: whether the export's distance satisfies the triangle inequality.
    """

    tokens: int
    mass: float
    likeliest: ObjectiveValue
    phi: ObjectiveValue
    rules: Mapping[str, ObjectiveValue]
    cut: tuple[str, ...]
    metric: bool


def analyse_exact(
    logits: NDArray[np.float32],
    parameters: TopWParameters,
    rule: RuleParameters | None = None,
    *,
    options: TopWOptions,
    geometry: Geometry,
    most: int,
) -> ExactStep:
    """Analyse edited logits [V] of one step under F.

    parameters: of Top-W, rounded to float32; see `require_objective`. They define F, also for texts that another rule
        wrote.
    rule: the rule that wrote the text; it joins the compared rules. None for Top-W.
    options, geometry: of the export.
    most: F is computed among this many likeliest tokens, at least `options.top_m`.
    """
    row = logits.astype(np.float64)
    Ts = parameters.selection_temperature or parameters.temperature
    tokens, _ = candidate_pool(row, most)
    log_w = (row[tokens] - row[tokens[0]]) / Ts
    tokens, log_w = tokens[log_w >= SMALLEST_LOG_WEIGHT], log_w[log_w >= SMALLEST_LOG_WEIGHT]
    w = np.exp(log_w)
    total = float(np.exp((row - row[tokens[0]]) / Ts).sum())
    metric = geometry.metric != "cosine"
    distance = parameters.geom_scale * geometry.distances(tokens, tokens)
    F = Objective(w / w.sum(), distance, parameters.lam, parameters.beta, metric)
    kept, order = last_alternation(log_w[: options.top_m], distance, parameters, options)
    rules, cut = {TOP_W: F(np.isin(np.arange(len(tokens)), kept))}, []
    for name, (other, values) in (COMPARED if rule is None else rules_to_compare(rule)).items():
        members = np.isin(tokens, kept_ids := kept_set(row, other, values, selection_temperature=Ts).kept)
        rules[name] = F(members)
        if name != EVERY_TOKEN and members.sum() < len(kept_ids):
            cut.append(name)
    likeliest, phi = F.best_prefix(np.arange(len(tokens))), F.best_prefix(order)
    return ExactStep(len(tokens), float(w.sum()) / total, likeliest, phi, rules, tuple(cut), metric)


def require_objective(parameters: TopWParameters) -> None:
    """Raises ParameterError for parameters under which F is not defined: no distribution, or negative distances."""
    for name, bound in (("temperature", GREEDY_BELOW), ("geom_scale", 0.0)):
        value = getattr(parameters, name)
        if value < bound:
            raise ParameterError(f"{name} is {value:g}, but the exact objective needs at least {bound:g}.", name)


def last_alternation(
    log_w: Floats, distance: Floats, parameters: TopWParameters, options: TopWOptions
) -> tuple[Places, Places]:
    """Run the literal alternation (docs/contract/graph.md, section 3) to its last step.

    log_w: float64 [m], logarithms of the pool's weights in units of the largest, in pool order.
    distance: float64 [n, n], n >= m, already multiplied by geom_scale.

    Returns (kept [k], order [m]), both as places in the pool. `order` is the order by phi in the last step, and `kept`
    is its first k places, the kept set.
    """
    m = len(log_w)
    w, c = np.exp(log_w), parameters.beta - parameters.lam
    S = np.arange(m) < warm_start(w, parameters.init_top_p)[0]
    order, k = np.arange(m), 0
    for _ in range(options.alt_iters):
        n = min(options.neighbours or 1, int(S.sum()))
        nearest = np.partition(distance[:m, :m][:, S], n - 1, axis=1)[:, :n]
        # dist(i, S) for every token i, as in `reference.SetDistance`
        phi = parameters.lam * log_w - np.where(S, 0.0, nearest.mean(axis=1))
        order = np.argsort(-phi, kind="stable")
        k = first_maximiser(objective(w[order], phi[order], c), c)
        previous, S = S, np.isin(np.arange(m), order[:k])
        if np.array_equal(S, previous):
            break
    return order[:k], order


def evenly_spaced_steps(lengths: Sequence[int], most: int) -> list[set[int]]:
    """Choose at most `most` steps, evenly spaced over all sequences.

    lengths: number of steps of each sequence.

    Returns the chosen positions of each sequence, counted from 0.
    """
    total = sum(lengths)
    count = min(most, total)
    places = {(2 * number + 1) * total // (2 * count) for number in range(count)}
    chosen = []
    for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        chosen.append({place - start for place in places if start <= place < end})
    return chosen


def rules_to_compare(rule: RuleParameters) -> Mapping[str, tuple[str, tuple[float, ...]]]:
    """The rules of COMPARED. `rule` with its values comes first, unless it is Top-W or already in COMPARED."""
    chosen = rule.chosen
    values = rule.values[: len(chosen.values)]
    known = {(name, tuple(map(np.float32, given))) for name, given in COMPARED.values()}
    if chosen is TOP_W_RULE or (chosen.name, tuple(map(np.float32, values))) in known:
        return COMPARED
    return {" ".join([chosen.name, *(f"{value:g}" for value in values)]): (chosen.name, values), **COMPARED}
