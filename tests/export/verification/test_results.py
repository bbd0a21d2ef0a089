"""Verification results: counting, serialising, printing."""

from __future__ import annotations

import json

import pytest

from topw_deploy.export.verification.run import Outcome, Result, decode_result, encode_result, format_result
from topw_deploy.manifest import Check, NotCompared, Note

GOOD, BAD = Check("prefill", True, 1e-7, 1e-4, "torch"), Check("decode", False, 1.0, 1e-4, "4 steps")
MISSING, NOTE = NotCompared("generation", "the source is not available"), Note("kept sets", "24 of 32 equal")


@pytest.mark.parametrize("result", [GOOD, BAD, MISSING, NOTE])
def test_a_result_survives_the_way_between_the_processes(result: Result) -> None:
    assert decode_result(json.loads(json.dumps(encode_result(result)))) == result
    assert decode_result({"peak": 5}) is None


@pytest.mark.parametrize(
    ("results", "status"),
    [([GOOD], "passed"), ([GOOD, NOTE], "passed"), ([GOOD, MISSING], "partial"), ([GOOD, BAD], "partial")],
)
def test_only_what_was_compared_and_passed_counts_as_passed(results: list[Result], status: str) -> None:
    verification = Outcome.of(results).verification()
    assert verification.status == status
    assert [*verification.checks, *verification.not_compared, *verification.notes] == results


def test_each_kind_of_result_has_a_mark_of_its_own() -> None:
    assert [format_result(result) for result in (GOOD, BAD, MISSING, NOTE)] == [
        "  -[✓] prefill: 1e-07 (bound 0.0001; torch)",
        "  -[x] decode: 1 (bound 0.0001; 4 steps)",
        "  -[-] generation: not compared, the source is not available",
        "  -[i] kept sets: 24 of 32 equal",
    ]
