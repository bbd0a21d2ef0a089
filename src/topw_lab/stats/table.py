"""The report of `topw stats` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topw_deploy.plain_text import count_text
from topw_deploy.sampling.rules import TOP_W
from topw_lab.stats.summary import Distribution, MovedToken, PositionRange, SettingSummary
from topw_lab.tables import table

_UNREADABLE = "�"  # replaces bytes that are not UTF-8


def report_lines(summaries: Sequence[SettingSummary], most_tokens: int = 10) -> Iterator[str]:
    """The lines of the report: a table of all settings if there are several, then the details of each.

    most_tokens: maximum number of tokens per list.
    """
    if len(summaries) > 1:
        yield from _settings_table(summaries)
        yield ""
    for number, summary in enumerate(summaries):
        if number:
            yield ""
        yield from _setting_details(summary, most_tokens)


def verdict(summary: SettingSummary) -> str:
    """One sentence that says whether distances changed crops."""
    if not summary.steps:
        return "There were no steps: every prompt fills the context, or no tokens were requested."
    if summary.rule != TOP_W.name:
        return f"The rule {summary.rule} uses no distances."
    if summary.changed:
        per_step = (summary.added_total + summary.dropped_total) / summary.changed
        return (
            f"Geometry changed the crop at {_percentage(summary.changed, summary.steps)} of the steps "
            f"({summary.changed} of {summary.steps}): tokens dropped {summary.dropped_total:,}, "
            f"kept {summary.added_total:,}, {per_step:.1f} per changed step."
        )
    if summary.certified == summary.steps:
        return f"Geometry never acted: all {summary.steps} steps were certified, so distances could not change a crop."
    uncertified = summary.steps - summary.certified
    return (
        f"Geometry never acted: at the {uncertified} uncertified of {summary.steps} steps, distances changed nothing."
    )


def token_text(moved: MovedToken) -> str:
    """The token's text, quoted and escaped; its id if the text is empty or not complete UTF-8."""
    return f"<token {moved.token}>" if _UNREADABLE in moved.text or not moved.text else repr(moved.text)


def _settings_table(summaries: Sequence[SettingSummary]) -> Iterator[str]:
    header = (
        "setting", "steps", "certified", "geometry acted", "one token", "kept mean", "median", "most", "mass",
        "entropy", "of crop",
    )  # fmt: skip
    rows = []
    for summary in summaries:
        whole = summary.whole
        percentages = (_percentage(summary.certified, summary.steps), _changed_share(summary, summary))
        numbers = _mean_cells(whole) if whole is not None else ["-"] * 7
        rows.append([summary.label or "as given", str(summary.steps), *percentages, *numbers])
    yield from table(header, rows).split("\n")


def _mean_cells(place: PositionRange) -> list[str]:
    kept = [f"{place.kept.mean:.2f}", f"{place.kept.median:g}", f"{place.kept.most:g}"]
    return [
        _percentage(place.single, place.steps),
        *kept,
        f"{place.mass.mean:.3f}",
        f"{place.entropy.mean:.2f}",
        f"{place.crop_entropy.mean:.2f}",
    ]


def _setting_details(summary: SettingSummary, most_tokens: int) -> Iterator[str]:
    rule = [] if summary.rule == TOP_W.name else [f"rule {summary.rule}"]
    yield ", ".join([*rule, *(f"{name} {value:g}" for name, value in summary.parameters.items())])
    texts = "" if summary.sequences == summary.prompts else f" with {count_text(summary.sequences, 'text')}"
    yield f"{count_text(summary.prompts, 'prompt')}{texts}, {count_text(summary.steps, 'step')}"
    yield verdict(summary)
    if summary.whole is None:
        return
    if summary.agreed < summary.steps:
        yield (
            f"At {summary.steps - summary.agreed} of {summary.steps} steps the graph reported a different crop: the "
            "last bits of the logits differ, at a near-tie."
        )
    yield f"certified  {_percentage(summary.certified, summary.steps)}"
    yield ""
    header = ("position", "steps", "certified", "geometry acted", "one token", "kept", "mass", "entropy", "of crop")
    rows = [_range_cells(place, summary) for place in summary.ranges] if len(summary.ranges) > 1 else []
    yield from table(header, [*rows, ["all", *_range_cells(summary.whole, summary)[1:]]]).split("\n")
    for title, tokens in (
        ("kept only because of geometry", summary.added),
        ("dropped only because of geometry", summary.dropped),
    ):
        if tokens:
            yield ""
            listed = ", ".join(f"{token_text(moved)} {moved.steps}" for moved in tokens[:most_tokens])
            rest = f", and {len(tokens) - most_tokens} more" if len(tokens) > most_tokens else ""
            yield f"{title} (steps): {listed}{rest}"


def _changed_share(part: PositionRange | SettingSummary, summary: SettingSummary) -> str:
    """The share of the steps whose crop distances changed; "-" under a rule without distances."""
    return _percentage(part.changed, part.steps) if summary.rule == TOP_W.name else "-"


def _range_cells(place: PositionRange, summary: SettingSummary) -> list[str]:
    name = f"{place.first}" if place.first == place.last else f"{place.first}-{place.last}"
    certified, single = (_percentage(count, place.steps) for count in (place.certified, place.single))
    percentages = [certified, _changed_share(place, summary), single]
    kept = f"{place.kept.median:g} ({place.kept.p10:g}-{place.kept.p90:g})"
    others = [_median_cell(numbers) for numbers in (place.mass, place.entropy, place.crop_entropy)]
    return [name, str(place.steps), *percentages, kept, *others]


def _median_cell(numbers: Distribution) -> str:
    return f"{numbers.median:.2f} ({numbers.p10:.2f}-{numbers.p90:.2f})"


def _percentage(count: int, total: int) -> str:
    """`count` / `total` in per cent. 100.0 % and 0.0 % are exact: other shares round to 99.9 % and 0.1 % at most."""
    if not total:
        return "-"
    share = 100 * count / total
    if 0 < count < total:
        share = min(max(share, 0.1), 99.9)
    return f"{share:.1f} %"
