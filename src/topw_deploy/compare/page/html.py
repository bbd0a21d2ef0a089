"""Writes the page.

Model, prompts and rules may contain anything: all text goes through `_text`, and the page forbids scripts and requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from topw_deploy.compare.collect import Comparison, Sample
from topw_deploy.compare.page.chart import Line, Point, chart, key
from topw_deploy.compare.page.style import STYLE
from topw_deploy.compare.summary import LEVEL, METRICS, RESAMPLES, Metric, Summary
from topw_deploy.compare.table import notes, number, share, title
from topw_deploy.printable import printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(comparison: Comparison, summaries: Sequence[Summary]) -> str:
    """The whole page: plots of all metrics, the table with intervals, definitions, and the texts side by side."""
    name = _text(comparison.request.folder.resolve().name)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Sampling rules: {name}</title>",
            f"<style>{STYLE}{_choices(comparison)}</style>\n</head>\n<body>",
            f"<h1>Sampling rules compared: {name}</h1>",
            f'<p class="muted">{_text(title(comparison))}. All rules and temperatures use the same random numbers.</p>',
            *(f'<p class="muted">{_text(note)}</p>' for note in notes(comparison)),
            *_charts(comparison, summaries),
            *_table(summaries),
            *_definitions(),
            *_texts(comparison),
            "</body>\n</html>\n",
        ]
    )


def _text(value: object) -> str:
    """`value` as HTML text or as a quoted attribute, with control characters shown as escapes."""
    return escape(printable(value, keep="\n\t"))


def _charts(comparison: Comparison, summaries: Sequence[Summary]) -> Iterator[str]:
    labels = [rule.label for rule in comparison.request.rules]
    yield "<section>\n<h2>Metrics over temperature</h2>"
    entries = "".join(f"<li>{key(place)}{_text(label)}</li>" for place, label in enumerate(labels))
    yield f'<ul class="legend" aria-label="Rules">{entries}</ul>\n<div class="charts">'
    for metric in METRICS:
        lines = [Line(label, place, _points(metric, label, summaries)) for place, label in enumerate(labels)]
        drawn = chart(metric.title, lines, logarithmic=metric.logarithmic, share=metric.share)
        if drawn:
            scale = " <small>logarithmic</small>" if metric.logarithmic else ""
            yield f"<figure><figcaption>{metric.title}{scale}</figcaption>{drawn}</figure>"
    yield "</div></section>"


def _points(metric: Metric, label: str, summaries: Sequence[Summary]) -> list[Point]:
    found = [(one.cell.temperature, one.values[metric.name]) for one in summaries if one.cell.rule.label == label]
    return [Point(x, value.value, value.low, value.high) for x, value in found if value.value is not None]


def _table(summaries: Sequence[Summary]) -> Iterator[str]:
    yield f'<h2>Table</h2>\n<p class="muted">With {LEVEL:.0%} intervals over prompts, from {RESAMPLES} resamples.</p>'
    heads = "".join(f"<th scope=col>{metric.title}</th>" for metric in METRICS)
    yield (
        f'<div class="wide"><table>\n<thead><tr><th scope=col>temperature</th><th scope=col>rule</th>{heads}'
        "<th scope=col>tokens</th><th scope=col>seconds</th></tr></thead>\n<tbody>"
    )
    before: float | None = None
    for summary in summaries:
        cell = summary.cell
        first = ' class="first"' if cell.temperature != before else ""
        before = cell.temperature
        values = "".join(f"<td>{_value(metric, summary)}</td>" for metric in METRICS)
        yield (
            f"<tr{first}><td>{cell.temperature:g}</td><th scope=row>{_text(cell.rule.label)}</th>{values}"
            f"<td>{summary.tokens:,}</td><td>{cell.seconds:.1f}</td></tr>"
        )
    yield "</tbody></table></div>"


def _value(metric: Metric, summary: Summary) -> str:
    show, found = share if metric.share else number, summary.values[metric.name]
    low, high = show(found.low), show(found.high)
    return show(found.value) + (f"<small>{low} to {high}</small>" if low != high else "")


def _definitions() -> Iterator[str]:
    yield "<h2>Definitions</h2>\n<dl>"
    yield from (f"<dt>{metric.title}</dt><dd>{_text(metric.definition)}</dd>" for metric in METRICS)
    yield "</dl>"


def _choices(comparison: Comparison) -> str:
    """The style rules that show the texts of the chosen temperature and sample."""
    request = comparison.request
    pairs = [(t, s) for t in range(len(request.temperatures)) for s in range(request.samples)]
    shown = [f".texts:has(#t{t}:checked):has(#s{s}:checked) .t{t}.s{s}" for t, s in pairs]
    return ",\n".join(shown) + " { display: block; }\n"


def _texts(comparison: Comparison) -> Iterator[str]:
    request = comparison.request
    yield '<section class="texts">\n<h2>Texts side by side</h2>\n<div class="choices">'
    yield _radios("t", "Temperature", [f"{value:g}" for value in request.temperatures])
    yield _radios("s", "Text", [str(place + 1) for place in range(request.samples)])
    yield "</div>"
    for index, prompt in enumerate(comparison.prompts):
        yield f'<article><h3 class="prompt"><bdi>{_text(prompt)}</bdi></h3><div class="columns">'
        for column, rule in enumerate(request.rules):
            yield f"<div><h4>{key(column)}{_text(rule.label)}</h4>"
            for t, cell in enumerate(comparison.cells[column :: len(request.rules)]):
                for s, sample in enumerate(cell.samples[index]):
                    about = f"<small>{_about(sample)}</small>"
                    yield f'<div class="text t{t} s{s}">{_text(sample.text)}{about}</div>'
            yield "</div>"
        yield "</div></article>"
    yield "</section>"


def _radios(prefix: str, name: str, values: Sequence[str]) -> str:
    """Radio buttons, the first one checked; hidden if there is one."""
    buttons = "".join(
        f'<label><input type="radio" name="{prefix}" id="{prefix}{place}"{" checked" if place == 0 else ""}>'
        f"{_text(value)}</label>"
        for place, value in enumerate(values)
    )
    hidden = " hidden" if len(values) == 1 else ""
    return f"<fieldset{hidden}><legend>{name}</legend>{buttons}</fieldset>"


def _about(sample: Sample) -> str:
    parts = [f"{sample.drawn:,} tokens"]
    if sample.drawn:
        parts.append(f"kept {number(sum(sample.kept) / sample.drawn)} on average")
        if sample.surprisal is not None:
            parts.append(f"perplexity {number(math.exp(min(sample.surprisal / sample.drawn, 700)))}")
    return ", ".join(parts)
