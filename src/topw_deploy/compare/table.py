"""The report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topw_deploy.compare.collect import Comparison
from topw_deploy.compare.summary import METRICS, Summary
from topw_deploy.reports import aligned, counted

_EXPORT = {
    "logits": "Perplexity needs the graph's output logits: export again with --with-logits.",
    "mass": "Mass needs the graph's output mass: export again with --with-mass.",
}
_IN_TEXT = tuple(metric for metric in METRICS if metric.name != "tokens_per_second")


def lines(comparison: Comparison, summaries: Sequence[Summary]) -> Iterator[str]:
    yield title(comparison)
    yield ""
    header = ("temperature", "rule", *(metric.title for metric in _IN_TEXT), "tokens", "seconds")
    yield from aligned(header, map(_row, summaries), left=2)
    for note in notes(comparison):
        yield ""
        yield note


def title(comparison: Comparison) -> str:
    request = comparison.request
    end = ", past the end of sequence" if request.ignore_eos else ""
    return (
        f"{counted(len(comparison.prompts), 'prompt')}, {counted(request.samples, 'text')} each, at most "
        f"{counted(request.max_new_tokens, 'token')}{end}; seed {request.seed}, {comparison.sampler} sampler"
    )


def notes(comparison: Comparison) -> list[str]:
    """How to get the numbers that are missing."""
    found = [_EXPORT[name] for name in comparison.missing]
    if comparison.request.samples == 1:
        found.append("Self-BLEU needs two texts per prompt.")
    return found


def number(value: float | None) -> str:
    """Three significant digits, or an integer, without an exponent up to 1e9; "-" for None."""
    if value is None:
        return "-"
    if abs(value) >= 1e9:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 99.95 else f"{value:#.3g}"


def share(value: float | None) -> str:
    """Three decimals; "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def _row(summary: Summary) -> list[str]:
    cell = summary.cell
    values = [(share if metric.share else number)(summary.values[metric.name].value) for metric in _IN_TEXT]
    return [f"{cell.temperature:g}", cell.rule.label, *values, f"{summary.tokens:,}", f"{cell.seconds:.1f}"]
