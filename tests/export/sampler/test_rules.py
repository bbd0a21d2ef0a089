"""Sampling rules other than Top-W in every form of the function, against their definitions."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuzz.graphs import fuzz_rules as fuzz
from fuzz.rules import OTHERS
from tests.support import function_cases
from tests.support.function_cases import FORMS, by_hand, feeds, opened, run, unexplained
from tests.support.rows import Case, packed, random_case, some_allowed
from tests.support.rule_rows import WRONG, sampler_case
from tests.support.samples import slow
from topw_deploy.errors import ParameterError
from topw_deploy.export.sampler.function import build_function
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.runtime import TopWSampler
from topw_deploy.runtime.prepare import LONGEST_LIST
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.row import apply_mask
from topw_deploy.sampling.rules import RULES

SORTED, SEARCHED = 300, 4096
"""Vocabularies: below and above the 3840 tokens that the function sorts."""


def any_case(rng: np.random.Generator, vocab: int, name: str) -> Case:
    """A random row of a rule."""
    return random_case(rng, vocab) if name == "top_w" else sampler_case(rng, vocab, name)


def wrong(form: str, vocab: int, cases: list[Case], metric: str = "cosine") -> list[str]:
    scenario, geometry, session = opened(form, vocab, metric, top_m=20)
    return unexplained(f"{form} {vocab}", scenario, geometry, cases, run(session, feeds(cases)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("vocab", "metric"), [slow(33, "uniform"), (SORTED, "cosine"), (SEARCHED, "uniform")])
def test_mixed_batches_equal_the_definitions(form: str, vocab: int, metric: str) -> None:
    rng = np.random.default_rng(vocab)
    cases = [any_case(rng, vocab, str(name)) for name in rng.choice(list(RULES), 96)]
    assert len({case.rule for case in cases}) == len(RULES)
    assert wrong(form, vocab, cases, metric) == []


SMALL = ((SORTED, 20, 1), (SORTED, 20, 2))


def test_the_long_comparison_tries_every_rule_and_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = fuzz(44, 3, ("branches",), SMALL)["branches"]
    assert tally.unexplained == []
    assert tally.rows == dict.fromkeys(OTHERS, 2 * 4)

    def shifted(session: Any, inputs: Any) -> dict[str, np.ndarray]:
        found = run(session, inputs)
        return found | {"next_token": (found["next_token"] + 1) % SORTED}

    monkeypatch.setattr(function_cases, "run", shifted)
    assert len(fuzz(11, 3, ("branches",), SMALL)["branches"].unexplained) > 10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [slow(SORTED), SEARCHED])
def test_sets_larger_than_the_candidates_are_kept_and_drawn_in_order_of_ids(form: str, vocab: int) -> None:
    levels = np.repeat([2.0, 1.0, -1e30], [100, 100, vocab - 200])
    logits = np.random.default_rng(0).permutation(levels)
    cases = [
        by_hand(logits, "top_k", 150),
        by_hand(logits, "top_k", 199, temperature=3.0),
        by_hand(logits, "top_k", 250),
        by_hand(logits, "top_p", 0.6),
        by_hand(logits, "none"),
        by_hand(logits, "min_k", 0.0),
        by_hand(logits, "typical", 0.75),
        by_hand(logits, "top_h", 1.0, 170),
        by_hand(logits, "top_h", 0.5, vocab),
    ]
    cases = [replace(case, uniform=uniform) for case in cases for uniform in (0.0, 0.7301, 0.99999)]
    assert wrong(form, vocab, cases) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [SORTED, slow(SEARCHED)])
def test_masks_and_edits_come_before_the_rule(form: str, vocab: int) -> None:
    scenario, geometry, session = opened(form, vocab, "cosine", top_m=20)
    rng = np.random.default_rng(7)
    cases = [any_case(rng, vocab, str(name)) for name in rng.choice(list(RULES), 24)]
    flags = np.stack([some_allowed(rng, vocab, "half") for _ in cases])
    words = packed(flags)
    inputs = feeds(cases, edits=1) | {"allowed": words}
    best = np.array([np.where(row, case.logits, -np.inf).argmax() for row, case in zip(flags, cases, strict=True)])
    inputs["edit_ids"][:, 0], inputs["edit_bias"][:, 0] = best, -np.inf
    found = run(session, inputs)
    for index, case in enumerate(cases):
        logits = apply_mask(case.logits, words[index])
        logits[best[index]] = -np.inf
        cases[index] = replace(case, logits=logits)
    assert unexplained(form, scenario, geometry, cases, found) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_a_greedy_row_keeps_its_best_token_under_every_rule(form: str, name: str) -> None:
    *_, session = opened(form, SORTED, "cosine", top_m=20)
    logits = np.zeros(SORTED, np.float32)
    logits[[17, 200]] = 3.0
    values = any_case(np.random.default_rng(0), 9, name).rule_values
    found = run(session, feeds([replace(by_hand(logits, name, *values, temperature=0.0), uniform=0.99)]))
    assert found["next_token"].tolist() == [17]
    assert found["kept"].tolist() == [1]
    assert found["certified"].tolist() == [True]
    assert found["logprob"].tolist() == [0.0]
    assert found["mass"].tolist() == [1.0]


@pytest.mark.parametrize("form", FORMS)
def test_unknown_codes_and_values_outside_their_intervals_make_the_row_invalid(form: str) -> None:
    *_, session = opened(form, SORTED, "cosine", top_m=20)
    logits = np.linspace(0, 5, SORTED).astype(np.float32)
    wrong = [(code, values) for code, values in WRONG if abs(code) < 2**31]
    rows = [by_hand(logits, "none", *values, temperature=t) for _, values in wrong for t in (0.0, 1.0)]
    cases = [replace(row, rule=wrong[index // 2][0]) for index, row in enumerate(rows)]
    cases.append(by_hand(logits, "none", np.nan, np.inf))  # unused values have no effect
    cases.append(by_hand(logits, "top_w", np.nan, np.inf))
    found = run(session, feeds(cases))
    for name, nothing in (("next_token", -1), ("kept", 0), ("certified", False), ("logprob", 0), ("mass", 0)):
        assert (found[name][:-2] == nothing).all(), name
    assert not found["keep_mask"][:-2].any()
    assert (found["next_token"][-2:] >= 0).all()


def test_long_vocabularies_are_searched_without_a_longer_sort_than_tensorrt_has() -> None:
    for branches in (True, False):
        spec = SamplerSpec(options=TopWOptions(metric="uniform"), vocab_size=5000, branches=branches)
        sizes = [
            int(node.inputs[1].producer().attributes["value"].as_tensor().numpy()[0])
            for graph_ in _graphs(build_function(spec).graph)
            for node in graph_
            if node.op_type == "TopK" and node.inputs[1].producer().op_type == "Constant"
        ]
        assert max(sizes) == LONGEST_LIST == 3840


def _graphs(graph_: Any) -> list[Any]:
    inner = [a.as_graph() for node in graph_ for a in node.attributes.values() if a.type.name == "GRAPH"]
    return [graph_, *(g for each in inner for g in _graphs(each))]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_another_rule_is_not_answered_as_one_of_top_w(form: str) -> None:
    """Alone: beside rows that need the pool, it does not reach the candidates' answer."""
    *_, session = opened(form, 300)
    logits = np.linspace(0, 20, 300, dtype=np.float32)
    top_w, plain = (run(session, feeds([by_hand(logits, rule)])) for rule in ("top_w", "none"))
    assert top_w["certified"].tolist() == [True]
    assert top_w["kept"][0] < 300
    assert plain["kept"].tolist() == [300]


