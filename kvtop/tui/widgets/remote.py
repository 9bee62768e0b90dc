"""RemotePane: an engine over the network: its engines, its resident prefixes, and what it offers or why not."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from kvtop.model import format as fmt
from kvtop.model.remote import EngineRow, EventFacts, RemoteFacts, total, usage_of
from kvtop.model.view import View
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Pane, bar, fit, line, printable, rule

#: Cells of a model's name, on a wide and on a narrow screen.
_WIDE_MODEL, _MODEL = 30, 10
#: Heading, width, and how a row says it.
_COLUMNS: Final = (
    ("used", 7),
    ("held/blocks", 13),
    ("tok/blk", 8),
    ("cached tok", 11),
    ("run", 5),
    ("wait", 5),
    ("hit", 7),
    ("preempt", 8),
    ("evict", 7),
    ("host", 6),
)


class RemotePane(Pane):
    """Scrolls as one page: the engines, the prefixes, the table of capabilities, notes."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._facts: RemoteFacts | None = None
        self._top = 0

    def show(self, view: View) -> None:
        """Draw a view's facts."""
        self._facts = view.remote
        self.redraw()

    def move(self, way: str) -> None:
        """Scroll; left and right do nothing."""
        page = max(1, self.size.height - 2)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -(10**6)}
        self._top = max(0, self._top + (step | {"last": 10**6, "left": 0, "right": 0})[way])
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        if self._facts is None:
            return [line()] * height
        lines = self._page(self._facts, width)
        self._top = max(0, min(self._top, len(lines) - height))
        shown = lines[self._top : self._top + height]
        left = len(lines) - self._top - height
        if left > 0:
            shown[-1] = line((fit(f" … {left + 1} more lines: j", width), self.look.style("dim")))
        return shown + [line()] * (height - len(shown))

    def _page(self, facts: RemoteFacts, width: int) -> list[Text]:
        look = self.look
        lines = [rule(look, width, "Engines", [fmt.count(len(facts.rows))], key="1", focused=self.has_focus)]
        heading = " " + fit("model", _model_width(width)) + " rank"
        lines.append(self._cut(heading + "".join(f"{name:>{size}}" for name, size in _COLUMNS), width, "dim"))
        lines += [self._engine(row, width) for row in facts.rows]
        lines += [self._cut(f" {note}", width, "warn") for note in facts.notes]
        if facts.events is not None:
            lines += self._events(facts.events, width)
        lines.append(rule(look, width, "What this engine offers"))
        for capability in facts.capabilities:
            text = line((f" {fit(capability.name, 28)} ", look.style("label")))
            if capability.reason is None:
                text.append("available", look.style("good"))
            else:
                text.append(fit(capability.reason, max(0, width - text.cell_len)).rstrip(), look.style("dim"))
            lines.append(text)
        return lines

    def _engine(self, row: EngineRow, width: int) -> Text:
        held = f"{fmt.short(row.used_blocks)}/{fmt.short(row.total_blocks)}"
        values = (
            fmt.percent(row.usage_ratio),
            held if row.total_blocks is not None or row.used_blocks is not None else fmt.UNKNOWN,
            fmt.count(row.block_size),
            fmt.short(row.cached_tokens),
            fmt.short(row.running),
            fmt.short(row.waiting),
            fmt.percent(row.hit_ratio),
            fmt.short(row.preemptions),
            fmt.short(row.evictions),
            fmt.percent(row.host_usage_ratio),
        )
        text = f" {fit(row.model or fmt.UNKNOWN, _model_width(width))} {fit(row.engine, 4)}"
        text += "".join(f"{value:>{size}}" for value, (_, size) in zip(values, _COLUMNS, strict=True))
        return self._cut(text, width, "value" if row.is_up else "bad")

    def _events(self, events: EventFacts, width: int) -> list[Text]:
        look = self.look
        style = "good" if events.state == "complete" else "warn"
        lines = [rule(look, width, "Resident prefixes", [f"{fmt.short(events.distinct)} blocks"])]
        text = line((f" {events.state}", look.style(style)))
        for label, value in (
            ("batches", fmt.short(events.batches)),
            ("stored", fmt.short(events.stored)),
            ("removed", fmt.short(events.removed)),
            ("cleared", fmt.short(events.cleared)),
            ("mean life", fmt.seconds(events.mean_life_s)),
            ("gaps", fmt.short(events.gaps)),
            ("restarts", fmt.short(events.restarts)),
            ("unknown", fmt.short(events.unknown)),
            ("unreadable", fmt.short(events.broken)),
            ("drift", fmt.short(events.drift)),
        ):
            if text.cell_len + len(label) + len(value) + 3 <= width:
                text.append(f"  {label} ", look.style("dim"))
                text.append(value, look.style("value"))
        lines.append(text)
        for medium, rank, copies in events.resident:
            lines.append(self._cut(f" {fit(medium, 12)} rank {rank}  {fmt.count(copies)} block copies", width, "text"))
        if events.prefixes:
            heading = f" {'prefix':<17}{'rank':>5}{'depth':>7}{'blocks':>8}{'branches':>9}{'stores':>7}  age"
            lines.append(self._cut(heading, width, "dim"))
        for p in events.prefixes:
            row = f" {p.hash64:016x} {p.rank:>5}{p.depth:>7}{p.blocks:>8}{p.branches:>9}{p.stores:>7}"
            lines.append(self._cut(f"{row}  {fmt.seconds(p.age_s)}  {p.medium}", width, "text"))
        return lines

    def _cut(self, text: str, width: int, style: str) -> Text:
        return line((fit(text, width).rstrip(), self.look.style(style)))


