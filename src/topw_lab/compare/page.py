"""Write the report of `topw compare` as one HTML page without scripts or links.

The model, prompts and rules may contain any text: `_escaped` escapes all of it, and the page's policy forbids scripts
and requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from importlib import resources

from topw_deploy.text import count_text, printable
from topw_lab.compare.comparison import (
    CONFIDENCE,
    RESAMPLES,
    Comparison,
    missing_metric_notes,
    number_text,
    title_line,
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(comparison: Comparison) -> str:
    """The whole page: a table with intervals, definitions, and the texts side by side."""
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
            yield f"<div><h4>{_escaped(rule.title)}</h4>"
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
