"""The sampling rules other than Top-W in the native sampler, against their definitions in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import STAGES, Kernel, KernelSamples
from tests.support.masks import masks, packed, unequal_fields
from tests.support.native_cases import instruction_sets, unexplained
from tests.support.rows import Case, random_case
from tests.support.samples import thinned
from topw_deploy.sampling import TopWOptions, sample_row
from topw_deploy.sampling.rules import RULES

UNIFORM = TopWOptions(metric="uniform")
VALUES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "top_k": ((1, 2, 50, 64, 65, 1000, 1025, 2**24), (0,)),
    "top_p": ((1e-6, 0.5, 0.9, 0.95, 0.999999, 1), (0,)),
    "min_p": ((0, 1e-30, 0.01, 0.05, 0.5, 1), (0,)),
    "top_h": ((1e-6, 0.1, 0.4, 0.9, 1), (1, 10, 64, 100, 1024, 1025, 2**24)),
    "typical": ((1e-6, 0.2, 0.5, 0.9, 0.999999), (0,)),
    "epsilon": ((1e-10, 3e-4, 9e-4, 0.02, 0.9), (0,)),
    "eta": ((1e-10, 3e-4, 2e-3, 0.02, 0.9), (0,)),
    "top_n_sigma": ((0, 0.5, 1, 2, 100), (0,)),
    "min_k": ((0, 3, 100, 1e30), (0,)),
}
"""Rule -> values v0 and v1 to choose from; the others have none."""


class Batch:
    """Random rows with a random rule each: every kind of logits, any temperature, edits and masks."""

    def __init__(self, seed: int, vocab: int, rows: int, *, edits: int = 0, with_masks: bool = False) -> None:
        rng = np.random.default_rng([seed, vocab])
        self.cases = [random_case(rng, vocab) for _ in range(rows)]
        self.logits = np.stack([self._varied(rng, case) for case in self.cases])
        self.rules = rng.integers(0, len(RULES), rows)
        names = list(RULES)
        chosen = [VALUES.get(names[code], ((0,), (0,))) for code in self.rules]
        self.values = np.array([[rng.choice(v0), rng.choice(v1)] for v0, v1 in chosen], np.float32)
        wide = np.exp(rng.uniform(np.log(1e-4), np.log(100), (2, rows)))
        self.temperature = np.where(rng.random(rows) < 0.6, rng.uniform(0.3, 2.0, rows), wide[0]).astype(np.float32)
        self.selection = np.where(rng.random(rows) < 0.25, wide[1], 0).astype(np.float32)
        self.uniform = np.array([case.uniform for case in self.cases], np.float32)
        ids = np.stack([rng.permutation(vocab)[:edits] for _ in range(rows)]).astype(np.int64)
        penalty = rng.choice([1.0, 1.3, 0.7, 5.0], ids.shape).astype(np.float32)
        bias = rng.choice([0.0, 1.5, -2.0, -np.inf], ids.shape, p=[0.4, 0.3, 0.2, 0.1]).astype(np.float32)
        self.edits = (ids, penalty, bias)
        self.allowed = packed(masks(rng, rows, vocab)) if with_masks else np.zeros((rows, 0), np.int32)

    @staticmethod
    def _varied(rng: np.random.Generator, case: Case) -> np.ndarray:
        row, kind = case.logits, rng.random()
        if kind < 0.1:
            return np.asarray(row * np.float32(10.0 ** rng.uniform(-3, 3)))
        if kind < 0.2:
            return np.asarray(np.where(rng.random(len(row)) < 0.3, np.float32(-0.0), np.round(row) / 2), np.float32)
        if kind < 0.3:
            raised = row.copy()
            raised[rng.integers(len(row))] = row[np.isfinite(row)].max() + rng.uniform(5, 30)
            return raised
        return row

    def sampled(self, kernel: Kernel) -> KernelSamples:
        columns = {
            "temperature": self.temperature, "selection_temperature": self.selection, "uniform": self.uniform
        }  # fmt: skip
        return kernel.sample(
            self.logits, columns, UNIFORM, None, self.edits, allowed=self.allowed, rules=(self.rules, self.values),
            mass=True, keep_mask=True,
        )  # fmt: skip

    def differences(self, kernel: Kernel) -> list[str]:
        """Unexplained differences from the definitions, including in whether the row is valid."""
        found, lines = self.sampled(kernel), []
        for i, case in enumerate(self.cases):
            parameters = {"temperature": self.temperature[i], "selection_temperature": self.selection[i]}
            mask = self.allowed[i] if self.allowed.shape[1] else None
            edits = tuple(each[i] for each in self.edits)
            with np.errstate(all="ignore"):
                wanted = sample_row(
                    self.logits[i], parameters, UNIFORM, None, self.uniform[i], (edits[0], edits[1], edits[2]), mask,
                    int(self.rules[i]), self.values[i].tolist(),
                )  # fmt: skip
            if min(wanted.next_token, found.next_token[i]) < 0:
                what = ["valid"] if wanted.next_token != found.next_token[i] else []
            else:
                what = list(unexplained(wanted, found, i))
            label = f"{list(RULES)[self.rules[i]]} {self.values[i]}, {case.regime}, {parameters}, {wanted.ties}"
            lines += [f"{each}: {label}" for each in what]
        return lines


@pytest.mark.parametrize("vocab", thinned([1, 2, 17, 64, 65, 128, 300, 1021, 5000], 2))
def test_every_rule_answers_as_its_definition(each_kernel: Kernel, vocab: int) -> None:
    rows = 96 if vocab < 5000 else 36
    assert Batch(0, vocab, rows).differences(each_kernel) == []
    assert Batch(1, vocab, rows // 3, edits=min(vocab, 9)).differences(each_kernel) == []
    assert Batch(2, vocab, rows // 3, edits=min(vocab, 3), with_masks=True).differences(each_kernel) == []


def near_the_cut(logits: np.ndarray, rng: np.random.Generator) -> list[tuple[int, tuple[float, float]]]:
    """Codes and values that place each rule's cut at a relative distance of 1e-7 to 0.1 from a token, at T = 1."""
    drops, k = np.sort(logits.max() - logits.astype(np.float64)), int(rng.integers(1, 30))
    w = np.exp(-drops)
    Z, mean = w.sum(), (w * drops).sum() / w.sum()
    order, terms = np.argsort(np.abs(drops - mean), kind="stable"), np.cumsum((w * (drops + np.log(Z)))[:100])
    exact = {
        "top_p": np.cumsum(w)[k] / Z,
        "min_p": w[k],
        "top_h": terms[k] / terms[-1],
        "typical": np.cumsum(w[order])[k] / Z,
        "epsilon": w[k] / Z,
        "eta": (w[k] / np.exp(-mean)) ** 2,
        "top_n_sigma": drops[k] / drops.std(ddof=1),
    }
    off = 1 + rng.choice([-1, 1], len(exact)) * 10.0 ** rng.uniform(-7, -1, len(exact))
    values = [min(float(value) * each, 0.99) for value, each in zip(exact.values(), off, strict=True)]
    return [(RULES[name].code, (value, 100.0)) for name, value in zip(exact, values, strict=True)]


