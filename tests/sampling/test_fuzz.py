"""A few rows of `fuzz.sampler`; it detects wrong shortcuts of the torch sampler and wrong kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fuzz.rules import OTHERS, fuzz_native
from fuzz.rules import report as report_rules
from fuzz.sampler import fuzz, report
from fuzz.visits import SMALL
from tests.support.kernel import Kernel
from tests.support.native_cases import instruction_sets, opened
from topw_deploy.sampling import torch as module

ROWS = 900
RULE_SIZES = ((1, 32, 0, 0), (90, 10, 0, 0), (300, 5, 0, 0), (1000, 200, 0, 0))


def unexplained(rows: int = ROWS, seed: int = 5) -> list[str]:
    return fuzz(rows, seed, ["torch"], SMALL).unexplained


@pytest.mark.long
def test_random_and_adversarial_rows_keep_the_references_sets() -> None:
    outcome = fuzz(3000, 6, ["torch", "native"], SMALL)
    assert outcome.unexplained == []
    assert sum(outcome.certified.values()) < 0.75 * 3000
    assert {"logit at threshold", "equal phi", "pool cut tied", "invalid"} <= set(outcome.rows)
    assert min(outcome.tied, outcome.nearly_tied - outcome.tied) > 50
    assert re.search(r"\| unexplained +\| +0 \| +0 \|", report(outcome))


@pytest.mark.slow
def test_a_row_test_that_is_too_strict_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._Pool._may_be_kept
    monkeypatch.setattr(module._Pool, "_may_be_kept", lambda self, phi, best: right(self, phi, best) & (self.p > 0.3))
    assert len(unexplained()) > 3


@pytest.mark.slow
def test_candidates_that_settle_every_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._crop_by_candidates

    def hasty(*arguments: Any) -> Any:
        valid, settled, crop = right(*arguments)
        crop.kept[valid & ~settled] = 1
        return valid, valid | settled, crop

    monkeypatch.setattr(module, "_crop_by_candidates", hasty)
    assert len(unexplained()) > 20


@pytest.mark.slow
def test_equal_logits_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found, place = values.flip(1).sort(dim=1, descending=True, stable=True)
        return found[:, :count], values.shape[1] - 1 - place[:, :count]

    monkeypatch.setattr(module, "_first_by_value", backwards)
    assert len(unexplained()) > 20


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return opened(tmp_path_factory.mktemp("native"))


def test_random_rows_of_every_rule_equal_the_reference_in_every_instruction_set(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, used, original = instruction_sets(kernel), set[str](), Kernel.sample

    def recorded(self: Kernel, *given: Any, **named: Any) -> Any:
        used.add(self.instruction_set)
        return original(self, *given, **named)

    monkeypatch.setattr(Kernel, "sample", recorded)
    found = fuzz_native(kernel, 33 * 12, 5, RULE_SIZES)
    assert found.differences == []
    assert set(found.rows) == set(OTHERS)
    assert sum(found.tied.values()) < 0.1 * sum(found.rows.values())
    assert used == set(sets)
    assert kernel.instruction_set == sets[0]
    assert "| at a tie |" in report_rules(found)


def test_a_kernel_that_drops_a_token_is_noticed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Kernel.sample

    def shorter(self: Kernel, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        for mask in found.keep_mask:
            mask[mask.argmax()] = False
        found.kept[:] -= 1
        return found

    monkeypatch.setattr(Kernel, "sample", shorter)
    assert len(fuzz_native(kernel, 99, 5, RULE_SIZES).differences) > 90
