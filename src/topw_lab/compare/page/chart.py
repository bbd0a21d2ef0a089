"""Draw line charts as SVG. The colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
