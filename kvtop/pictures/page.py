"""The report of a recorded run as a page: figures, charts, block maps at key moments. One file that loads nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import msgspec

from allocator.metrics import ratio, tier_numbers
from kvtop.advisor import advise
from kvtop.errors import UserError
from kvtop.model import format as fmt
from kvtop.panels.command_text import describe
from kvtop.pictures.charts import Chart, Line
from kvtop.pictures.charts import to_svg as chart_svg
from kvtop.pictures.heatmap import DIM, INK, PAPER
from kvtop.pictures.heatmap import to_svg as map_svg
from kvtop.recording.reader import Moment, Recording

#: Moments that the charts are made of, block maps, and rows of a table, at most.
_POINTS: Final = 240
_MAX_MAPS: Final = 8
_MAX_ROWS: Final = 200
_STYLE: Final = f"""
body {{ background: {PAPER}; color: {INK}; margin: 2em auto; max-width: 1080px; padding: 0 1em;
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5em; margin-bottom: 0; }} h2 {{ font-size: 1.15em; margin: 2em 0 .6em; }}
h3 {{ font-size: 1em; margin: 1.4em 0 .4em; }} p, li {{ max-width: 72em; }} .dim {{ color: {DIM}; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(15em, 1fr)); gap: .7em; }}
.card {{ border: 1px solid #30363d; border-radius: 6px; padding: .6em .9em; }}
.card b {{ display: block; font-size: 1.35em; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1em; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .15em 1.2em .15em 0; vertical-align: top; }}
th {{ color: {DIM}; font-weight: normal; }} td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment as the charts need it.

    Attributes:
        number: The moment.
        step, time_s: When.
        values: Name → value of what is told at a moment.
        totals: Name → total since the run began.
    """

    number: int
    step: int
    time_s: float
    values: dict[str, float | None]
    totals: dict[str, float]


def to_page(recording: Recording, title: str, span: tuple[int, int]) -> bytes:
    """Return a page that reports on the part of a run between two steps.

    Args:
        recording: The run.
        title: The heading, such as the recording's name.
        span: The first and the last step. Figures are totals since the run began, up to the last step.

    Raises:
        UserError: The recording has no such steps.
        RecordingError: A moment is damaged.
    """
    first, last = span
    if first > recording.last_step or last < recording.first_step:
        raise UserError(
            f"--steps {first}..{last}: the recording has steps {recording.first_step} to {recording.last_step}"
        )
    points = [_point(recording.moment(number)) for number in recording.sample(first, last, _POINTS)]
    end = recording.moment(points[-1].number)
    notes = [note for note in recording.notes if points[0].step <= note.step <= points[-1].step]
    step_s = end.snapshot.time_s / end.snapshot.step if end.snapshot.step else 0.0
    marks = [(note.step * step_s, f"step {fmt.count(note.step)}: {note.text}") for note in notes]
    times = [point.time_s for point in points]
    commands = [done for done in recording.commands() if points[0].step <= done.step <= points[-1].step]
    parts = [
        _heading(recording, title, points, end.snapshot.block_size),
        f'<h2>Figures</h2><p class="dim">Since the run began, as of step {fmt.count(end.snapshot.step)}.</p>',
        _cards(end),
        '<h2>Over virtual time</h2><div class="charts">',
        *(chart_svg(chart, times, marks) for chart in _charts(points)),
        "</div><h2>Block maps at key moments</h2>",
        *_maps(recording, points, [(note.step, note.text) for note in notes]),
        "<h2>Advice</h2>",
        _advice(end),
        _table("Marks", ("step", "mark"), [(fmt.count(note.step), note.text) for note in notes]),
        _table(
            "Commands",
            ("step", "command", "outcome"),
            [(fmt.count(c.step), describe(c.command), ("" if c.outcome.ok else "refused: ") + c.outcome.message)
             for c in commands],
        ),
        _table("Settings", ("option", "value"), _settings(recording)),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}: report</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    ).encode()


def _point(moment: Moment) -> Point:
    snapshot, counters = moment.snapshot, moment.snapshot.counters
    device = tier_numbers(moment.device, snapshot.block_size, snapshot.slab_size)
    host = None if moment.host is None else tier_numbers(moment.host, snapshot.block_size, snapshot.slab_size)
    values: dict[str, float | None] = {
        "usage": device.usage_ratio,
        "cached": ratio(device.cached, device.total),
        "host": None if host is None else host.usage_ratio,
        "external": device.external_ratio,
        "internal": device.internal_ratio,
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "swapped": snapshot.num_swapped,
        "hits": ratio(counters.hit_blocks, counters.query_blocks),
    }
    totals = {name: float(getattr(counters, name)) for name in counters.__struct_fields__ if name in _TOTALS}
    return Point(moment.number, snapshot.step, snapshot.time_s, values, totals)


_TOTALS: Final = frozenset(
    {
        "generated_tokens", "prompt_tokens", "recomputed_tokens", "hit_blocks", "query_blocks", "evictions",
        "swap_out_blocks", "swap_in_blocks", "compaction_moved_blocks", "preemptions_swap", "preemptions_recompute",
    }
)  # fmt: skip


def _charts(points: Sequence[Point]) -> Iterable[Chart]:
    def plain(name: str) -> list[float | None]:
        return [point.values[name] for point in points]

    def per_s(*names: str) -> list[float | None]:
        return [None, *(_rate(a, b, names) for a, b in itertools.pairwise(points))]

    hits = [None, *(_between(a, b, "hit_blocks", "query_blocks") for a, b in itertools.pairwise(points))]
    yield Chart(
        "Blocks in use, share of the pool",
        (Line("device", plain("usage")), Line("cached", plain("cached")), Line("host", plain("host"))),
        fmt.percent,
        1.0,
    )
    yield Chart(
        "Fragmentation", (Line("external", plain("external")), Line("internal", plain("internal"))), fmt.percent, 1.0
    )
    yield Chart("Sequences", tuple(Line(name, plain(name)) for name in ("running", "waiting", "swapped")))
    yield Chart(
        "Prefix cache, hits by blocks", (Line("in between", hits), Line("since start", plain("hits"))), fmt.percent, 1.0
    )
    tokens = ("generated", "generated_tokens"), ("prompt", "prompt_tokens"), ("computed again", "recomputed_tokens")
    yield Chart("Tokens a virtual second", tuple(Line(name, per_s(total)) for name, total in tokens))
    blocks = (
        ("evicted", "evictions"),
        ("swapped out", "swap_out_blocks"),
        ("swapped in", "swap_in_blocks"),
        ("compacted", "compaction_moved_blocks"),
    )
    yield Chart("Blocks a virtual second", tuple(Line(name, per_s(total)) for name, total in blocks))


def _rate(before: Point, after: Point, names: Sequence[str]) -> float | None:
    passed_s = after.time_s - before.time_s
    return sum(after.totals[n] - before.totals[n] for n in names) / passed_s if passed_s > 0 else None


def _between(before: Point, after: Point, part: str, whole: str) -> float | None:
    return ratio(after.totals[part] - before.totals[part], after.totals[whole] - before.totals[whole])


def _heading(recording: Recording, title: str, points: Sequence[Point], block_size: int) -> str:
    options, cut_from = recording.header.options, recording.header.cut
    lines = [
        f"Steps {fmt.count(points[0].step)} to {fmt.count(points[-1].step)}, "
        f"{fmt.seconds(points[-1].time_s - points[0].time_s)} of virtual time, from {fmt.count(len(points))} moments."
    ]
    if cut_from is not None:
        lines.append(
            f"Cut out of {cut_from.source}, steps {fmt.count(cut_from.first_step)} to {fmt.count(cut_from.last_step)}."
        )
    if recording.damage is not None:
        lines.append(f"The recording is incomplete: {recording.damage}.")
    lines.append(f"{fmt.blocks(options.num_blocks)} of {block_size} tokens; seed {options.seed}.")
    return f"<h1>Report of {escape(title)}</h1><p>{escape(' '.join(lines))}</p>"


def _cards(end: Moment) -> str:
    snapshot, counters = end.snapshot, end.snapshot.counters
    device = tier_numbers(end.device, snapshot.block_size, snapshot.slab_size)
    preempted = counters.preemptions_swap + counters.preemptions_recompute
    cards = (
        ("requests finished", fmt.count(counters.finished), f"of {fmt.count(counters.submitted)} submitted"),
        (
            "tokens generated",
            fmt.count(counters.generated_tokens),
            f"{fmt.rate(ratio(counters.generated_tokens, snapshot.time_s))} of virtual time",
        ),
        (
            "prefix cache hits",
            fmt.percent(ratio(counters.hit_blocks, counters.query_blocks)),
            f"{fmt.count(counters.hit_blocks)} of {fmt.blocks(counters.query_blocks)}",
        ),
        ("blocks used at the end", fmt.percent(device.usage_ratio), f"at most {fmt.count(counters.peak_active)} held"),
        (
            "fragmentation at the end",
            fmt.percent(device.external_ratio),
            f"external; internal {fmt.percent(device.internal_ratio)}",
        ),
        (
            "preemptions",
            fmt.count(preempted),
            f"{fmt.count(counters.preemptions_swap)} by swap, "
            f"{fmt.count(counters.recomputed_tokens)} tokens computed again",
        ),
        ("evictions", fmt.count(counters.evictions), "cached blocks that made room"),
        (
            "integrity faults",
            fmt.count(counters.integrity_faults),
            f"in {fmt.count(counters.integrity_checks)} checks asked for",
        ),
    )
    told = (
        f'<div class="card"><span class="dim">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="dim">{escape(note)}</span></div>'
        for name, value, note in cards
    )
    return f'<div class="cards">{"".join(told)}</div>'


def _maps(recording: Recording, points: Sequence[Point], notes: Sequence[tuple[int, str]]) -> Iterable[str]:
    for number, why in key_moments(recording, points, notes):
        moment = recording.moment(number)
        yield f"<h3>{escape('; '.join(why).capitalize())}</h3>{map_svg(moment, 'Block map')}"


def key_moments(
    recording: Recording, points: Sequence[Point], notes: Sequence[tuple[int, str]]
) -> list[tuple[int, list[str]]]:
    """Return the moments worth a look, at most eight in order of steps, each with what makes it so."""
    found: dict[int, list[str]] = {points[0].number: ["the beginning"], points[-1].number: ["the end"]}

    def add(number: int, why: str) -> None:
        if number in found or len(found) < _MAX_MAPS:
            found.setdefault(number, []).append(why)

    def most(value: Callable[[Point], float], why: str) -> None:
        best = max(points, key=value)
        if value(best) > 0:
            add(best.number, why)

    most(lambda p: p.values["usage"] or 0.0, "most blocks in use")
    most(lambda p: p.values["external"] or 0.0, "most fragmented")
    most(lambda p: p.values["waiting"] or 0.0, "longest queue")
    pairs = [(_preempted(b) - _preempted(a), b) for a, b in itertools.pairwise(points)]
    if pairs and (busiest := max(pairs, key=lambda pair: pair[0]))[0] > 0:
        add(busiest[1].number, "most preemptions since the point before")
    for step, text in notes:
        add(recording.at(step), f"marked: {text}")
    return sorted(found.items())


def _preempted(point: Point) -> float:
    return point.totals["preemptions_swap"] + point.totals["preemptions_recompute"]


def _advice(end: Moment) -> str:
    num_host = 0 if end.host is None else end.host.num_blocks
    found = advise(end.snapshot, end.device.num_blocks, num_host)
    items = "".join(f"<li><b>{escape(a.topic)}</b> ({a.severity}): {escape(a.text)}</li>" for a in found)
    return f"<ul>{items}</ul>" if items else "<p>None.</p>"


def _settings(recording: Recording) -> list[tuple[str, str]]:
    options = msgspec.to_builtins(recording.header.options)
    return [(name.replace("_", " "), str(value)) for name, value in options.items() if value not in (None, (), [])]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:_MAX_ROWS])
    more = f'<p class="dim">{fmt.count(len(rows) - _MAX_ROWS)} more.</p>' if len(rows) > _MAX_ROWS else ""
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>{more}"
