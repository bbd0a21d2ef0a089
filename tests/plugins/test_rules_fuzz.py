"""A few rows of `fuzz.native_rules`; it detects wrong crops."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz.cuda_rules import OTHERS, report
from fuzz.native_rules import fuzz_native
from tests.support.native_cases import instruction_sets
from topw_deploy.plugins.kernel import Kernel

SMALL = ((1, 32, 0, 0), (90, 10, 0, 0), (300, 5, 0, 0), (1000, 200, 0, 0))


def test_random_rows_of_every_rule_equal_the_reference_in_every_instruction_set(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, used, original = instruction_sets(kernel), set[str](), Kernel.sample

    def recorded(self: Kernel, *given: Any, **named: Any) -> Any:
        used.add(self.instruction_set)
        return original(self, *given, **named)

    monkeypatch.setattr(Kernel, "sample", recorded)
    found = fuzz_native(kernel, 33 * 12, 5, SMALL)
    assert found.differences == []
    assert set(found.rows) == set(OTHERS)
    assert sum(found.tied.values()) < 0.1 * sum(found.rows.values())
    assert used == set(sets)
    assert kernel.instruction_set == sets[0]
    assert "| at a tie |" in report(found)


def test_a_kernel_that_drops_a_token_is_noticed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Kernel.sample

    def shorter(self: Kernel, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        for mask in found.keep_mask:
            mask[mask.argmax()] = False
        found.kept[:] -= 1
        return found

    monkeypatch.setattr(Kernel, "sample", shorter)
    assert len(fuzz_native(kernel, 99, 5, SMALL).differences) > 90
