"""The report of `topw stats --exact`: counts, intervals, table, picture and command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.invoking import Invoke
from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy import install
from topw_deploy.errors import ManifestError, MissingPackageError, ParameterError
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling import RuleParameters, TopWParameters
from topw_lab.stats.collect import AnalysedText, CollectedRuns
from topw_lab.stats.exact import COMPARED, TOP_W, ExactStep, ObjectiveValue
from topw_lab.stats.exact_report import PHI_ORDER, ExactSummary, save_exact_plot, summarise_exact

SHORT = ("--max-new-tokens", 4, "-q", "--exact")
ACTING = ("--lam", 0.6, "--beta", 3, "--init-top-p", 0.4, "--geom-scale", 0.3)


def value(total: float, kept: int = 3) -> ObjectiveValue:
    return ObjectiveValue(kept, 0.5, 0.25 * total, 1.0, total)


def step(
    top_w: float, best: float, phi: float | None = None, others: float = 9.0, cut: tuple[str, ...] = ()
) -> ExactStep:
    rules = {TOP_W: value(top_w)} | {name: value(others) for name in COMPARED}
    found = [value(total, 40) for total in (best, best if phi is None else phi)]
    return ExactStep(40, 0.9, found[0], found[1], rules, cut, True)


def summary(*sequences: list[ExactStep], label: str = "") -> ExactSummary:
    request: Any = SimpleNamespace(params=SimpleNamespace(top_w=TopWParameters(), rule=RuleParameters()))
    nothing: Any = None
    runs = [AnalysedText(request, nothing, [nothing] * 7, 7, dict(enumerate(steps, 2))) for steps in sequences]
    (found,) = summarise_exact(CollectedRuns([(RuleSetting(label, {}), runs)], {}, len(sequences)))
    return found


def test_steps_are_counted_and_ties_of_f_are_optimal() -> None:
    found = summary([step(2.0, 2.0), step(2.0, 1.0), step(3.0, 3.0 - 1e-7)], [step(1.5, 2.0, phi=1.5), step(9.0, 6.0)])
    assert (found.steps, found.of, found.sequences) == (5, 14, 2)
    top_w = found.rules[0]
    assert top_w.optimal.value == pytest.approx(4 / 5 - 1 / 5)
    assert top_w.median.value == 0.0
    assert found.rules[1].optimal.value == pytest.approx(3 / 5)
    assert top_w.lowest == 1.0
    assert found.likeliest.whole.value == 1.0
    assert [place[:2] for place in found.positions] == [(1, 3), (1, 4), (1, 5), (2, 3), (2, 4)]


@pytest.mark.slow
def test_intervals_resample_prompts_and_hold_the_estimate() -> None:
    mixed = summary(*[[step(2.0, 2.0 - number % 2)] * 4 for number in range(10)]).rules[0].optimal
    assert mixed.value == 0.5
    assert mixed.low is not None
    assert mixed.high is not None
    assert 0.1 <= mixed.low < 0.4 < 0.6 < mixed.high <= 0.9  # 10 prompts, not 40 steps: +-0.31
    never = summary(*[[step(2.0, 1.0)] * 4] * 10).rules[0].optimal
    assert (never.value, never.low, never.high) == (0.0, 0.0, pytest.approx(0.3085, abs=1e-4))  # binomial, n = 10
    always = summary(*[[step(2.0, 2.0)] * 4] * 10).rules[0].optimal
    assert (always.low, always.high) == (pytest.approx(0.6915, abs=1e-4), 1.0)
    assert summary([step(2.0, 1.0)]).rules[0].optimal.low is None


def test_a_swept_rule_is_drawn_under_its_own_setting(tmp_path: Path) -> None:
    def step_of(rule: str) -> ExactStep:
        usual = step(2.0, 1.0)
        return replace(usual, rules={TOP_W: usual.rules[TOP_W], rule: value(5.0), **usual.rules})

    swept = [summary([step_of(f"min_p {tau}")], label=f"min_p {tau}") for tau in (0.2, 0.3)]
    save_exact_plot(swept, tmp_path / "p.svg", "title")
    text = (tmp_path / "p.svg").read_text()
    for name in ("min_p 0.2", "min_p 0.3", *COMPARED, TOP_W):
        assert f"<!-- {name} -->" in text


@pytest.mark.slow
def test_the_command_prints_writes_and_draws_the_comparison(folder: Path, invoke: Invoke, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--plot", tmp_path / "p.png")
    result = invoke("stats", folder, "abc", "de", *SHORT, *ACTING, "--exact-steps", 5, "--exact-pool", 60, *files)
    assert "Exact objective F" in result.stdout
    (setting,) = json.loads((tmp_path / "r.json").read_text("utf-8"))["exact"]
    assert (setting["steps"], setting["of"], setting["sequences"], setting["tokens"]) == (5, 8, 2, 60)
    assert {rule["name"] for rule in setting["rules"]} == {TOP_W, PHI_ORDER, *COMPARED}
    for _, _, found in setting["positions"]:
        best = found["likeliest"]
        assert best["total"] <= found["rules"]["every token"]["total"] + 1e-6
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    plain = invoke("stats", folder, "abc", "de", "--max-new-tokens", 4, "-q", *ACTING).stdout
    assert result.stdout.startswith(plain)


def test_the_uniform_metric_needs_no_table(tmp_path: Path, invoke: Invoke) -> None:
    out = export(tmp_path / "out", Toy.random(2))
    report = json.loads(invoke("stats", out, "abc", *SHORT, "--json", "-").stdout)
    for _, _, found in report["exact"][0]["positions"]:
        for rule in found["rules"].values():
            assert rule["transport"] == pytest.approx(1 - rule["mass"], abs=1e-9)


def test_settings_without_an_exact_objective_are_refused_before_generating(
    folder: Path, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("stats", folder, "abc", *SHORT)
    with pytest.raises(ParameterError, match="temperature is 0, but the exact objective needs at least 1e-05"):
        invoke(*words, "--sweep", "temperature=1,0")
    with pytest.raises(ParameterError, match="geom_scale is -1, but the exact"):
        invoke(*words, "--geom-scale", -1)
    with pytest.raises(ParameterError, match="exact_pool is 39, but must be at least the export's top_m of 40"):
        invoke(*words, "--exact-pool", 39)
    assert "--exact-steps and --exact-pool need --exact" in invoke("stats", folder, "abc", "--exact-steps", 3).stderr
    with pytest.raises(ManifestError, match="sampler"):
        invoke("stats", export_sampler(tmp_path / "alone", Toy.random(2)), "abc", *SHORT)
    monkeypatch.setattr(install, "is_importable", lambda module: module != "ot")
    with pytest.raises(MissingPackageError, match=r"`topw stats --exact` needs POT, which is not installed; run: "):
        invoke(*words)
