"""Write the report of `topw compare` as one HTML page without scripts or links, with line charts in SVG.

The model, prompts and rules may contain any text: `_escaped` escapes all of it, and the page's policy forbids scripts
and requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from topw_deploy.text import printable
from topw_lab.compare.comparison import (
    CONFIDENCE,
    RESAMPLES,
    TEXT_METRICS,
    Comparison,
    RuleSummary,
    Sample,
    TextMetric,
    missing_metric_notes,
    number_text,
    share_text,
    title_line,
)

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --text: #1f2933; --muted: #55606b; --line: #d9dee3; --soft: #f5f7f9;
  --c0: #0072b2; --c1: #c44f00; --c2: #00805c; --c3: #a0508f; --c4: #9a6a00; --c5: #505d66; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181c; --text: #e6eaee; --muted: #a3adb7; --line: #343c44; --soft: #1c2228;
    --c0: #56b4e9; --c1: #ff8a4c; --c2: #35cfa2; --c3: #dd93cd; --c4: #f0c04a; --c5: #b4bfc9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 90rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.muted, dd, figcaption small { color: var(--muted); }
.legend, .choices { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .5rem 0; margin: 0 0 .8rem;
  list-style: none; position: sticky; top: 0; background: var(--bg); border-bottom: 1px solid var(--line); }
.legend_key { width: 34px; height: 12px; vertical-align: -1px; margin-right: .35rem; overflow: visible; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg.legend_key { width: 34px; display: inline-block; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg path { fill: none; stroke: currentColor; stroke-width: 1.8; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .whisker { stroke-width: 1; opacity: .75; }
svg .m { fill: currentColor; stroke: none; }
svg .x { stroke-width: 2.2; }
.l0 { color: var(--c0); } .l1 { color: var(--c1); } .l2 { color: var(--c2); }
.l3 { color: var(--c3); } .l4 { color: var(--c4); } .l5 { color: var(--c5); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .45rem; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-size: .85rem; }
tr > :nth-child(2) { text-align: left; }
tr.first > * { border-top: 2px solid var(--muted); }
td small { color: var(--muted); display: block; font-size: .75rem; line-height: 1.2; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
fieldset { border: 0; margin: 0; padding: 0; }
legend { float: left; font-weight: 600; margin-right: .6rem; padding: 0; }
fieldset label { margin-right: .9rem; } fieldset[hidden] { display: none; }
article { border-top: 2px solid var(--line); padding: .6rem 0 1rem; }
.prompt { font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .5rem; font-size: 1rem; }
.columns { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(11rem, 1fr); gap: .8rem;
  overflow-x: auto; }
.columns h4 { margin: 0 0 .3rem; font-size: .9rem; }
.text { display: none; margin: 0; padding: .5rem; background: var(--soft); white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; font-size: .88rem; }
@supports not selector(:has(a)) { .text { display: block; } }
.text small { display: block; margin-top: .4rem; color: var(--muted); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(comparison: Comparison, summaries: Sequence[RuleSummary]) -> str:
    """The whole page: a plot of each metric, a table with intervals, definitions, and the texts side by side."""
    name = _escaped(comparison.request.folder.resolve().name)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Sampling rules: {name}</title>",
            f"<style>{STYLE}{_choice_styles(comparison)}</style>\n</head>\n<body>",
            f"<h1>Sampling rules compared: {name}</h1>",
            f'<p class="muted">{_escaped(title_line(comparison))}. '
            "All rules and temperatures use the same random numbers.</p>",
            *(f'<p class="muted">{_escaped(note)}</p>' for note in missing_metric_notes(comparison)),
            *_chart_parts(comparison, summaries),
            *_table_parts(summaries),
            *_definition_parts(),
            *_text_parts(comparison),
            "</body>\n</html>\n",
        ]
    )


def _escaped(value: object) -> str:
    """`value` as HTML text or as a quoted attribute, with control characters shown as escapes."""
    return escape(printable(value, keep="\n\t"))


def _chart_parts(comparison: Comparison, summaries: Sequence[RuleSummary]) -> Iterator[str]:
    labels = [rule.label for rule in comparison.request.rules]
    yield "<section>\n<h2>Metrics over temperature</h2>"
    entries = "".join(f"<li>{legend_key(place)}{_escaped(label)}</li>" for place, label in enumerate(labels))
    yield f'<ul class="legend" aria-label="Rules">{entries}</ul>\n<div class="charts">'
    for metric in TEXT_METRICS:
        lines = [Line(label, place, _points(metric, label, summaries)) for place, label in enumerate(labels)]
        svg = chart(metric.title, lines, logarithmic=metric.logarithmic, share=metric.share)
        if svg:
            scale = " <small>logarithmic</small>" if metric.logarithmic else ""
            yield f"<figure><figcaption>{metric.title}{scale}</figcaption>{svg}</figure>"
    yield "</div></section>"


def _points(metric: TextMetric, label: str, summaries: Sequence[RuleSummary]) -> list[Point]:
    values = [(each.cell.temperature, each.values[metric.name]) for each in summaries if each.cell.rule.label == label]
    return [Point(x, value.value, value.low, value.high) for x, value in values if value.value is not None]


def _table_parts(summaries: Sequence[RuleSummary]) -> Iterator[str]:
    intervals = f"With {CONFIDENCE:.0%} intervals over prompts, from {RESAMPLES} resamples."
    yield f'<h2>Table</h2>\n<p class="muted">{intervals}</p>'
    heads = "".join(f"<th scope=col>{metric.title}</th>" for metric in TEXT_METRICS)
    yield (
        f'<div class="wide"><table>\n<thead><tr><th scope=col>temperature</th><th scope=col>rule</th>{heads}'
        "<th scope=col>tokens</th><th scope=col>seconds</th></tr></thead>\n<tbody>"
    )
    before: float | None = None
    for summary in summaries:
        cell = summary.cell
        first = ' class="first"' if cell.temperature != before else ""
        before = cell.temperature
        values = "".join(f"<td>{_value_cell(metric, summary)}</td>" for metric in TEXT_METRICS)
        yield (
            f"<tr{first}><td>{cell.temperature:g}</td><th scope=row>{_escaped(cell.rule.label)}</th>{values}"
            f"<td>{summary.tokens:,}</td><td>{cell.seconds:.1f}</td></tr>"
        )
    yield "</tbody></table></div>"


def _value_cell(metric: TextMetric, summary: RuleSummary) -> str:
    text, value = share_text if metric.share else number_text, summary.values[metric.name]
    low, high = text(value.low), text(value.high)
    return text(value.value) + (f"<small>{low} to {high}</small>" if low != high else "")


def _definition_parts() -> Iterator[str]:
    yield "<h2>Definitions</h2>\n<dl>"
    yield from (f"<dt>{metric.title}</dt><dd>{_escaped(metric.definition)}</dd>" for metric in TEXT_METRICS)
    yield "</dl>"


def _choice_styles(comparison: Comparison) -> str:
    """CSS that shows the texts of the chosen temperature and sample."""
    request = comparison.request
    pairs = [(t, s) for t in range(len(request.temperatures)) for s in range(request.samples)]
    rules = [f".texts:has(#t{t}:checked):has(#s{s}:checked) .t{t}.s{s}" for t, s in pairs]
    return ",\n".join(rules) + " { display: block; }\n"


def _text_parts(comparison: Comparison) -> Iterator[str]:
    request = comparison.request
    yield '<section class="texts">\n<h2>Texts side by side</h2>\n<div class="choices">'
    yield _radio_buttons("t", "Temperature", [f"{value:g}" for value in request.temperatures])
    yield _radio_buttons("s", "Text", [str(place + 1) for place in range(request.samples)])
    yield "</div>"
    for index, prompt in enumerate(comparison.prompts):
        yield f'<article><h3 class="prompt"><bdi>{_escaped(prompt)}</bdi></h3><div class="columns">'
        for column, rule in enumerate(request.rules):
            yield f"<div><h4>{legend_key(column)}{_escaped(rule.label)}</h4>"
            for t, cell in enumerate(comparison.cells[column :: len(request.rules)]):
                for s, sample in enumerate(cell.samples[index]):
                    caption = f"<small>{_sample_caption(sample)}</small>"
                    yield f'<div class="text t{t} s{s}">{_escaped(sample.text)}{caption}</div>'
            yield "</div>"
        yield "</div></article>"
    yield "</section>"


def _radio_buttons(prefix: str, name: str, values: Sequence[str]) -> str:
    """Radio buttons, of which the first is checked. A single button is hidden."""
    buttons = "".join(
        f'<label><input type="radio" name="{prefix}" id="{prefix}{place}"{" checked" if place == 0 else ""}>'
        f"{_escaped(value)}</label>"
        for place, value in enumerate(values)
    )
    hidden = " hidden" if len(values) == 1 else ""
    return f"<fieldset{hidden}><legend>{name}</legend>{buttons}</fieldset>"


def _sample_caption(sample: Sample) -> str:
    parts = [f"{sample.drawn:,} token{'s' * (sample.drawn != 1)}"]
    if sample.drawn:
        parts.append(f"kept {number_text(sum(sample.kept) / sample.drawn)} on average")
        if sample.surprisal is not None:
            parts.append(f"perplexity {number_text(math.exp(min(sample.surprisal / sample.drawn, 700)))}")
    return ", ".join(parts)


WIDTH, HEIGHT = 360, 230
COLOURS = 6
"""Number of line colours in the style sheet: --c0, --c1 and so on."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 34
_WHISKER_SHIFT = 2.5  # pixels between the whiskers of neighbouring lines
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_STEPS = (1, 2, 2.5, 5, 10)
_MOST_DECADES = 6
_LEAST_VALUE = 1e-12  # smaller values are drawn here on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a temperature.

    x: temperature.
    y: value.
    low, high: ends of the interval of the value; None without an interval.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """The values of one rule over temperature.

    label: the rule's label.
    place: the rule's place among all rules, which determines colour, marker and dashes.
    """

    label: str
    place: int
    points: Sequence[Point]


