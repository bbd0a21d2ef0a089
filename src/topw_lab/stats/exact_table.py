"""The report of `topw stats --exact` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topw_deploy.plain_text import count_text
from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_lab.stats.exact_summary import Estimate, ExactSummary, Standing
from topw_lab.tables import table

_STANDING_COLUMNS = ("median (95 %)", "p95", "most", "relative", "p95", "most")


def exact_lines(summaries: Sequence[ExactSummary]) -> Iterator[str]:
    """The lines that `--exact` adds to the report."""
    yield "Exact objective F = W1(p, q) + lam H(q) - beta log mass. Intervals: 95 %, bootstrap over prompts."
    if not summaries:
        yield "There were no steps: every prompt fills the context, or no tokens were requested."
        return
    yield ""
    yield "Top-W's crop compared with the best prefix: how often it is as good, and how far its F is above."
    yield from table(
        ("setting", "order", "steps", "kept median", "best median", "optimal (95 %)", *_STANDING_COLUMNS),
        [row for summary in summaries for row in _top_w_rows(summary)],
    ).split("\n")
    for summary in summaries:
        yield ""
        yield from _rule_lines(summary)


def _top_w_rows(summary: ExactSummary) -> Iterator[list[str]]:
    start = [str(summary.steps), f"{summary.crops[0].kept_median:g}"]
    first = [summary.label or "as given", "probability", *start]
    yield [*first, f"{summary.likeliest.median:g}", *_standing_cells(summary.crops[0].standing)]
    yield ["", "phi", *start, f"{summary.phi.median:g}", *_standing_cells(summary.in_phi)]


def _rule_lines(summary: ExactSummary) -> Iterator[str]:
    if summary.label:
        yield f"{summary.label}:"
    texts = "" if summary.sequences == summary.prompts else f" with {count_text(summary.sequences, 'text')}"
    if summary.rule != TOP_W_RULE.name:
        yield f"texts by the rule {summary.rule}; F has Top-W's parameters"
    yield (
        f"lam {summary.lam:g}, beta {summary.beta:g}, geom_scale {summary.geom_scale:g}, selection temperature "
        f"{summary.selection_temperature:g}; {summary.steps:,} of {count_text(summary.of, 'step')}, "
        f"{count_text(summary.prompts, 'prompt')}{texts}; {summary.tokens:,.0f} tokens with mass {summary.mass:.3f} on "
        "average"
    )
    if not summary.metric:
        yield "The distance is not a metric (cosine): W1 is the least transport cost, and Top-W's J does not bound F."
    for name, best in (("probability", summary.likeliest), ("phi", summary.phi)):
        yield (
            f"best prefix of the {name} order: median {best.median:g} tokens (10 to 90 %: {best.p10:.0f} to "
            f"{best.p90:.0f}), every token at {_share_text(best.whole)} of the steps; F {best.value:.4g} on average; "
            f"{best.solved:.1f} transport problems solved per step"
        )
    header = ("rule", "kept mean", "mass", "W1", "entropy", "F mean", "lowest F", "optimal (95 %)", *_STANDING_COLUMNS)
    rows = []
    for crop in summary.crops:
        means = [f"{number:.4g}" for number in (crop.transport, crop.entropy, crop.value)]
        sizes = [f"{crop.kept:.1f}", f"{crop.mass:.3f}"]
        rows.append([crop.name, *sizes, *means, f"{100 * crop.lowest.value:.1f} %", *_standing_cells(crop.standing)])
    yield from table(header, rows).split("\n")
    for crop in summary.crops:
        if crop.cut:
            yield f"{crop.name}: kept tokens outside the analysed ones are left out at {count_text(crop.cut, 'step')}"
        if crop.standing.better:
            better = count_text(crop.standing.better, "step")
            yield f"{crop.name}: F below any prefix of the probability order at {better}"


def _standing_cells(standing: Standing) -> list[str]:
    excess, relative = standing.excess, standing.relative
    return [
        _share_text(standing.optimal),
        f"{excess.median.value:.3g}{_interval_text(excess.median, 1, '.3g')}",
        f"{excess.p95:.3g}",
        f"{excess.most:.3g}",
        *(f"{100 * number:.3g} %" for number in (relative.median.value, relative.p95, relative.most)),
    ]


def _share_text(share: Estimate) -> str:
    return f"{100 * share.value:.1f} %{_interval_text(share, 100, '.1f')}"


def _interval_text(estimate: Estimate, factor: float, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({factor * estimate.low:{form}}..{factor * estimate.high:{form}})"
