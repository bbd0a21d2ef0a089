"""Verification detects a sampler that is wrong under rules other than Top-W."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.export.verification.reference import SamplerProbe
from topw_deploy.export.verification.sampler import rule_checks
from topw_deploy.manifest import Check, NotCompared
from topw_deploy.sampling import TopWParameters
from topw_deploy.sampling.parameters import TopWOptions

VOCAB = 90
LOGITS = (np.random.default_rng(0).standard_normal((2, VOCAB)) * 2).astype(np.float32)


class Changed:
    """A probe whose answers are changed by `change`."""

    def __init__(self, probe: SamplerProbe, change: Callable[[dict[str, Any]], None]) -> None:
        self._probe, self._change = probe, change

    def run(self, *given: Any) -> dict[str, Any]:
        found = {name: np.array(value) for name, value in self._probe.run(*given).items()}
        self._change(found)
        return found


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> SamplerProbe:
    folder = tmp_path_factory.mktemp("sampler") / "out"
    options = TopWOptions(metric="uniform")
    export_sampler(None, folder, vocab_size=VOCAB, **asdict(options), verify=False)
    return SamplerProbe(folder)


def spoil(name: str, row: int, change: float) -> Callable[[dict[str, Any]], None]:
    def spoiled(found: dict[str, Any]) -> None:
        found[name][row] = not found[name][row] if found[name].dtype == np.bool_ else found[name][row] + change

    return spoiled


def passed(probe: SamplerProbe, change: Callable[[dict[str, Any]], None]) -> list[bool]:
    found = rule_checks(Changed(probe, change), TopWParameters(), LOGITS)  # type: ignore[arg-type]
    return [check.passed for check in found if isinstance(check, Check)]


def test_a_correct_sampler_passes(probe: SamplerProbe) -> None:
    assert passed(probe, lambda found: None) == [True, True]


@pytest.mark.parametrize("name", ["kept", "next_token", "certified"])
def test_a_wrong_answer_fails(probe: SamplerProbe, name: str) -> None:
    assert passed(probe, spoil(name, 13, 1)) == [False, True]


def test_wrong_log_probabilities_fail(probe: SamplerProbe) -> None:
    assert passed(probe, spoil("logprob", 13, 1e-3)) == [True, False]
    assert passed(probe, spoil("logprob", 13, np.nan)) == [True, False]


def test_rows_that_all_tie_are_not_compared(probe: SamplerProbe) -> None:
    (found,) = rule_checks(probe, TopWParameters(), np.zeros((4, VOCAB), np.float32), names=("top_k",))
    assert found == NotCompared(
        "sampler rules", "at least 12 rows without a tie are needed (24 rows, 1 rules, 24 on a tie)"
    )


def test_a_wrong_row_is_a_failure_however_few_there_are(probe: SamplerProbe) -> None:
    changed = Changed(probe, spoil("kept", 0, 1))
    found = list(rule_checks(changed, TopWParameters(), LOGITS[:1], names=("min_p",)))  # type: ignore[arg-type]
    assert [isinstance(check, Check) and check.passed for check in found] == [False, True]
