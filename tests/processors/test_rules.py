"""The other sampling rules in transformers' `generate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper

from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.processors import RuleLogitsProcessor
from topw_deploy.sampling.rules import RULES, kept_set

from .tiny import kept_sets

PROMPTS = torch.tensor([[1, 5, 9, 30], [1, 7, 200, 3]])
CHOICES = [
    {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"rule": "top_h"}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.02}, {"rule": "top_n_sigma"}, {"rule": "p_less"}, {"rule": "min_k"}, {"rule": "none"},
]  # fmt: skip


def test_every_rule_but_top_w_is_tried():
    assert {RuleLogitsProcessor(**choices).rule.chosen.name for choices in CHOICES} == set(RULES) - {"top_w"}


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_generate_keeps_what_the_definition_keeps(model, choices):
    processor = RuleLogitsProcessor(**choices, temperature=1.5)
    torch.manual_seed(0)
    out = model.generate(
        PROMPTS, **processor.generate_arguments() | {"temperature": 1.5}, max_new_tokens=4,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    for logits, scores in zip(out.logits, out.scores, strict=True):
        wanted = [
            kept_set(row, processor.rule.chosen, processor.rule.values, temperature=1.5).kept.tolist()
            for row in np.asarray(logits)
        ]
        assert kept_sets(scores) == [sorted(kept) for kept in wanted]


def test_rules_independent_of_the_temperature_accept_any(model):
    sigma = RuleLogitsProcessor(top_n_sigma=1.0)
    assert "temperature" not in sigma.generate_arguments()
    model.generate(PROMPTS, **sigma.generate_arguments(), temperature=3.0, max_new_tokens=1)
    with pytest.raises(ParameterError, match=r"generate draws at temperature 3.0, but the processor has 1.0"):
        model.generate(
            PROMPTS, **RuleLogitsProcessor(min_p=0.1).generate_arguments() | {"temperature": 3.0}, max_new_tokens=1
        )
    fixed = RuleLogitsProcessor(min_p=0.1, selection_temperature=1.0)
    model.generate(PROMPTS, **fixed.generate_arguments(), temperature=3.0, max_new_tokens=1)


def test_a_greedy_processor_keeps_the_largest_logit():
    scores = torch.tensor([[0.0, 3.0, 1.0]])
    assert RuleLogitsProcessor(typical_p=0.5, temperature=0.0)(PROMPTS, scores).isfinite().tolist() == [
        [False, True, False]
    ]


def test_generate_must_not_cut_the_crop_again(model):
    processor = RuleLogitsProcessor(rule="p_less")
    with pytest.raises(ParameterError, match=r"generate applies top_k=50 after p_less \(its default\)"):
        model.generate(PROMPTS, logits_processor=[processor], do_sample=True, max_new_tokens=1)


def test_an_invalid_row_is_named():
    scores = torch.zeros(2, 5)
    scores[1, 2] = torch.nan
    with pytest.raises(GenerationError, match=r"row 1 of the batch has NaN.*before min_p"):
        RuleLogitsProcessor(min_p=0.1)(PROMPTS, scores)


def test_min_p_is_transformers_min_p():
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(RuleLogitsProcessor(min_p=0.1)(PROMPTS, scores), MinPLogitsWarper(0.1)(PROMPTS, scores))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, "the rule is top_w, which needs embeddings; use TopWLogitsProcessor"),
        ({"minp": 0.1}, "unknown parameter 'minp': did you mean min_p"),
        ({"min_p": 2.0}, "min_p is 2.0, but must be in"),
        ({"min_p": 0.1, "temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(choices, message):
    with pytest.raises(ParameterError, match=message):
        RuleLogitsProcessor(**choices)
