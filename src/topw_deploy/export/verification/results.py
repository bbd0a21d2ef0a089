"""Verification results: collection, JSON and printing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from topw_deploy.manifest import Check, NotCompared, Note, Verification


@dataclass(frozen=True)
class PairDistance:
    """The median distance of likely pairs of tokens, a measurement."""

    median: float


Result = Check | NotCompared | Note | PairDistance

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
    """All results.

    peak: worker memory in bytes.
    median_distance: of likely pairs of tokens, None if it was not measured.
    """

    checks: tuple[Check, ...]
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    peak: int = 0
    median_distance: float | None = None

    @classmethod
    def of(cls, results: Iterable[Result], peak: int = 0) -> Outcome:
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
        return tuple(check for check in self.checks if not check.passed)

    def verification(self) -> Verification:
        """The manifest's record: "passed" if everything was compared and passed, else "partial"."""
        status = "partial" if self.not_compared or self.failed else "passed"
        return Verification(
            status=status,
            checks=self.checks,
            not_compared=self.not_compared,
            notes=self.notes,
            median_distance=self.median_distance,
        )


def encoded_result(result: Result) -> dict[str, Any]:
    """{kind: fields}, for JSON."""
    kind = next(kind for kind, each in _KINDS.items() if isinstance(result, each))
    return {kind: asdict(result)}


def decoded_result(line: dict[str, Any]) -> Result | None:
    """Inverse of `encoded_result`; None for other lines."""
    for kind, each in _KINDS.items():
        if kind in line:
            return each(**line[kind])
    return None


def printed(result: Result) -> str:
    """`-[✓] prefill logits: 3.6e-07 (bound 1e-04; 64 tokens, torch)`; [x] failed, [-] not compared, [i] note."""
    if isinstance(result, Note):
        return f"  -[i] {result.name}: {result.text}"
    if isinstance(result, PairDistance):
        return f"  -[i] median distance of likely pairs: {result.median:.4g}"
    if isinstance(result, NotCompared):
        return f"  -[-] {result.name}: not compared, {result.reason}"
    mark = "✓" if result.passed else "x"
    return f"  -[{mark}] {result.name}: {result.difference:.2g} (bound {result.bound:.2g}; {result.detail})"
