"""The results of a verification: how they are collected, passed between processes and printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from topw_deploy.manifest import Check, NotCompared, Note, Status, Verification


@dataclass(frozen=True)
class PairDistance:
    """A measurement: the median distance of pairs of likely tokens."""

    median: float


Result = Check | NotCompared | Note | PairDistance

# Names of the checks that another exporter's decoder may fail; see `verify_in_subprocess`.
LEFT_PADDED = "left-padded batch logits"
RIGHT_PADDED = "right-padded batch logits"

_KINDS: dict[str, type[Result]] = {
    "check": Check,
    "not_compared": NotCompared,
    "note": Note,
    "pair_distance": PairDistance,
}


@dataclass(frozen=True)
class Outcome:
    """All results of one verification.

    peak: the largest memory of the process in bytes; 0 if unknown.
    median_distance: of pairs of likely tokens; None if it was not measured.
    """

    checks: tuple[Check, ...]
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    peak: int = 0
    median_distance: float | None = None

    @classmethod
    def of(cls, results: Iterable[Result], peak: int = 0) -> Outcome:
        """Sort results by their kind."""
        found = list(results)
        return cls(
            tuple(result for result in found if isinstance(result, Check)),
            tuple(result for result in found if isinstance(result, NotCompared)),
            tuple(result for result in found if isinstance(result, Note)),
            peak,
            next((result.median for result in found if isinstance(result, PairDistance)), None),
        )

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.passed)

    def verification(self) -> Verification:
        """The record for the manifest: "passed" if everything was compared and all checks passed, else "partial"."""
        status: Status = "partial" if self.not_compared or self.failed else "passed"
        return Verification(
            status=status,
            checks=self.checks,
            not_compared=self.not_compared,
            notes=self.notes,
            median_distance=self.median_distance,
        )


def encode_result(result: Result) -> dict[str, Any]:
    """Encode a result as {kind: fields}, for JSON."""
    kind = next(kind for kind, each in _KINDS.items() if isinstance(result, each))
    return {kind: msgspec.to_builtins(result)}


def decode_result(line: dict[str, Any]) -> Result | None:
    """Decode what `encode_result` returned; None for other lines of the worker."""
    for kind, each in _KINDS.items():
        if kind in line:
            return msgspec.convert(line[kind], each)
    return None


def format_result(result: Result) -> str:
    """Format a result as a line such as `-[✓] prefill logits: 3.6e-07 (bound 1e-04; 64 tokens, torch)`.

    The mark is ✓ for a check that passed, x for one that failed, - for what was not compared, and i for a note.
    """
    if isinstance(result, Note):
        return f"  -[i] {result.name}: {result.text}"
    if isinstance(result, PairDistance):
        return f"  -[i] median distance of likely pairs: {result.median:.4g}"
    if isinstance(result, NotCompared):
        return f"  -[-] {result.name}: not compared, {result.reason}"
    mark = "✓" if result.passed else "x"
    return f"  -[{mark}] {result.name}: {result.difference:.2g} (bound {result.bound:.2g}; {result.detail})"