def test_cuts_next_to_a_token_are_decided_as_by_the_definitions(each_kernel: Kernel) -> None:
    """Near a token, bounds on sums in float32 are not sufficient. The vocabulary has more than 64 blocks."""
    rng = np.random.default_rng(6)
    for width in np.linspace(0.5, 3.5, 20):
        logits = (rng.standard_normal(17_001) * width).astype(np.float32)
        logits[rng.permutation(17_001)[:40]] += np.float32(width)
        given = near_the_cut(logits, rng)
        rules = ([code for code, _ in given], [values for _, values in given])
        found = each_kernel.sample(
            np.repeat(logits[None], len(given), 0), {"uniform": 0.5}, UNIFORM, rules=rules, mass=True, keep_mask=True
        )
        for i, (code, values) in enumerate(given):
            wanted = sample_row(logits, {}, UNIFORM, None, 0.5, rule=code, rule_values=values)
            assert list(unexplained(wanted, found, i)) == [], (width, given[i], wanted.ties)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "values"), [("top_p", (0.9, 0)), ("top_h", (0.4, 100)), ("p_less", (0, 0)),
                                              ("top_n_sigma", (2, 0))])  # fmt: skip
def test_a_banned_token_far_above_the_others_leaves_no_error_in_the_sums(
    each_kernel: Kernel, rule: str, values: tuple[float, float]
) -> None:
    """The first pass sums raw logits, and then subtracts the banned token's part, which rounding must not leave."""
    code = RULES[rule].code
    for seed, above in enumerate((1, 10, 30, 40, 60, 88.8, 100, 1e4, 1e6, 1e19, 1e30)):
        row = np.random.default_rng(seed).normal(0, 1, 4096).astype(np.float32)
        row[3000] = row[:1024].max() + above  # the first eight blocks choose the centre of the sums
        edits = (np.array([3000]), np.ones(1, np.float32), np.array([-np.inf], np.float32))
        found = each_kernel.sample(
            row[None], {}, UNIFORM, None, tuple(each[None] for each in edits),  # type: ignore[arg-type]
            rules=(np.int32(code), np.array(values, np.float32)), keep_mask=True,
        )  # fmt: skip
        wanted = sample_row(row, {}, UNIFORM, edits=edits, rule=code, rule_values=values)
        assert found.keep_mask is not None
        assert np.flatnonzero(found.keep_mask[0]).tolist() == sorted(wanted.kept_ids), above