def chart(title: str, lines: Sequence[Line], *, logarithmic: bool, share: bool) -> str:
    """Draw an `<svg>` of the lines over temperature, with intervals as whiskers and values as tooltips.

    logarithmic: whether the vertical axis is logarithmic.
    share: whether values are in [0, 1], so that the axis ends at 1 or below.

    Returns "" without points.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    horizontal = _Axis.linear(min(p.x for p in points), max(p.x for p in points), _LEFT + 12, WIDTH - _RIGHT - 12)
    ends = [end for p in points for end in (p.y, p.low, p.high) if end is not None]
    vertical = _vertical_axis(min(ends), max(ends), logarithmic, share)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over temperature">',
        *_grid_parts(vertical),
        *_temperature_labels(horizontal, sorted({p.x for p in points})),
    ]
    for order, line in enumerate(lines):
        shift = (order - (len(lines) - 1) / 2) * _WHISKER_SHIFT
        parts += _line_parts(
            line, [(horizontal.pixel(p.x) + shift, vertical.pixel(p.y)) for p in line.points], vertical
        )
    return "\n".join([*parts, "</svg>"])


def legend_key(place: int) -> str:
    """A small `<svg>` for the legend: line and marker of the rule at `place`."""
    return (
        '<svg class="legend_key" viewBox="0 0 34 12" aria-hidden="true">'
        f'<g class="l{place % COLOURS}"><path d="M1 6H33"{_dash_attribute(place)}/>{_marker(place, 17, 6)}</g></svg>'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels.

    first, last: values at the ends of the axis, or their decimal logarithms.
    start, end: pixels at the ends of the axis.
    ticks: values with a tick.
    logarithmic: whether the axis is logarithmic.
    """

    first: float
    last: float
    start: float
    end: float
    ticks: tuple[float, ...] = ()
    logarithmic: bool = False

    @classmethod
    def linear(cls, first: float, last: float, start: float, end: float) -> _Axis:
        if first == last:  # place a single value in the middle
            first, last = first - 1, last + 1
        return cls(first, last, start, end)

    def pixel(self, value: float) -> float:
        scaled = math.log10(max(value, _LEAST_VALUE)) if self.logarithmic else value
        return self.start + (scaled - self.first) / (self.last - self.first) * (self.end - self.start)


