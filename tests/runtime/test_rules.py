"""Sampling rules of requests: by name, by parameter, per row, from configurations, and on external logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.prepared import params
from tests.support.toy_model import VOCAB, Load, Toy, byte_ids, export_sampler
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.prepare import LONGEST_LIST, Limits, longest_pool
from topw_deploy.sampling import RuleParameters, TopWParameters, sample_row

HOT: dict[str, Any] = {"temperature": 3.0, "seed": 4, "max_new_tokens": 8, "ignore_eos": True}
CHOICES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.1}, "top_h": {"top_h_pool": 50},
    "typical": {"typical_p": 0.6}, "epsilon": {"epsilon_cutoff": 0.01}, "eta": {"eta_cutoff": 0.01},
    "top_n_sigma": {}, "p_less": {}, "min_k": {"min_k_tau": 20.0}, "none": {},
}  # fmt: skip


def expected(toy: Toy, prompt: str, **rule: Any) -> list[tuple[int, int, bool]]:
    rows = toy.expect(byte_ids(prompt), 8, TopWParameters(temperature=3.0), 4, rule=RuleParameters(**rule))
    return [(row.next_token, row.kept, row.certified) for row in rows]


def answer(result: Any) -> list[tuple[int, int, bool]]:
    return list(zip(result.token_ids, result.kept, result.certified, strict=True))


@pytest.mark.parametrize("rule", CHOICES)
def test_every_rule_generates_what_its_definition_draws(model: TopWModel, toy: Toy, rule: str) -> None:
    result = model.generate("ab", **HOT, rule=rule, **CHOICES[rule])
    assert answer(result) == expected(toy, "ab", rule=rule, **CHOICES[rule])
    assert result.rule == rule


def test_a_parameter_alone_chooses_its_rule(model: TopWModel) -> None:
    for rule, chosen in CHOICES.items():
        if chosen:
            named = model.generate("ab", **HOT, rule=rule, **chosen)
            assert model.generate("ab", **HOT, **chosen) == named
    assert model.generate("ab", **HOT).rule == "top_w"


def test_each_row_has_its_own_rule(model: TopWModel, toy: Toy) -> None:
    results = model.generate(["ab", "cd", "ef"], **HOT, rule=["min_p", None, "none"], min_p=[0.1, None, None])
    assert [result.rule for result in results] == ["min_p", "top_w", "none"]
    wanted = [{"min_p": 0.1}, {}, {"rule": "none"}]
    for result, prompt, rule in zip(results, ("ab", "cd", "ef"), wanted, strict=True):
        assert answer(result) == expected(toy, prompt, **rule)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "min-p"}, "rule is 'min-p': did you mean min_p"),
        ({"rule": "min_p"}, r"the rule 'min_p' has no default; give min_p, in \[0, 1\]"),
        ({"top_k": 2.5}, "top_k is 2.5, but must be an integer"),
        ({"top_p": 1e-50}, "in float32 too"),
        ({"top_k": 3, "top_p": 0.9}, "top_k and top_p are parameters of two sampling rules"),
        ({"rule": "top_w", "top_p": 0.9}, "top_p is for rule='top_p', but another rule was chosen, 'top_w'"),
        ({"min_p": [0.1, 0.2]}, "min_p has 2 values for 1 prompts"),
    ],
)
def test_an_invalid_rule_is_refused_before_anything_runs(model: TopWModel, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        model.generate(["ab"], **HOT, **given)


def test_a_requests_configuration_names_or_implies_a_rule(model: TopWModel) -> None:
    wanted = model.generate("ab", **HOT, min_p=0.1)
    assert model.generate("ab", **HOT, generation_config={"min_p": 0.1}) == wanted
    assert model.generate("ab", **HOT, generation_config={"min_p": 0.1, "top_k": 0, "top_p": 1.0}) == wanted
    stated = {"rule": "min_p", "min_p": 0.1, "top_k": 9}
    with pytest.warns(UserWarning, match="sets top_k=9, which has no effect here"):
        named = model.generate("ab", **HOT, generation_config=stated)
    assert named == wanted
    assert model.generate("ab", **HOT, rule="top_w", generation_config={"min_p": 0.1}).rule == "top_w"
    assert model.generate("ab", **HOT, rule="min_p", generation_config={"min_p": 0.1}) == wanted


def test_a_models_configuration_has_to_name_the_rule(load: Load) -> None:
    with pytest.warns(UserWarning, match="sets top_k=20, top_p=0.8, which has no effect here: name a `rule`"):
        plain = load(Toy.random(0), generation_config={"top_k": 20, "top_p": 0.8})
    assert plain.generate("ab", **HOT).rule == "top_w"
    with pytest.warns(UserWarning, match="sets top_p=0.8, which"):
        chosen = load(Toy.random(0), generation_config={"rule": "top_k", "top_k": 20, "top_p": 0.8})
    assert chosen.generate("ab", **HOT) == plain.generate("ab", **HOT, top_k=20)
    assert chosen.generate("ab", **HOT, min_p=0.2) == plain.generate("ab", **HOT, min_p=0.2)


def test_external_logits_take_rules_per_row(tmp_path: Path, sampler_choice: str) -> None:
    folder = export_sampler(tmp_path / "out", Toy.random(0))
    sampler = TopWSampler.from_pretrained(folder, provider="cpu", sampler=sampler_choice)
    logits = np.random.default_rng(0).standard_normal((3, sampler.vocab_size)).astype(np.float32)
    found = sampler.sample(logits, uniform=0.5, rule=["top_k", "none", None], top_k=[7, None, None])
    for index, rule in enumerate((RuleParameters(top_k=7), RuleParameters(rule="none"))):
        wanted = sample_row(logits[index], TopWParameters(), uniform=0.5, rule=rule.code, rule_values=rule.values)
        assert (found.next_token[index], found.kept[index]) == (wanted.next_token, wanted.kept)
    assert found.next_token[2] == sampler.sample(logits[2], uniform=0.5).next_token[0]
    with pytest.raises(ParameterError, match="top_k is 0, but must be"):
        sampler.sample(logits, uniform=0.5, top_k=0)
    with pytest.raises(ParameterError, match="top_k has 2 values for 3 rows"):
        sampler.sample(logits, uniform=0.5, top_k=[1, 2])


def test_a_pool_of_top_h_that_the_function_would_cut_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = TopWSampler.from_pretrained(export_sampler(tmp_path / "out", Toy.random(0)), provider="cpu")
    info = replace(sampler.manifest.sampler, vocab_size=5000)
    assert longest_pool("graph", info) == LONGEST_LIST
    exact = (("native", info), ("plugin", info))
    assert {longest_pool(*each) for each in (*exact, ("graph", replace(info, vocab_size=LONGEST_LIST)))} == {None}
    monkeypatch.setattr("topw_deploy.runtime.sampler.longest_pool", lambda *_: 100)
    logits = np.zeros(VOCAB, np.float32)
    for allowed in ({"top_h_pool": 100}, {"top_h_pool": VOCAB}, {"top_h": 1.0, "top_h_pool": 200}, {"top_k": 200}):
        sampler.sample(logits, uniform=0.5, **allowed)
    with pytest.raises(
        ParameterError, match=f"top_h_pool is 200, but .* at most 100, or the whole vocabulary of {VOCAB}"
    ):
        sampler.sample(logits, uniform=0.5, top_h_pool=200)
    limits = Limits(10, VOCAB, longest_pool=100)
    with pytest.raises(ParameterError, match="top_h_pool is 200, but"):
        params({"top_h_pool": 200}, prompts=[[5]], limits=limits)
    assert params({"top_h_pool": 100}, prompts=[[5]], limits=limits).rule.values[1] == 100
