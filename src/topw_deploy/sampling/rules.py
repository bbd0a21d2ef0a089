"""The sampling rules other than Top-W: names, codes, parameters, and kept sets in float64 (docs/contract/rules.md).

A rule is a function of (an `OrderedRow`, v0, v1) that returns the places of the kept tokens, int64 ascending, and the
relative distance of the deciding quantity from its threshold, inf if rounding cannot change the choice. Probabilities
are compared in units of the largest: w_i = p_i / p_1. `RULES` is the table of all rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import Floats, Ids
from topw_deploy.sampling.parameters import GREEDY_BELOW, RANGES, known_clause, read_number
from topw_deploy.sampling.reference import Ties, checked_row, warm_start

CANDIDATES = 64
"""A row is certified if its kept tokens are among this many largest logits."""

LARGEST_COUNT = 1 << 24
"""The largest count: float32 holds every integer up to it."""


@dataclass(frozen=True)
class OrderedRow:
    """The n finite tokens of a row, by (logit descending, id ascending); float64.

    A token's place is its index in this order.

    ids: int64 [n].
    logits: [n], descending.
    surprise: [n], y_i = (l_1 - l_i) / Ts >= 0, ascending: -ln p_i = y_i + ln Z.
    """

    ids: Ids
    logits: Floats
    surprise: Floats

    @classmethod
    def of(cls, logits: Floats, selection: float) -> OrderedRow:
        """Order logits [V], the result of `reference.checked_row`. selection: the temperature Ts > 0."""
        finite = np.flatnonzero(np.isfinite(logits))
        ids = finite[np.argsort(-logits[finite], kind="stable")]
        ordered = logits[ids]
        with np.errstate(over="ignore"):  # inf for a tiny Ts, which gives the weight 0
            surprise = (ordered[0] - ordered) / selection
        return cls(ids, ordered, surprise)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def weights(self) -> Floats:
        """w_i = exp(-y_i), the probabilities in units of the largest, [n]."""
        return np.exp(-self.surprise)

    @cached_property
    def total(self) -> float:
        """Z, the sum of the weights: p_i = w_i / Z."""
        return float(self.weights.sum())

    @cached_property
    def weighted_surprise(self) -> Floats:
        """w_i y_i [n], 0 where the weight is 0."""
        return self.weights * np.where(self.weights > 0, self.surprise, 0.0)

    @cached_property
    def total_surprise(self) -> float:
        """D, the sum of w_i y_i: the entropy is H = ln Z + D / Z."""
        return float(self.weighted_surprise.sum())

    @cached_property
    def log_total(self) -> float:
        """ln Z = -ln p_1, without cancellation where Z is close to 1."""
        return math.log1p(float(self.weights[1:].sum()))


Choice = tuple[Ids, float]
"""(Places of the kept tokens, margin); see the module's docstring."""


def _first(size: int, margin: float = math.inf) -> Choice:
    return np.arange(size, dtype=np.int64), float(margin)


def _nearest_margin(values: Floats, threshold: float) -> float:
    """The smallest |value / threshold - 1|; inf for no values or a threshold of 0."""
    if len(values) == 0 or threshold == 0:
        return math.inf
    return float(np.abs(values / threshold - 1.0).min())


def _keep_above(row: OrderedRow, threshold: float, others: Floats | None = None) -> Choice:
    """Keep the tokens whose weight reaches `threshold`, and the first. others: weights that rounding may change."""
    size = max(1, int((row.weights >= threshold).sum()))
    return _first(size, _nearest_margin(row.weights[1:] if others is None else others, threshold))


def top_k(row: OrderedRow, k: float, _: float) -> Choice:
    """Keep the first k tokens (Fan et al. 2018)."""
    return _first(min(int(k), len(row)))


def keep_all(row: OrderedRow, _: float, __: float) -> Choice:
    """Keep every finite token: plain sampling."""
    return _first(len(row))


def top_p(row: OrderedRow, p: float, _: float) -> Choice:
    """Keep the shortest prefix with a mass of at least p (Holtzman et al. 2020); every finite token for p = 1."""
    return _first(*warm_start(row.weights, p))


def min_p(row: OrderedRow, share: float, _: float) -> Choice:
    """Keep p_i >= min_p * p_1 (Nguyen et al. 2024). A token with the largest logit has weight 1 exactly: kept."""
    return _keep_above(row, share, row.weights[row.surprise > 0])


def epsilon(row: OrderedRow, cutoff: float, _: float) -> Choice:
    """Keep p_i >= epsilon, and the first token (Hewitt et al. 2022)."""
    return _keep_above(row, cutoff * row.total)


