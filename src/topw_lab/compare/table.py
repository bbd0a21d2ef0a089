"""The report of `topw compare` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topw_deploy.plain_text import count_text
from topw_lab.compare.collect import Comparison
from topw_lab.compare.summary import TEXT_METRICS, RuleSummary
from topw_lab.tables import table

_MISSING_OUTPUT_NOTES = {
    "logits": "Perplexity needs the graph's output logits: export again with --with-logits.",
    "mass": "Mass needs the graph's output mass: export again with --with-mass.",
}
_TABLE_METRICS = tuple(metric for metric in TEXT_METRICS if metric.name != "tokens_per_second")


def report_lines(comparison: Comparison, summaries: Sequence[RuleSummary]) -> Iterator[str]:
    """The lines of the report: a title, a table with a row per rule and temperature, and notes."""
    yield title_line(comparison)
    yield ""
    header = ("temperature", "rule", *(metric.title for metric in _TABLE_METRICS), "tokens", "seconds")
    yield from table(header, map(_row_cells, summaries), left=2).split("\n")
    for note in missing_metric_notes(comparison):
        yield ""
        yield note


def title_line(comparison: Comparison) -> str:
    """What was generated, on one line."""
    request = comparison.request
    end = ", past the end of sequence" if request.ignore_eos else ""
    return (
        f"{count_text(len(comparison.prompts), 'prompt')}, {count_text(request.samples, 'text')} each, at most "
        f"{count_text(request.max_new_tokens, 'token')}{end}; seed {request.seed}, {comparison.sampler} sampler"
    )


def missing_metric_notes(comparison: Comparison) -> list[str]:
    """How to get the metrics that are missing."""
    missing = [_MISSING_OUTPUT_NOTES[name] for name in comparison.missing]
    if comparison.request.samples == 1:
        missing.append("Self-BLEU needs two texts per prompt.")
    return missing


def number_text(value: float | None) -> str:
    """`value` with three significant digits or as an integer, without an exponent below 1e9; "-" for None."""
    if value is None:
        return "-"
    if abs(value) >= 1e9:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 99.95 else f"{value:#.3g}"


def share_text(value: float | None) -> str:
    """`value` with three decimals; "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def _row_cells(summary: RuleSummary) -> list[str]:
    cell = summary.cell
    values = [
        (share_text if metric.share else number_text)(summary.values[metric.name].value) for metric in _TABLE_METRICS
    ]
    return [f"{cell.temperature:g}", cell.rule.label, *values, f"{summary.tokens:,}", f"{cell.seconds:.1f}"]