CHOICES = (("top_w",), ("min_p", "top_n_sigma"), ("top_p",), ("typical", "none"), ("top_h",), ("min_k",))

CHOSEN = [
    pytest.param(vocab, rules, form, id=f"{vocab}-{','.join(rules)}-{form}", marks=marks)
    for place, vocab in enumerate((SORTED, SEARCHED))
    for choice, rules in enumerate(CHOICES)
    for number, form in enumerate(FORMS)
    for marks in [() if (choice % 2, choice % 3) == (place, number) else pytest.mark.slow]  # each once is quick
]


@pytest.mark.parametrize(("vocab", "rules", "form"), CHOSEN)
def test_the_carried_rules_equal_the_definitions_and_others_are_invalid(
    vocab: int, rules: tuple[str, ...], form: str
) -> None:
    scenario, geometry, session = opened(form, vocab, "uniform", 20, rules)
    rng, names = np.random.default_rng(len(rules)), (*rules, "top_w")
    missing = next(name for name in RULES if name not in names)
    cases = [any_case(rng, vocab, name) for name in (*(names[index % len(names)] for index in range(24)), missing)]
    cases[0].parameters["temperature"] = cases[1].parameters["temperature"] = 0.0
    found = run(session, feeds(cases))
    answered = {name: values[:-1] for name, values in found.items()}
    assert unexplained(form, scenario, geometry, cases[:-1], answered) == []
    refused = [found[name][-1] for name in ("next_token", "kept", "certified", "logprob", "mass")]
    assert refused == [-1, 0, False, 0, 0]
    assert not found["keep_mask"][-1].any()


def test_a_folder_records_its_rules_and_the_runtime_refuses_others(tmp_path: Path) -> None:
    report = export_sampler(
        None,
        tmp_path / "out",
        vocab_size=SORTED,
        **asdict(TopWOptions(metric="uniform", top_m=20)),
        branches=False,
        rules=("min_p",),
    )
    assert report.verification.status == "passed"
    assert "1 rules" in next(check.detail for check in report.verification.checks if check.name == "sampler rules")
    sampler = TopWSampler.from_pretrained(tmp_path / "out")
    assert sampler.manifest.sampler.rules == ("top_w", "min_p")
    logits = np.zeros(SORTED, np.float32)
    assert sampler.sample(logits, uniform=0.5, min_p=0.1).kept.tolist() == [SORTED]
    with pytest.raises(
        ParameterError, match="carries only top_w, min_p; export it again with --rules top_w,min_p,top_p"
    ):
        sampler.sample(logits, uniform=0.5, top_p=0.9)