def eta(row: OrderedRow, cutoff: float, _: float) -> Choice:
    """Keep p_i >= min(eta, sqrt(eta) exp(-H)), and the first token (Hewitt et al. 2022).

    Z exp(-H) = exp(-D / Z), so ln Z cancels.
    """
    return _keep_above(row, min(cutoff * row.total, math.sqrt(cutoff) * math.exp(-row.total_surprise / row.total)))


def p_less(row: OrderedRow, _: float, __: float) -> Choice:
    """Keep p_i >= sum_j p_j^2 (Tan et al. 2025). p_1 reaches this threshold, because p_j^2 <= p_1 p_j."""
    return _keep_above(row, float(np.square(row.weights).sum()) / row.total)


def top_n_sigma(row: OrderedRow, n: float, _: float) -> Choice:
    """Keep l_i >= l_1 - n sigma (Tang et al. 2024), independent of the temperature.

    sigma is the unbiased standard deviation of the finite logits, 0 for one token.
    """
    sigma = float(row.logits.std(ddof=1)) if len(row) > 1 else 0.0
    drop = row.logits[0] - row.logits
    return _first(int((drop <= n * sigma).sum()), _nearest_margin(drop[drop > 0], n * sigma))


def top_h(row: OrderedRow, alpha: float, pool: float) -> Choice:
    """Keep the longest prefix of the `pool` best tokens with E_k <= alpha E_n, at least one (Potraghloo et al. 2025).

    E_k = sum_{i <= k} -p_i ln p_i, and n is the pool's size: the rule as its authors released it. The paper bounds the
    entropy of the renormalised crop, H(q) <= alpha H(p). The released code adds ln of the crop's mass to both sides of
    its test, where it cancels. Differences from transformers: docs/contract/rules.md#top-h.
    """
    n = min(int(pool), len(row))
    E = np.cumsum(row.weighted_surprise[:n] + row.weights[:n] * row.log_total)  # Z times -p_i ln p_i
    limit = alpha * E[-1]
    if limit == 0.0:
        return _first(1)
    cuts = E[1 : n - 1] if alpha == 1.0 else E[1:]  # for alpha = 1, E_n equals the limit exactly
    return _first(max(1, int((limit >= E).sum())), _nearest_margin(cuts, limit))


def typical(row: OrderedRow, mass: float, _: float) -> Choice:
    """Keep the tokens nearest to the entropy, by ascending (|-ln p_i - H|, place), until their mass reaches `mass`.

    Locally typical sampling (Meister et al. 2023); the kept set need not be a prefix. H = ln Z + m with m = D / Z, the
    mean of y, so -ln p_i - H = y_i - m: ln Z cancels.

    The margin includes the smallest difference of distances, in units of 2 m, between the last kept token and a
    possible replacement. Two tokens above the mean are ordered by y, whatever m is. So rounding of m can swap two
    tokens only if at least one is below the mean.
    """
    y, m = row.surprise, row.total_surprise / row.total
    distance = np.abs(y - m)
    order = np.argsort(distance, kind="stable")
    k, margin = warm_start(row.weights[order], mass)
    last = int(order[k - 1])
    other = (y != y[last]) if y[last] < m else (y < m)
    if m > 0 and other.any():
        margin = min(margin, float(np.abs(distance[other] - distance[last]).min() / (2 * m)))
    return np.sort(order[:k]), margin


def min_k(row: OrderedRow, tau: float, _: float) -> Choice:
    """Keep the first max(k_cliff, floor(tau / R)) tokens, at most n (Ding et al. 2026), independent of the temperature.

    R = l_1 - l_n is the range of the finite logits; k_cliff is the first maximiser of (l_i - l_(i+1)) / (R i). If R = 0
    (equal logits), keep all n tokens, or only the first if tau = 0.
    """
    n = len(row)
    R = float(row.logits[0] - row.logits[-1])
    if R == 0:
        return _first(n if tau > 0 else 1)
    decay = (row.logits[:-1] - row.logits[1:]) / np.arange(1, n)  # [n - 1]; R cancels
    cliff = int(np.argmax(decay)) + 1
    least_size = tau / R
    fallback = math.floor(min(least_size, n))
    size = max(cliff, fallback)
    rivals = decay[np.maximum(np.arange(1, n), fallback) != size]  # cliffs that would keep a different number of tokens
    margins = [(decay[cliff - 1] - rivals.max()) / decay[cliff - 1]] if len(rivals) else []
    # The integers next to least_size at which the number of kept tokens changes.
    margins += [abs(least_size - k) / least_size for k in (fallback, fallback + 1) if cliff < k <= n and least_size > 0]
    return _first(size, min(margins, default=math.inf))