def _model_width(width: int) -> int:
    return _WIDE_MODEL if width >= 116 else _MODEL


def remote_header(look: Look, view: View, facts: RemoteFacts, first: Text, width: int) -> list[Text]:
    """Return the header's four lines for an engine over the network.

    Args:
        look: How things are drawn.
        view: The view.
        facts: What is known.
        first: The first line as far as it is the same for every engine.
        width: Cells.
    """
    rows = facts.rows
    if view.error is None:
        kind = f"{facts.kind} {facts.version}" if facts.version else facts.kind
        first.append(f" {printable(kind)} ", look.style("badge-good"))
        first.append(" READ ONLY ", look.style("badge-dim"))
        if not all(row.is_up for row in rows):
            first.append(" its engine is lost ", look.style("badge-bad"))
        _field(look, first, "engines", fmt.count(len(rows)))
        models = sorted({row.model for row in rows if row.model})
        room = width - first.cell_len - 9
        if models and room > 4:
            _field(look, first, "model", fit(", ".join(models), room).rstrip())
    usage = usage_of(rows)
    size = max(8, min(44, width - 64))
    use = line((" USED  ", look.style("label")))
    use.append_text(bar(look, size, [(usage, "bar")]))
    use.append(f" {fmt.percent(usage):<6}", look.style("value"))
    held, blocks = total(row.used_blocks for row in rows), total(row.total_blocks for row in rows)
    tokens = total(row.cached_tokens for row in rows)
    for label, value in (
        ("held", fmt.short(held)),
        ("of", fmt.short(blocks)),
        ("cached tok", fmt.short(tokens)),
        ("host", fmt.percent(total(r.host_usage_ratio for r in rows) if len(rows) == 1 else None)),
    ):
        if use.cell_len + len(label) + len(value) + 3 <= width:
            _field(look, use, label, value)
    hit = line((" HIT   ", look.style("label")), ("1m ", look.style("dim")))
    hit.append(f"{fmt.percent(view.hit_ratio_window):<6}", look.style("value"))
    hit.append(" all ", look.style("dim"))
    hit.append(f"{fmt.percent(view.hit_ratio):<6}", look.style("value"))
    resident = fmt.short(facts.events.distinct) if facts.events else fmt.UNKNOWN
    _field(look, hit, "resident blocks", resident)
    if facts.events is not None and facts.events.state != "complete":
        hit.append(f"  {facts.events.state}", look.style("warn"))
    load = line((" LOAD  ", look.style("label")))
    for label, value in (
        ("run", fmt.short(total(row.running for row in rows))),
        ("wait", fmt.short(total(row.waiting for row in rows))),
        ("swap", fmt.short(total(row.swapped for row in rows))),
        ("preempt", fmt.short(total(row.preemptions for row in rows))),
        ("evict", fmt.short(total(row.evictions for row in rows))),
        ("generated", fmt.short(total(row.generated_tokens for row in rows))),
    ):
        if load.cell_len + len(label) + 9 <= width:
            _field(look, load, label, f"{value:<5}")
    return [first, use, hit, load]


def _field(look: Look, text: Text, label: str, value: str) -> None:
    text.append(f"  {label} ", look.style("dim"))
    text.append(value, look.style("value"))
