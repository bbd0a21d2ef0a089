"""`topw stats` with rules other than Top-W, and with several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import Invoke
from tests.support.toy_model import Toy, byte_ids
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.rules import kept_set
from topw_lab.stats.collect import settings_of, softmax
from topw_lab.stats.exact import COMPARED, TOP_W
from topw_lab.stats.exact_report import PHI_ORDER

SHORT = ("--max-new-tokens", 6, "-q")


def report_of(invoke: Invoke, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("stats", *words, "--json", "-").stdout)
    return found


def test_a_rules_kept_sets_are_its_definitions_over_logits_computed_by_hand(
    folder: Path, toy: Toy, invoke: Invoke
) -> None:
    words = (folder, "abc", *SHORT, "--min-p", 0.25, "--temperature", 1.5)
    (setting,) = report_of(invoke, *words)["settings"]
    assert (setting["rule"], setting["agreed"], setting["whole"]["changed"]) == ("min_p", 6, 0)
    assert setting["parameters"] == {"min_p": 0.25, "temperature": 1.5, "selection_temperature": 0.0}
    tokens = byte_ids("abc")
    text = TopWModel.from_pretrained(folder).generate("abc", min_p=0.25, temperature=1.5, seed=0, max_new_tokens=6)
    for place, token in zip(setting["ranges"], text.token_ids, strict=True):
        row = toy.logits(tokens)
        kept = kept_set(row, "min_p", (0.25,), temperature=1.5).kept
        p = softmax(row, 1.5)
        assert place["kept"]["mean"] == len(kept)
        assert place["mass"]["mean"] == pytest.approx(p[kept].sum(), rel=1e-5)
        tokens.append(token)
    printed = invoke("stats", *words).stdout
    assert "rule min_p, min_p 0.25, temperature 1.5" in printed
    assert "The rule min_p uses no distances." in printed


def test_values_of_a_rule_can_be_swept_and_are_checked_before_generating(folder: Path, invoke: Invoke) -> None:
    wide, narrow = report_of(invoke, folder, "abc", *SHORT, "--sweep", "min-p=0,0.9")["settings"]
    assert (wide["label"], narrow["label"]) == ("min_p 0", "min_p 0.9")
    assert wide["whole"]["kept"]["least"] > narrow["whole"]["kept"]["most"]
    with pytest.raises(ParameterError, match=r"min_p is 1.5, but must be in \[0, 1\]"):
        settings_of({}, ["min_p=0.1,1.5"])
    with pytest.raises(ParameterError, match="min_p is for rule='min_p', but another rule was chosen, 'top_k'"):
        invoke("stats", folder, "abc", "--rule", "top_k", "--top-k", 3, "--sweep", "min_p=0.1")


@pytest.mark.slow
def test_the_exact_report_compares_the_texts_rule_under_top_ws_objective(folder: Path, invoke: Invoke) -> None:
    words = (folder, "abc", "de", *SHORT, "--exact", "--exact-steps", 4, "--typical-p", 0.5, "--geom-scale", 0.3)
    (setting,) = report_of(invoke, *words)["exact"]
    assert (setting["rule"], setting["parameters"]["geom_scale"]) == ("typical 0.5", pytest.approx(0.3))
    assert [rule["name"] for rule in setting["rules"]] == [TOP_W, PHI_ORDER, "typical 0.5", *COMPARED]
    assert "texts by the rule typical 0.5" in invoke("stats", *words).stdout


@pytest.mark.slow
def test_seeds_follow_each_other_and_intervals_resample_prompts(folder: Path, invoke: Invoke) -> None:
    words = (folder, "abc", "de", *SHORT, "--temperature", 3, "--lam", 0.5)
    both = report_of(invoke, *words, "--seed", 4, "--seeds", 2, "--exact", "--exact-steps", 24)
    (setting,) = both["settings"]
    assert (setting["prompts"], setting["sequences"], setting["whole"]["steps"], both["seeds"]) == (2, 4, 24, 2)
    alone = [report_of(invoke, *words, "--seed", seed)["settings"][0] for seed in (4, 5)]
    assert [place["kept"]["mean"] for place in setting["ranges"]] == pytest.approx(
        [(a["kept"]["mean"] + b["kept"]["mean"]) / 2 for a, b in zip(*(s["ranges"] for s in alone), strict=True)]
    )
    assert alone[0]["ranges"] != alone[1]["ranges"]
    (exact,) = both["exact"]
    assert (exact["prompts"], exact["sequences"]) == (2, 4)
    assert "2 prompts with 4 texts, 24 steps" in invoke("stats", *words, "--seeds", 2).stdout