def test_every_instruction_set_keeps_and_draws_the_same(kernel: Kernel) -> None:
    sets = instruction_sets(kernel)
    if len(sets) == 1:
        pytest.skip("this processor has only one instruction set")
    for vocab in (300, 5000):
        batch, answers = Batch(3, vocab, 120), []
        for name in sets:
            kernel.use_instruction_set(name)
            answers.append(batch.sampled(kernel))
        for other in answers[1:]:
            assert set(unequal_fields(answers[0], other)) <= {"mass", "reports"}  # the mass's last bit may differ


def peaked(vocab: int = 151_936) -> np.ndarray:
    """Logits, float32 [1, vocab]: a likely token, thirty others, and normal ones."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(vocab) * 2.2
    row[rng.permutation(vocab)[:31]] = np.concatenate([[20.0], 18.0 - 0.2 * np.arange(30)])
    return row.astype(np.float32)[None]


def test_few_candidates_settle_the_rows_of_a_language_model(each_kernel: Kernel) -> None:
    logits, names = peaked(), [name for name in RULES if name not in ("top_w", "none")]
    values = {"top_k": (50, 0), "top_h": (0.4, 100), "top_n_sigma": (1, 0), "min_p": (0.05, 0), "min_k": (3, 0)}
    given = [values.get(name, (0.9, 0) if name in ("top_p", "typical") else (1e-3, 0)) for name in names]
    found = each_kernel.sample(
        np.repeat(logits, len(names), 0), options=UNIFORM, rules=([RULES[name].code for name in names], given)
    )
    assert found.certified.all()
    assert {STAGES[stage] for stage in found.reports["stage"]} == {"candidates"}
    assert (found.reports["candidates"] < 300).all()


@pytest.mark.parametrize(
    ("rule", "values"),
    [(-1, (0, 0)), (12, (0, 0)), (2**31 - 1, (0, 0)), (2**32, (0, 0)), (-(2**32) + 1, (1, 0))]
    + [(1, (v, 0)) for v in (0, -1, 1.5, 2**24 + 2, np.nan, np.inf)]
    + [(2, (v, 0)) for v in (0, 1.0000002, np.nan)]
    + [(3, (v, 0)) for v in (-1e-6, 1.0000002, np.nan)]
    + [(4, v) for v in ((0, 100), (1.1, 100), (0.4, 0), (0.4, 1.5), (0.4, np.nan))]
    + [(code, (v, 0)) for code in (5, 6, 7) for v in (0, 1, np.nan)]
    + [(code, (v, 0)) for code in (8, 10) for v in (-1e-6, np.nan, np.inf)],
)
def test_an_unknown_rule_or_a_value_outside_its_interval_makes_its_row_invalid(
    any_kernel: Any, rule: int, values: tuple[float, float]
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    for temperature in (1.0, 0.0):
        found = any_kernel.sample(
            logits, {"temperature": temperature}, UNIFORM, rules=([0, rule, 3], [[0, 0], values, [0.1, np.nan]])
        )
        assert (found.next_token[1], found.kept[1], found.certified[1], found.logprob[1]) == (-1, 0, False, 0)
        assert found.next_token[0] >= 0
        assert found.next_token[2] >= 0
