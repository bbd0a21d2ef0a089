"""A function that carries only some sampling rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.export.sampler.test_rules import SEARCHED, SORTED, values_of
from tests.support.function_cases import FORMS, Case, Scenario, feeds, random_case, run, unexplained
from topw_deploy.errors import ParameterError
from topw_deploy.export.sampler.function import build_function
from topw_deploy.export.sampler.spec import SamplerSpec
from topw_deploy.export.sampler_only import export_sampler, sampler_model
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.rules import RULES

CHOICES = (("top_w",), ("min_p", "top_n_sigma"), ("top_p",), ("typical", "none"), ("top_h",), ("min_k",))


CASES = [
    pytest.param(vocab, rules, form, id=f"{vocab}-{','.join(rules)}-{form}", marks=marks)
    for place, vocab in enumerate((SORTED, SEARCHED))
    for choice, rules in enumerate(CHOICES)
    for number, form in enumerate(FORMS)
    for marks in [() if (choice % 2, choice % 3) == (place, number) else pytest.mark.slow]  # each once is quick
]


def options_of(vocab: int) -> TopWOptions:
    return TopWOptions(metric="uniform", top_m=20)


def spec(form: str, rules: tuple[str, ...], vocab: int) -> SamplerSpec:
    return SamplerSpec(
        options=options_of(vocab),
        vocab_size=vocab,
        branches=form == "branches",
        rules=rules,
        with_keep_mask=True,
        with_mass=True,
    )


@cache
def session(form: str, rules: tuple[str, ...], vocab: int) -> ort.InferenceSession:
    model = ir.to_proto(sampler_model(spec(form, rules, vocab), None, Geometry.uniform()))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def rows(rules: tuple[str, ...], vocab: int) -> list[Case]:
    """Rows of Top-W and of `rules`, some of them greedy."""
    rng = np.random.default_rng(len(rules))
    cases = [random_case(rng, vocab) for _ in range(24)]
    cases[0].parameters["temperature"] = cases[1].parameters["temperature"] = 0.0
    names = [*rules, "top_w"]
    for index, case in enumerate(cases):
        name = names[index % len(names)]
        values = values_of(rng, name)
        cases[index] = replace(case, rule=RULES[name].code, rule_values=values, regime=f"{name}, {case.regime}")
    return cases


@pytest.mark.parametrize(("vocab", "rules", "form"), CASES)
def test_the_carried_rules_equal_the_definitions_and_others_are_invalid(
    vocab: int, rules: tuple[str, ...], form: str
) -> None:
    opened, cases = session(form, rules, vocab), rows(rules, vocab)
    missing = next(name for name in RULES if name not in ("top_w", *rules))
    cases.append(replace(cases[2], rule=RULES[missing].code, rule_values=values_of(np.random.default_rng(0), missing)))
    found = run(opened, feeds(cases))
    answered = {name: values[:-1] for name, values in found.items()}
    scenario = Scenario(options_of(vocab), vocab, 8, "plain", 0)
    assert unexplained(form, scenario, Geometry.uniform(), cases[:-1], answered) == []
    refused = [found[name][-1] for name in ("next_token", "kept", "certified", "logprob", "mass")]
    assert refused == [-1, 0, False, 0, 0]
    assert not found["keep_mask"][-1].any()


def test_a_function_has_only_the_nodes_of_the_rules_that_it_carries() -> None:
    def kinds(*rules: str) -> Counter[str]:
        return Counter(node.op_type for node in build_function(spec("no-branches", rules, SEARCHED)))

    alone, min_p, both, everything = kinds(), kinds("min_p"), kinds("min_p", "top_p"), kinds(*RULES)
    assert alone.total() < min_p.total() < both.total() < everything.total()
    assert (alone["TopK"], everything["TopK"]) == (both["TopK"], both["TopK"] + 1)


def test_a_folder_records_its_rules_and_the_runtime_refuses_others(tmp_path: Path) -> None:
    report = export_sampler(
        None, tmp_path / "out", vocab_size=SORTED, **asdict(options_of(SORTED)), branches=False, rules=("min_p",)
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
