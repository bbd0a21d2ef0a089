"""Write the report of `topw compare` as one HTML page without scripts or links, with line charts in SVG.

The model, prompts and rules may contain any text: `_escaped` escapes all of it, and the page's policy forbids scripts
and requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources

from topw_deploy.text import count_text, printable
from topw_lab.compare.comparison import (
    CONFIDENCE,
    RESAMPLES,
    Comparison,
    MetricValue,
    missing_metric_notes,
    number_text,
    title_line,
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(comparison: Comparison) -> str:
    """The whole page: a plot of each metric, a table with intervals, definitions, and the texts side by side."""
    name = _escaped(comparison.folder.resolve().name)
    style = (resources.files(__package__) / "page.css").read_text("utf-8")
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Sampling rules: {name}</title>\n<style>\n{style}</style>\n</head>\n<body>",
        f"<h1>Sampling rules compared: {name}</h1>",
        f'<p class="muted">{_escaped(title_line(comparison))}. '
        "All rules and temperatures use the same random numbers.</p>",
        *(f'<p class="muted">{_escaped(note)}</p>' for note in missing_metric_notes(comparison)),
        *_chart_parts(comparison),
        *_table_parts(comparison),
        "<h2>Definitions</h2>\n<dl>",
        *(f"<dt>{metric.title}</dt><dd>{_escaped(metric.definition)}</dd>" for metric in comparison.metrics),
        "</dl>",
        *_text_parts(comparison),
        "</body>\n</html>\n",
    ])  # fmt: skip


def _escaped(value: object) -> str:
    """`value` as HTML text or as a quoted attribute, with control characters shown as escapes."""
    return escape(printable(value, keep="\n\t"))


def _chart_parts(comparison: Comparison) -> Iterator[str]:
    rules = comparison.rules
    entries = "".join(f"<li>{_legend_key(place)} {_escaped(rule.title)}</li>" for place, rule in enumerate(rules))
    yield f'<h2>Metrics over temperature</h2>\n<ul class="legend">{entries}</ul>\n<div class="charts">'
    for metric in comparison.metrics:
        lines = []
        for place, rule in enumerate(rules):
            values = [(cell.temperature, cell.values[metric.name]) for cell in comparison.cells[place :: len(rules)]]
            lines.append((rule.title, [point for point in values if point[1].value is not None]))
        if any(points for _, points in lines):
            scale = " <small>logarithmic</small>" if metric.logarithmic else ""
            svg = chart(metric.title, lines, logarithmic=metric.logarithmic)
            yield f"<figure><figcaption>{metric.title}{scale}</figcaption>{svg}</figure>"
    yield "</div>"


def _table_parts(comparison: Comparison) -> Iterator[str]:
    yield (
        f'<h2>Table</h2>\n<p class="muted">With {CONFIDENCE:.0%} intervals over prompts, from {RESAMPLES} resamples.'
        "</p>"
    )
    names = ("temperature", "rule", *(metric.title for metric in comparison.metrics), "tokens", "seconds")
    yield f'<div class="wide"><table>\n<tr>{"".join(f"<th scope=col>{name}</th>" for name in names)}</tr>'
    for cell in comparison.cells:
        yield f"<tr><td>{cell.temperature:g}</td><th scope=row>{_escaped(cell.rule.title)}</th>"
        for metric in comparison.metrics:
            value = cell.values[metric.name]
            low, high = number_text(value.low), number_text(value.high)
            interval = f"<small>{low} to {high}</small>" if low != high else ""
            yield f"<td>{number_text(value.value)}{interval}</td>"
        yield f"<td>{cell.tokens:,}</td><td>{cell.seconds:.1f}</td></tr>"
    yield "</table></div>"


def _text_parts(comparison: Comparison) -> Iterator[str]:
    """The texts of each prompt, a column per rule; closed at first."""
    rules = comparison.rules
    yield "<h2>Texts side by side</h2>"
    for index, prompt in enumerate(comparison.prompts):
        yield f'<details><summary><bdi>{_escaped(prompt)}</bdi></summary><div class="columns">'
        for column, rule in enumerate(rules):
            yield f"<div><h4>{_legend_key(column)} {_escaped(rule.title)}</h4>"
            for cell in comparison.cells[column :: len(rules)]:
                for sample in cell.samples[index]:
                    parts = [f"T = {cell.temperature:g}: {count_text(sample.drawn, 'token')}"]
                    if sample.right is not None:
                        parts.append("right" if sample.right else "wrong")
                    if sample.drawn:
                        parts.append(f"kept {number_text(sample.kept / sample.drawn)} on average")
                    if sample.drawn and sample.surprisal is not None:
                        perplexity = math.exp(min(sample.surprisal / sample.drawn, 700))
                        parts.append(f"perplexity {number_text(perplexity)}")
                    yield f'<div class="text"><small>{", ".join(parts)}</small>{_escaped(sample.text)}</div>'
            yield "</div>"
        yield "</div></details>"


Point = tuple[float, MetricValue]
"""A temperature and the value there, which is not None."""

WIDTH, HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 34
_COLOURS = 6  # in the style sheet: --c0, --c1 and so on
_WHISKER_SHIFT = 2.5  # pixels between the whiskers of neighbouring lines
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_TICKS = 4
_LEAST_VALUE = 1e-12  # smaller values are drawn here on a logarithmic axis


def chart(title: str, lines: Sequence[tuple[str, Sequence[Point]]], *, logarithmic: bool) -> str:
    """Draw an `<svg>` of lines over temperature, with intervals as whiskers and values as tooltips.

    lines: (label, points) of each rule. A rule's place determines its colour and dashes.
    logarithmic: whether the vertical axis is logarithmic. A linear one begins at 0.
    """
    temperatures = sorted({x for _, points in lines for x, _ in points})
    ends = [
        end for _, points in lines for _, value in points for end in (value.value, value.low, value.high)
        if end is not None
    ]  # fmt: skip

    def scaled(value: float) -> float:
        return math.log10(max(value, _LEAST_VALUE)) if logarithmic else value

    low, high = scaled(min(ends)) if logarithmic else min(0.0, *ends), scaled(max(ends))
    x_of = _axis(temperatures[0], temperatures[-1], _LEFT + 12, WIDTH - _RIGHT - 12)
    y_of = _axis(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over temperature">']
    for step in range(_TICKS + 1):
        tick = low + (high - low) * step / _TICKS
        parts.append(f'<path class="grid" d="M{_LEFT} {y_of(tick):.1f}H{WIDTH - _RIGHT}"/>')
        text = number_text(10**tick if logarithmic else tick)
        parts.append(f'<text x="{_LEFT - 6}" y="{y_of(tick) + 3.5:.1f}" text-anchor="end">{text}</text>')
    for x in temperatures:
        parts.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">temperature</text>')
    for place, (label, points) in enumerate(lines):
        shift = (place - (len(lines) - 1) / 2) * _WHISKER_SHIFT
        marks = [(x_of(x) + shift, y_of(scaled(value.value or 0.0)), x, value) for x, value in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in marks)
        parts.append(f'<g class="l{place % _COLOURS}">')
        if path:
            parts.append(f'<path d="M{path}"{_dashes(place)}/>')
        for x, y, temperature, value in marks:
            interval = ""
            if value.low is not None and value.high is not None:
                ends_of = [y_of(scaled(end)) for end in (value.low, value.high)]
                parts.append(f'<path class="whisker" d="M{x:.1f} {ends_of[0]:.1f}V{ends_of[1]:.1f}"/>')
                interval = f" [{number_text(value.low)}, {number_text(value.high)}]"
            tip = escape(f"{label}, temperature {temperature:g}: {number_text(value.value)}{interval}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{tip}</title></circle>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _axis(first: float, last: float, start: float, end: float) -> Callable[[float], float]:
    """Maps values to pixels. A single value is in the middle."""
    if first == last:
        first, last = first - 1, last + 1
    return lambda value: start + (value - first) / (last - first) * (end - start)


def _legend_key(place: int) -> str:
    """The line of the rule at `place`."""
    line = f'<path d="M1 6H33"{_dashes(place)}/><circle cx="17" cy="6" r="3.4"/>'
    return f'<svg class="key" viewBox="0 0 34 12" aria-hidden="true"><g class="l{place % _COLOURS}">{line}</g></svg>'


def _dashes(place: int) -> str:
    dashes = _DASHES[place // _COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""
