"""Verification results: counting, printing."""

from __future__ import annotations

import pytest

from topw_deploy.export.verification.run import Result, format_result, record_of
from topw_deploy.manifest import Check, NotCompared, Note

GOOD, BAD = Check("prefill", True, 1e-7, 1e-4, "torch"), Check("decode", False, 1.0, 1e-4, "4 steps")
MISSING, NOTE = NotCompared("generation", "the source is not available"), Note("kept sets", "24 of 32 equal")


@pytest.mark.parametrize(
    ("results", "status"),
    [([GOOD], "passed"), ([GOOD, NOTE], "passed"), ([GOOD, MISSING], "partial"), ([GOOD, BAD], "partial")],
)
def test_only_what_was_compared_and_passed_counts_as_passed(results: list[Result], status: str) -> None:
    verification = record_of(results)
    assert verification.status == status
    assert [*verification.checks, *verification.not_compared, *verification.notes] == results


def test_each_kind_of_result_has_a_mark_of_its_own() -> None:
    assert [format_result(result) for result in (GOOD, BAD, MISSING, NOTE)] == [
        "  -[✓] prefill: 1e-07 (bound 0.0001; torch)",
        "  -[x] decode: 1 (bound 0.0001; 4 steps)",
        "  -[-] generation: not compared, the source is not available",
        "  -[i] kept sets: 24 of 32 equal",
    ]