@dataclass(frozen=True, slots=True)
class RuleValue:
    """A parameter of a rule.

    contains: whether a finite number is in the interval.
    bound: the interval as an error message states it.
    default: the default in the rule's source; None if the source has none, so a request must give a value.
    """

    name: str
    contains: Callable[[float], bool]
    bound: str
    default: float | None = None

    def accepts(self, value: float) -> bool:
        """Whether `value` is finite and in the interval."""
        return math.isfinite(value) and self.contains(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """A sampling rule.

    code: the rule's number in the graph's input `rule`.
    name: the rule's name in a request.
    values: the rule's parameters, at most two: v0 and v1 of the graph's input `rule_values`.
    choose: the rule's definition; None for Top-W, which `sampling.reference` defines.
    """

    code: int
    name: str
    values: tuple[RuleValue, ...] = ()
    choose: Callable[[OrderedRow, float, float], Choice] | None = None

    def accepts(self, values: Sequence[float]) -> bool:
        """Whether (v0, v1) are in their intervals. A value that the rule does not use may be any number."""
        return all(value.accepts(number) for value, number in zip(self.values, values, strict=False))


# Intervals, as the arguments `contains` and `bound` of a RuleValue.
_COUNT = (lambda x: x == math.floor(x) and 1 <= x <= LARGEST_COUNT, f"an integer in 1..{LARGEST_COUNT}")
_SHARE = (lambda x: 0 < x <= 1, "in (0, 1]")
_OPEN_SHARE = (lambda x: 0 < x < 1, "in (0, 1)")
_CLOSED_SHARE = (lambda x: 0 <= x <= 1, "in [0, 1]")
_NOT_NEGATIVE = (lambda x: x >= 0, "a finite number >= 0")

TOP_W = Rule(0, "top_w")
ALL_RULES = (
    TOP_W,
    Rule(1, "top_k", (RuleValue("top_k", *_COUNT),), top_k),
    Rule(2, "top_p", (RuleValue("top_p", *_SHARE),), top_p),
    Rule(3, "min_p", (RuleValue("min_p", *_CLOSED_SHARE),), min_p),
    Rule(4, "top_h", (RuleValue("top_h", *_SHARE, 0.4), RuleValue("top_h_pool", *_COUNT, 100)), top_h),
    Rule(5, "typical", (RuleValue("typical_p", *_OPEN_SHARE),), typical),
    Rule(6, "epsilon", (RuleValue("epsilon_cutoff", *_OPEN_SHARE),), epsilon),
    Rule(7, "eta", (RuleValue("eta_cutoff", *_OPEN_SHARE),), eta),
    Rule(8, "top_n_sigma", (RuleValue("top_n_sigma", *_NOT_NEGATIVE, 1.0),), top_n_sigma),
    Rule(9, "p_less", (), p_less),
    Rule(10, "min_k", (RuleValue("min_k_tau", *_NOT_NEGATIVE, 3.0),), min_k),
    Rule(11, "none", (), keep_all),
)

RULES: Mapping[str, Rule] = {rule.name: rule for rule in ALL_RULES}
"""Name -> rule."""

RULES_BY_CODE: Mapping[int, Rule] = {rule.code: rule for rule in ALL_RULES}
"""The graph's code -> rule."""

RULE_OF_VALUE: Mapping[str, Rule] = {value.name: rule for rule in ALL_RULES for value in rule.values}
"""Name of a parameter -> its rule."""


def carried_rules(names: Iterable[str]) -> tuple[str, ...]:
    """The rules that an export carries: `names` and Top-W, in the order of their codes.

    Raises ParameterError for an unknown rule.
    """
    given = {TOP_W.name, *names}
    unknown = sorted(given - RULES.keys())
    if unknown:
        raise ParameterError(f"rules has {unknown[0]!r:.60}, but must hold only {', '.join(RULES)}.", "rules")
    return tuple(name for name in RULES if name in given)


def unknown_rule_error(name: object) -> ParameterError:
    """The error for an unknown rule, suggesting the nearest known one."""
    return ParameterError(f"rule is {name!r:.60}: {known_clause(name, RULES)}.", "rule")


@dataclass(frozen=True, slots=True)
class RuleCrop:
    """The kept set of one row.

    kept: token ids, int64 [k], by (logit descending, id ascending), the order of the draw.
    certified: whether the row is greedy or all kept tokens are among the CANDIDATES largest logits.
    ties: `Ties.rule` holds the rule's margin.
    """

    kept: Ids
    certified: bool
    ties: Ties


def kept_set(
    logits: ArrayLike,
    rule: str | int | Rule,
    values: Sequence[float] = (),
    *,
    temperature: float = 1.0,
    selection_temperature: float = 0.0,
) -> RuleCrop:
    """Choose the kept set of one row of edited and masked logits [V].

    logits: float32 or float64; -inf bans a token.
    rule: a name, a code or a Rule; not Top-W, whose kept set `sampling.crop` chooses.
    values: the rule's parameters, at most (v0, v1); further ones are ignored.
    temperature, selection_temperature: as in `TopWParameters`.

    Raises ParameterError for an unknown rule, values and temperatures outside their intervals, and logits that
    `sampling.crop` refuses.
    """
    chosen = rule if isinstance(rule, Rule) else RULES.get(rule) if isinstance(rule, str) else RULES_BY_CODE.get(rule)
    if chosen is None or chosen.choose is None:
        known = ", ".join(f"{each.code} {each.name}" for each in ALL_RULES if each.choose is not None)
        raise ParameterError(f"rule is {rule!r:.60}, but must be one of: {known}.", "rule")
    read_number("temperature", temperature, *RANGES["temperature"])
    read_number("selection_temperature", selection_temperature, *RANGES["selection_temperature"])
    if len(values) < len(chosen.values) or not chosen.accepts(values):
        bounds = ", ".join(f"{value.name} {value.bound}" for value in chosen.values)
        raise ParameterError(f"the rule {chosen.name} has the values {tuple(values)}, but needs {bounds}.", "rule")
    row = checked_row(logits)
    if temperature < GREEDY_BELOW:
        return RuleCrop(np.array([np.argmax(row)], dtype=np.int64), True, Ties())
    ordered = OrderedRow.of(row, selection_temperature or temperature)
    v0, v1, *_ = (*values, 0.0, 0.0)
    places, margin = chosen.choose(ordered, float(v0), float(v1))
    return RuleCrop(ordered.ids[places], bool(places[-1] < CANDIDATES), Ties(rule=margin))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParameters:
    """The sampling rule of a row.

    rule: a name in RULES; None for the rule whose parameter is given, or Top-W if none is.
    top_k and so on: each is a parameter of one rule (see RULE_OF_VALUE); None means not given.
    chosen: the named or implied rule, and `name` and `code` its name and code; the code is the graph's input `rule`.
    values: (v0, v1) of the graph's input `rule_values`, rounded to float32; 0 where the rule has no such parameter.

    Raises ParameterError for an unknown rule, a parameter of another rule, parameters of two rules, a missing parameter
    without a default, and a value that is outside its interval before or after rounding to float32.
    """

    rule: str | None = None
    top_k: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    top_h_pool: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_n_sigma: float | None = None
    min_k_tau: float | None = None

    name: str = field(init=False, repr=False, compare=False)
    code: int = field(init=False, repr=False, compare=False)
    values: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in RULE_OF_VALUE if getattr(self, name) is not None}
        if self.rule is not None:
            chosen = RULES.get(self.rule) if isinstance(self.rule, str) else None
            if chosen is None:
                raise unknown_rule_error(self.rule)
        else:
            implied = {RULE_OF_VALUE[name].name: name for name in given}
            if len(implied) > 1:
                first, second = list(implied.values())[:2]
                raise ParameterError(
                    f"{first} and {second} are parameters of two sampling rules, but a row has one rule; give one.",
                    first,
                    second,
                )
            chosen = RULES[next(iter(implied), TOP_W.name)]
        for name in given:
            owner = RULE_OF_VALUE[name]
            if owner is not chosen:
                raise ParameterError(
                    f"{name} is for rule={owner.name!r}, but another rule was chosen, {chosen.name!r}; give one of "
                    "the two.",
                    name,
                    "rule",
                )
        numbers = []
        for value in chosen.values:
            number = given.get(value.name, value.default)
            if number is None:
                message = f"the rule {chosen.name!r} has no default; give {value.name}, {value.bound}."
                raise ParameterError(message, value.name)
            numbers.append(float(np.float32(read_number(value.name, number, value.accepts, value.bound))))
        object.__setattr__(self, "name", chosen.name)
        object.__setattr__(self, "code", chosen.code)
        object.__setattr__(self, "values", tuple([*numbers, 0.0, 0.0][:2]))

    @property
    def chosen(self) -> Rule:
        return RULES[self.name]


RULE_PARAMETER_NAMES = tuple(each.name for each in fields(RuleParameters) if each.init)
"""`rule` and the parameters of all rules."""
