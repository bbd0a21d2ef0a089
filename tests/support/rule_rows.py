"""Random rows for the sampling rules other than Top-W, some with a value close to a threshold. Imports only numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np

from tests.support.rows import Case, random_case
from topw_deploy.sampling.parameters import TopWParameters
from topw_deploy.sampling.rules import RULES, OrderedRow

_NEAR_SHARE = 0.25  # share of rows that have a value close to a threshold


def sampler_case(rng: np.random.Generator, vocab: int, rule: str) -> Case:
    """A row with usual values; some have a value close to a threshold. A quarter have a second temperature, for the
    draw.
    """
    made = random_case(rng, vocab)
    kind = made.regime.split(", ")[1]
    selected_at, drawn_at = (
        float(np.float32(1.0 if rng.random() < 0.5 else rng.uniform(0.2, 3.0))),
        float(np.float32(rng.uniform(0.2, 3.0))),
    )
    values = _VALUES.get(rule, _none)(rng)
    if rule in _NEAR and rng.random() < _NEAR_SHARE:
        row = OrderedRow.of(made.logits.astype(np.float64), selected_at)
        near = float(_NEAR[rule](row, int(min(rng.exponential(5.0), len(row) - 1))))
        if RULES[rule].accepts((float(np.float32(near)), values[1])):
            values, kind = (near, values[1]), f"near, {kind}"
    v0, v1 = (float(np.float32(value)) for value in values)
    temperatures = (drawn_at, selected_at) if rng.random() < 0.25 else (selected_at, 0.0)
    parameters = asdict(TopWParameters(temperature=temperatures[0], selection_temperature=temperatures[1]))
    uniform = int(rng.integers(0, 1 << 24)) * 2.0**-24
    return Case(made.logits, parameters, uniform, f"{rule}, {kind}", RULES[rule].code, (v0, v1))


def _none(_: np.random.Generator) -> tuple[float, float]:
    return 0.0, 0.0


def _one_of(*numbers: float) -> Callable[[np.random.Generator], tuple[float, float]]:
    return lambda rng: (float(rng.choice(numbers)), 0.0)


def _cutoff(rng: np.random.Generator) -> tuple[float, float]:
    return 10 ** rng.uniform(-6, -0.1), 0.0


def _top_h(rng: np.random.Generator) -> tuple[float, float]:
    pool = 100 if rng.random() < 0.7 else rng.choice([1, 2, 5, 64, 65, 1000])
    return (0.4 if rng.random() < 0.5 else rng.uniform(0.05, 0.99)), float(pool)


_VALUES: Mapping[str, Callable[[np.random.Generator], tuple[float, float]]] = {
    "top_k": _one_of(1, 2, 5, 40, 50, 63, 64, 65, 500),
    "top_p": _one_of(0.05, 0.3, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0),
    "min_p": _one_of(0, 1e-4, 0.02, 0.05, 0.1, 0.5, 1.0),
    "top_h": _top_h,
    "typical": _one_of(0.05, 0.2, 0.5, 0.9, 0.95, 0.99),
    "epsilon": _cutoff,
    "eta": _cutoff,
    "top_n_sigma": _one_of(0, 0.3, 1.0, 1.5, 2.0, 5.0),
    "min_k": _one_of(0, 1.0, 3.0, 10.0, 300.0, 1e5),
}


def _sigma(row: OrderedRow, place: int) -> float:
    deviation = row.logits.std(ddof=1) if len(row) > 1 else 0.0
    return float((row.logits[0] - row.logits[place]) / deviation) if deviation > 0 else 1.0


def _typical(row: OrderedRow, place: int) -> float:
    order = np.argsort(np.abs(row.surprise - row.total_surprise / row.total), kind="stable")
    return float(row.weights[order[: place + 1]].sum() / row.total)


def _entropy_share(row: OrderedRow, place: int) -> float:
    terms = np.cumsum((row.weighted_surprise + row.weights * row.log_total)[:100])
    return float(terms[min(place, len(terms) - 1)] / terms[-1]) if terms[-1] > 0 else 0.4


_NEAR: Mapping[str, Callable[[OrderedRow, int], float]] = {
    "top_p": lambda row, place: row.weights[: place + 1].sum() / row.total,
    "min_p": lambda row, place: row.weights[place],
    "top_h": _entropy_share,
    "typical": _typical,
    "epsilon": lambda row, place: row.weights[place] / row.total,
    "eta": lambda row, place: row.weights[place] / row.total,
    "top_n_sigma": _sigma,
    "min_k": lambda row, place: (place + 1) * (row.logits[0] - row.logits[-1]),
}
"""Rule -> the value that puts its threshold at the token in a given place of the order."""


KINDS = ("bell", "close", "steps", "equal", "zeros", "zipf", "ramp", "heavy", "banned", "peaked", "scaled")

_EXTREMES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "top_k": ((1, 2, 50, 63, 64, 65, 300, 1000, 2000, 1 << 24), (0,)),
    "top_p": ((1e-6, 0.1, 0.5, 0.9, 0.95, 0.99999994, 1), (np.nan,)),
    "min_p": ((0, 1e-30, 0.01, 0.05, 0.5, 1), (0,)),
    "top_h": ((1e-6, 0.1, 0.4, 0.9, 1), (1, 3, 100, 1000, 1025, 5000, 1 << 24)),
    "typical": ((1e-6, 0.01, 0.2, 0.9, 0.95, 0.999999), (0,)),
    "epsilon": ((1e-40, 1e-9, 3e-4, 0.01, 0.5, 0.9), (0,)),
    "eta": ((1e-10, 1e-9, 2e-3, 0.3, 0.9), (0,)),
    "top_n_sigma": ((0, 0.5, 1, 2, 5, 100), (0,)),
    "min_k": ((0, 1, 3, 20, 300, 5e4, 1e30), (0,)),
}


def rule_logits(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    """Logits of one of KINDS, float32 [vocab], at least one finite. Some are rounded to eighths, which makes ties."""
    normal = rng.standard_normal(vocab)
    logits = {
        "bell": lambda: normal * 3,
        "close": lambda: normal * 0.1,
        "steps": lambda: rng.integers(-3, 4, vocab) * 1.0,
        "equal": lambda: np.zeros(vocab),
        "zeros": lambda: np.where(rng.random(vocab) < 0.3, -0.0, np.round(normal) / 2),
        "zipf": lambda: normal * 0.1 - np.log(np.arange(1, vocab + 1)) * rng.uniform(0.5, 3),
        "ramp": lambda: np.linspace(0, rng.uniform(1, 30), vocab),
        "heavy": lambda: rng.standard_t(2, vocab) * 5,
        "banned": lambda: np.where(rng.random(vocab) < 0.5, -np.inf, normal * 2),
        "peaked": lambda: np.where(np.arange(vocab) == 0, rng.uniform(5, 45), normal),
        "scaled": lambda: normal * 10.0 ** rng.uniform(-3, 3),
    }[kind]()
    if kind in ("bell", "close", "zipf") and rng.random() < 0.3:
        logits = np.round(logits * 8) / 8
    if not np.isfinite(logits).any():
        logits[0] = 1
    return rng.permutation(logits).astype(np.float32)


def rule_case(rng: np.random.Generator, vocab: int, rule: str | None = None) -> Case:
    """A row with common or extreme values and temperatures. rule: None for any rule including Top-W."""
    chosen = str(rng.choice(list(RULES))) if rule is None else rule
    kind = str(rng.choice(KINDS))
    extreme = 10.0 ** rng.uniform(-4, 2, 2)
    parameters = asdict(TopWParameters(lam=1.5, beta=2.75)) | {
        "temperature": rng.choice([0.3, 0.7, 1, 1.5, 2, extreme[0]]),
        "selection_temperature": rng.choice([0, 0, 0, 0.5, 1, 3, extreme[1]]),
    }
    parameters = {name: float(np.float32(value)) for name, value in parameters.items()}
    first, second = (float(rng.choice(values)) for values in _EXTREMES.get(chosen, ((0,), (0,))))
    logits, uniform = rule_logits(rng, vocab, kind), float(rng.random(dtype=np.float32))
    return Case(logits, parameters, uniform, kind, RULES[chosen].code, (first, second))


WRONG: list[tuple[int, tuple[float, float]]] = [
    *((code, (0, 0)) for code in (-1, 12, 2**31 - 1, 2**32)),
    (-(2**32) + 1, (1, 0)),
    *((1, (v, 0)) for v in (0, -1, 1.5, 2**24 + 2, np.nan, np.inf)),
    *((2, (v, 0)) for v in (0, 1.0000002, np.nan)),
    *((3, (v, 0)) for v in (-1e-6, 1.0000002, np.nan)),
    *((4, values) for values in ((0, 100), (1.1, 100), (0.4, 0), (0.4, 1.5), (0.4, np.nan))),
    *((code, (v, 0)) for code in (5, 6, 7) for v in (0, 1, np.nan)),
    *((code, (v, 0)) for code in (8, 10) for v in (-1e-6, np.nan, np.inf)),
]
"""(code, values): unknown rules, and values outside their intervals in float32."""
