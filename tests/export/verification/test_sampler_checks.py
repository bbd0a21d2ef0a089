"""Checks of the sampler need enough rows and find every wrong answer, under Top-W and under other rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.samples import slow
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.export.verification import sampler as module
from topw_deploy.export.verification.reference import SamplerProbe
from topw_deploy.export.verification.sampler import rule_checks, sampler_checks
from topw_deploy.manifest import Check, NotCompared, SamplerManifest, load_manifest
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters

VOCAB = 300
TABLE = np.random.default_rng(5).standard_normal((VOCAB, 16)).astype(np.float32)
ANY = (np.random.default_rng(2).standard_normal((4, VOCAB)) * 2).astype(np.float32)
# One token has all mass: rows with geom_scale >= 0 are certified.
PEAKED = np.where(np.arange(VOCAB) == 7, 40.0, np.linspace(-1, 1, VOCAB)).astype(np.float32)[None].repeat(4, 0)
# Equal logits: the pool cut is always a tie.
FLAT = np.zeros((4, VOCAB), np.float32)

Answers = dict[str, Any]


class Changed:
    """A probe whose answers are changed by `change`. masks: whether it reads masks."""

    def __init__(self, probe: SamplerProbe, change: Callable[[Answers], None], masks: bool = True) -> None:
        self._probe, self._change, self._masks = probe, change, masks

    def run(self, logits: np.ndarray, parameters: Any, uniform: Any, allowed: Any, rules: Any) -> Answers:
        found = self._probe.run(logits, parameters, uniform, allowed if self._masks else None, rules)
        answers = {name: np.array(value) for name, value in found.items()}
        self._change(answers)
        return answers


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> tuple[SamplerManifest, SamplerProbe, Geometry]:
    folder = tmp_path_factory.mktemp("sampler")
    np.save(folder / "table.npy", TABLE)
    options = TopWOptions(top_m=64)
    export_sampler(None, folder / "out", embeddings=folder / "table.npy", **asdict(options), verify=False)
    manifest = load_manifest(folder / "out")
    assert isinstance(manifest, SamplerManifest)
    return manifest, SamplerProbe(folder / "out"), Geometry.from_embeddings(TABLE, "mahalanobis")


Sampler = tuple[SamplerManifest, SamplerProbe, Geometry]


def results(
    sampler: Sampler,
    logits: np.ndarray,
    change: Callable[[Answers], None] = lambda _answers: None,
    masks: bool = True,
) -> Any:
    """masks: whether the sampler reads them."""
    manifest, probe, geometry = sampler
    changed = Changed(probe, change, masks)
    return list(sampler_checks(changed, manifest.sampler, TopWParameters(), geometry, logits))  # type: ignore[arg-type]


@pytest.mark.parametrize("logits", [ANY, PEAKED, FLAT], ids=["any", "peaked", "flat"])
def test_a_right_sampler_passes_whatever_the_models_logits_are(sampler: Sampler, logits: np.ndarray) -> None:
    found = results(sampler, logits)
    assert [(type(each), each.passed) for each in found] == [(Check, True)] * 4
    assert (", 0 of constructed logits" in found[0].detail) == (logits is ANY)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sampler kept sets", lambda answers: answers["kept"].__iadd__(1)),
        ("sampler tokens", lambda answers: answers["next_token"].__ixor__(1)),
        ("sampler certificates", lambda answers: answers["certified"].__ior__(True)),
        ("sampler log-probabilities", lambda answers: answers["logprob"].__iadd__(np.float32(0.01))),
        ("sampler log-probabilities", lambda answers: answers["logprob"].__imul__(np.float32(np.nan))),
    ],
    ids=["kept", "token", "certificate", "logprob", "logprob of NaN"],
)
@pytest.mark.parametrize("logits", [ANY, slow(PEAKED), slow(FLAT)], ids=["any", "peaked", "flat"])
def test_a_wrong_answer_fails_its_check(
    sampler: Sampler, logits: np.ndarray, name: str, change: Callable[[Answers], None]
) -> None:
    assert [each.name for each in results(sampler, logits, change) if not each.passed] == [name]


def test_a_sampler_that_does_not_read_masks_fails(sampler: Sampler) -> None:
    failed = [each for each in results(sampler, ANY, masks=False) if not each.passed]
    assert "sampler tokens" in {each.name for each in failed}
    assert "rows under a mask" in failed[0].detail


def test_too_few_rows_are_not_compared(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "constructed_logits", lambda _vocab: PEAKED)
    (found,) = results(sampler, PEAKED)
    assert isinstance(found, NotCompared)
    assert "12 without a certificate and 6 under a mask are needed (56 rows" in found.reason
    monkeypatch.setattr(module, "constructed_logits", lambda _vocab: FLAT)
    (found,) = results(sampler, FLAT)
    assert isinstance(found, NotCompared)


def test_a_wrong_row_is_a_failure_however_few_there_are(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "constructed_logits", lambda _vocab: PEAKED)
    found = results(sampler, PEAKED, lambda answers: answers["kept"].__iadd__(1))
    assert [each.name for each in found if not each.passed] == ["sampler kept sets"]


@pytest.mark.slow
def test_a_sampler_that_could_not_be_compared_is_exported_as_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEWEST_ROWS", 10_000)
    report = export_sampler(None, tmp_path / "out", vocab_size=50, metric="uniform")
    assert report.verification.status == "partial"
    assert [each.name for each in report.verification.not_compared] == ["sampler"]
    assert load_manifest(tmp_path / "out").verification == report.verification
    names = [check.name for check in report.verification.checks]
    assert names == ["sampler rules", "sampler rules' log-probabilities"]


SMALL = 90  # tokens
RULE_LOGITS = (np.random.default_rng(0).standard_normal((2, SMALL)) * 2).astype(np.float32)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> SamplerProbe:
    folder = tmp_path_factory.mktemp("sampler") / "out"
    export_sampler(None, folder, vocab_size=SMALL, metric="uniform", verify=False)
    return SamplerProbe(folder)


def spoil(name: str, row: int, change: float) -> Callable[[dict[str, Any]], None]:
    def spoiled(found: dict[str, Any]) -> None:
        found[name][row] = not found[name][row] if found[name].dtype == np.bool_ else found[name][row] + change

    return spoiled


def passed(probe: SamplerProbe, change: Callable[[Answers], None]) -> list[bool]:
    found = rule_checks(Changed(probe, change), TopWParameters(), RULE_LOGITS)  # type: ignore[arg-type]
    return [check.passed for check in found if isinstance(check, Check)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda found: None, [True, True]),
        (spoil("kept", 13, 1), [False, True]),
        (spoil("next_token", 13, 1), [False, True]),
        (spoil("certified", 13, 1), [False, True]),
        (spoil("logprob", 13, 1e-3), [True, False]),
        (spoil("logprob", 13, np.nan), [True, False]),
    ],
    ids=["right", "kept", "token", "certificate", "logprob", "logprob of NaN"],
)
def test_a_wrong_answer_under_another_rule_fails(
    probe: SamplerProbe, change: Callable[[Answers], None], expected: list[bool]
) -> None:
    assert passed(probe, change) == expected


def test_rows_that_all_tie_are_not_compared(probe: SamplerProbe) -> None:
    (found,) = rule_checks(probe, TopWParameters(), np.zeros((4, SMALL), np.float32), names=("top_k",))
    assert found == NotCompared(
        "sampler rules", "at least 4 rows without a tie are needed (8 rows, 1 rules, 8 on a tie)"
    )
