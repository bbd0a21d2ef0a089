"""Analyse one step under the exact objective F: the best prefixes, and F of the crops of several rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT, candidate_pool, first_maximiser, objective, warm_start
from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.sampling.rules import RuleParameters, kept_set
from topw_lab.stats.exact.objective import BestPrefix, Floats, Mask, Objective, ObjectiveValue, Places

TOP_W = "Top-W"
"""Name of Top-W's crop in reports."""

EVERY_TOKEN = "every token"
"""Name of plain sampling in reports. Its crop is every token among which F is computed."""

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
    likeliest: the best prefix of the probability order.
    phi: the best prefix of the order by phi in Top-W's last alternation step.
    crops: F of each rule's crop, by name. Tokens among which F is not computed are removed from the crop first.
    cut: names of the rules whose crop had such tokens, without plain sampling.
    metric: whether the export's distance satisfies the triangle inequality.
    """

    tokens: int
    mass: float
    likeliest: BestPrefix
    phi: BestPrefix
    crops: Mapping[str, ObjectiveValue]
    cut: tuple[str, ...]
    metric: bool


@dataclass(frozen=True)
class ExactAnalyser:
    """Analyses steps of an export under F.

    options, geometry: of the export.
    most: F is computed among this many likeliest tokens, at least `options.top_m`.
    """

    options: TopWOptions
    geometry: Geometry
    most: int

    def __post_init__(self) -> None:
        if self.most < self.options.top_m:
            raise ParameterError(
                f"exact_pool is {self.most}, but must be at least the export's top_m of {self.options.top_m}.",
                "exact_pool",
            )

    def analyse(
        self, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters | None = None
    ) -> ExactStep:
        """Analyse one row of edited logits [V].

        parameters: of Top-W, rounded to float32; see `require_objective`. They define F, also for texts that another
            rule wrote.
        rule: the rule that wrote the text; it joins the compared rules. None for Top-W.
        """
        row = logits.astype(np.float64)
        Ts = parameters.selection_temperature or parameters.temperature
        tokens, _ = candidate_pool(row, self.most)
        log_w = (row[tokens] - row[tokens[0]]) / Ts
        tokens, log_w = tokens[log_w >= SMALLEST_LOG_WEIGHT], log_w[log_w >= SMALLEST_LOG_WEIGHT]
        w = np.exp(log_w)
        total = float(np.exp((row - row[tokens[0]]) / Ts).sum())
        metric = self.geometry.metric != "cosine"
        distance = parameters.geom_scale * self.geometry.distances(tokens, tokens)
        F = Objective(w / w.sum(), distance, parameters.lam, parameters.beta, metric)
        kept, order = last_alternation(log_w[: self.options.top_m], distance, parameters, self.options)
        crops, cut = {TOP_W: F(_membership(len(tokens), kept))}, []
        for name, (other, values) in (COMPARED if rule is None else rules_to_compare(rule)).items():
            members = np.isin(tokens, kept_ids := kept_set(row, other, values, selection_temperature=Ts).kept)
            crops[name] = F(members)
            if name != EVERY_TOKEN and members.sum() < len(kept_ids):
                cut.append(name)
        likeliest, phi = F.best_prefix(np.arange(len(tokens))), F.best_prefix(order)
        return ExactStep(len(tokens), float(w.sum()) / total, likeliest, phi, crops, tuple(cut), metric)


def require_objective(parameters: TopWParameters) -> None:
    """Raises ParameterError for parameters under which F is not defined."""
    if parameters.greedy:
        raise ParameterError(
            f"temperature is {parameters.temperature:g}, but the exact objective needs a distribution; choose a "
            "temperature of at least 1e-5.",
            "temperature",
        )
    if parameters.geom_scale < 0:
        raise ParameterError(
            f"geom_scale is {parameters.geom_scale:g}, but the exact objective needs distances >= 0; choose a "
            "geom_scale of at least 0.",
            "geom_scale",
        )


def last_alternation(
    log_w: Floats, distance: Floats, parameters: TopWParameters, options: TopWOptions
) -> tuple[Places, Places]:
    """Run the literal alternation (docs/contract/graph.md, section 3) to its last step.

    log_w: float64 [m], logarithms of the pool's weights in units of the largest, in pool order.
    distance: float64 [n, n], n >= m, already multiplied by geom_scale.

    Returns (kept [k], order [m]), both as places in the pool. `order` is the order by phi in the last step, and `kept`
    is its first k places, the crop.
    """
    m = len(log_w)
    w, c = np.exp(log_w), parameters.beta - parameters.lam
    S = np.arange(m) < warm_start(w, parameters.init_top_p)[0]
    order, k = np.arange(m), 0
    for _ in range(options.alt_iters):
        phi = parameters.lam * log_w - _distances_to_set(distance[:m, :m], S, options.neighbours)
        order = np.argsort(-phi, kind="stable")
        k = first_maximiser(objective(w[order], phi[order], c), c)
        previous, S = S, _membership(m, order[:k])
        if np.array_equal(S, previous):
            break
    return order[:k], order


def _distances_to_set(distance: Floats, S: Mask, neighbours: int) -> Floats:
    """dist(i, S) for every token i, as in `reference.SetDistance`: [m], from distances [m, m]."""
    n = min(neighbours or 1, int(S.sum()))
    nearest = np.partition(distance[:, S], n - 1, axis=1)[:, :n]
    return np.where(S, 0.0, nearest.mean(axis=1))


def _membership(count: int, places: Places) -> Mask:
    """bool [count], True at `places`."""
    members = np.zeros(count, dtype=np.bool_)
    members[places] = True
    return members


def evenly_spaced_steps(lengths: Sequence[int], most: int) -> list[set[int]]:
    """Choose at most `most` steps, evenly spaced over all sequences.

    lengths: number of steps of each sequence.

    Returns the chosen positions of each sequence, counted from 0.
    """
    total = sum(lengths)
    count = min(most, total)
    places = {(2 * number + 1) * total // (2 * count) for number in range(count)}
    chosen: list[set[int]] = []
    start = 0
    for length in lengths:
        chosen.append({place - start for place in places if start <= place < start + length})
        start += length
    return chosen


def rules_to_compare(rule: RuleParameters) -> Mapping[str, tuple[str, tuple[float, ...]]]:
    """The rules of COMPARED. `rule` with its values comes first, unless it is Top-W or already in COMPARED."""
    chosen = rule.chosen
    values = rule.values[: len(chosen.values)]
    known = {(name, tuple(map(np.float32, given))) for name, given in COMPARED.values()}
    if chosen is TOP_W_RULE or (chosen.name, tuple(map(np.float32, values))) in known:
        return COMPARED
    return {" ".join([chosen.name, *(f"{value:g}" for value in values)]): (chosen.name, values), **COMPARED}