def _vertical_axis(low: float, high: float, logarithmic: bool, share: bool) -> _Axis:
    bottom, top = HEIGHT - _BOTTOM, _TOP
    if logarithmic and low > 0:
        first, last = math.log10(max(low, _LEAST_VALUE)), math.log10(max(high, _LEAST_VALUE))
        margin = max(0.02, (last - first) * 0.05)
        first, last = first - margin, last + margin
        return _Axis(first, last, bottom, top, _logarithmic_ticks(first, last), logarithmic=True)
    high = high if high > 0 else 1.0
    step = _round_step(high / 4)
    count = math.ceil(high / step - 1e-9) or 1
    last = min(1.0, count * step) if share and high <= 1 else count * step
    return _Axis(0.0, last, bottom, top, tuple(i * step for i in range(count + 1) if i * step <= last + 1e-12))


def _round_step(least: float) -> float:
    """The smallest round number >= `least`."""
    unit: float = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in _STEPS if unit * factor >= least * (1 - 1e-9))


def _logarithmic_ticks(first: float, last: float) -> tuple[float, ...]:
    """Ticks of a logarithmic axis from 10**first to 10**last."""
    powers = range(math.floor(first), math.ceil(last) + 1)
    decades = [10.0**power for power in powers if first <= power <= last]
    if len(decades) > _MOST_DECADES:
        return tuple(decades[:: math.ceil(len(decades) / _MOST_DECADES)])
    round_values = [10.0**power * factor for power in powers for factor in (1, 2, 5)]
    within = tuple(tick for tick in round_values if first <= math.log10(tick) <= last)
    if len(within) >= 2:
        return within if len(within) <= _MOST_DECADES else tuple(decades)
    low, high = 10.0**first, 10.0**last  # within a factor of 2.5: use linear ticks
    step = _round_step((high - low) / 4)
    return tuple(step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1))


