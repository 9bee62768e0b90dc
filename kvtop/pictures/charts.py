"""Line charts as SVG, drawn from plain numbers. Pure; a value that is not known leaves a gap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from kvtop.model import format as fmt
from kvtop.pictures.heatmap import DIM, INK

WIDTH: Final = 520
_HEIGHT: Final = 210
_LEFT, _RIGHT, _TOP, _FOOT = 62, 14, 50, 34
#: Told apart by lightness too.
_COLOURS: Final = ("#fde725", "#35b779", "#5a8fd6", "#c97bd1")
_MARK: Final = "#e3b341"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name, and a value for each point; ``None`` is not known."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        title: What it shows, its unit included.
        lines: At most four; all have as many values as the chart has points.
        write: How a value is written.
        top: Upper end of the axis; ``None`` takes what the values need.
    """

    title: str
    lines: tuple[Line, ...]
    write: Callable[[float | None], str] = fmt.short
    top: float | None = None


def to_svg(chart: Chart, times: Sequence[float], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Return a chart as an SVG element.

    Args:
        chart: What to draw.
        times: Where the points lie, ascending. [s]
        marks: Times at which a line from top to bottom stands, with its text.
    """
    known = [value for line in chart.lines for value in line.values if value is not None]
    top = _round_up(max(known, default=0.0)) if chart.top is None else chart.top
    first, last = times[0], max(times[-1], times[0] + 1e-9)
    wide, high = WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _FOOT

    def x(time_s: float) -> float:
        return _LEFT + (time_s - first) / (last - first) * wide

    def y(value: float) -> float:
        return _TOP + (1 - min(1.0, value / top)) * high

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_HEIGHT}" width="{WIDTH}" height="{_HEIGHT}" '
        f'font-family="ui-monospace, monospace" font-size="12" role="img"><title>{escape(chart.title)}</title>'
        f'<text x="{_LEFT}" y="16" fill="{INK}" font-size="13">{escape(chart.title)}</text>'
    ]
    for share in (0.0, 0.5, 1.0):
        at = y(share * top)
        parts.append(
            f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" stroke="#30363d"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" fill="{DIM}" text-anchor="end">{chart.write(share * top)}</text>'
        )
    for time_s, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end")):
        parts.append(
            f'<text x="{x(time_s):.1f}" y="{_HEIGHT - 12}" fill="{DIM}" text-anchor="{anchor}">'
            f"{fmt.seconds(time_s)}</text>"
        )
    for time_s, text in marks:
        if first <= time_s <= last:
            parts.append(
                f'<path d="M{x(time_s):.1f} {_TOP}V{_HEIGHT - _FOOT}" stroke="{_MARK}" stroke-dasharray="3 3">'
                f"<title>{escape(text)}</title></path>"
            )
    at_x = _LEFT
    for line, colour in zip(chart.lines, _COLOURS, strict=False):
        parts.append(
            f'<rect x="{at_x}" y="27" width="10" height="10" fill="{colour}"/>'
            f'<text x="{at_x + 15}" y="36" fill="{DIM}">{escape(line.name)}</text>'
        )
        at_x += 30 + 8 * len(line.name)
        parts.append(_path(line.values, times, x, y, colour))
    if not known:
        parts.append(f'<text x="{WIDTH / 2}" y="{_TOP + high / 2}" fill="{DIM}" text-anchor="middle">not known</text>')
    return "".join(parts) + "</svg>"


def _path(
    values: Sequence[float | None],
    times: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    colour: str,
) -> str:
    """Return a line that is broken where a value is not known; a value alone is a dot."""
    steps, dots, pen = [], [], "M"
    for i, (time_s, value) in enumerate(zip(times, values, strict=True)):
        if value is None:
            pen = "M"
            continue
        steps.append(f"{pen}{x(time_s):.1f} {y(value):.1f}")
        is_alone = pen == "M" and (i + 1 == len(values) or values[i + 1] is None)
        if is_alone:
            dots.append(f'<circle cx="{x(time_s):.1f}" cy="{y(value):.1f}" r="2" fill="{colour}"/>')
        pen = "L"
    path = f'<path d="{"".join(steps)}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linejoin="round"/>'
    return (path if steps else "") + "".join(dots)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
