"""Writes the page.

Model, prompts and rules may contain anything: all text goes through `_text`, and the page forbids scripts and requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from topw_deploy.compare.collect import Comparison, Sample
from topw_deploy.compare.page.chart import Line, Point, chart, key
from topw_deploy.compare.summary import LEVEL, METRICS, RESAMPLES, Metric, Summary
from topw_deploy.compare.table import notes, number, share, title
from topw_deploy.plain_text import printable

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
.key { width: 34px; height: 12px; vertical-align: -1px; margin-right: .35rem; overflow: visible; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg.key { width: 34px; display: inline-block; }
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