def _grid_parts(vertical: _Axis) -> list[str]:
    parts = []
    for tick in vertical.ticks:
        y = vertical.pixel(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_tick_text(tick)}</text>')
    return parts


def _temperature_labels(horizontal: _Axis, values: Sequence[float]) -> list[str]:
    y = HEIGHT - _BOTTOM + 15
    parts = [f'<text x="{horizontal.pixel(x):.1f}" y="{y}" text-anchor="middle">{x:g}</text>' for x in values]
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return [*parts, f'<text x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">temperature</text>']


def _line_parts(line: Line, places: Sequence[tuple[float, float]], vertical: _Axis) -> list[str]:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [
        f'<g class="l{line.place % COLOURS}">',
        f'<path d="M{path}"{_dash_attribute(line.place)}/>' if path else "",
    ]
    for (x, y), point in zip(places, line.points, strict=True):
        interval = ""
        if point.low is not None and point.high is not None:
            parts.append(
                f'<path class="whisker" d="M{x:.1f} {vertical.pixel(point.low):.1f}V{vertical.pixel(point.high):.1f}"/>'
            )
            interval = f" [{_tick_text(point.low)}, {_tick_text(point.high)}]"
        text = f"{line.label}, temperature {point.x:g}: {_tick_text(point.y)}{interval}"
        parts.append(f"<g>{_marker(line.place, x, y)}<title>{escape(text)}</title></g>")
    return [*(part for part in parts if part), "</g>"]


def _dash_attribute(place: int) -> str:
    dashes = _DASHES[place // COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def _marker(place: int, x: float, y: float) -> str:
    """The marker at (x, y). Rules of the same colour have the same marker, but other dashes."""
    shapes = (
        f'<circle class="m" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>',
        f'<path class="m" d="M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z"/>',
        f'<path class="m" d="M{x:.1f} {y - 4.2:.1f}l4 7.2h-8z"/>',
        f'<path class="m" d="M{x:.1f} {y - 4.6:.1f}l4.6 4.6-4.6 4.6-4.6-4.6z"/>',
        f'<path class="m" d="M{x:.1f} {y + 4.2:.1f}l4-7.2h-8z"/>',
        f'<path class="x" d="M{x - 3.4:.1f} {y - 3.4:.1f}l6.8 6.8m0-6.8l-6.8 6.8"/>',
    )
    return shapes[place % COLOURS]


def _tick_text(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
