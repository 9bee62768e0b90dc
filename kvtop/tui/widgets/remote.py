"""RemotePane: an engine over the network: its engines, its resident prefixes, and what it offers or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Final

from rich.text import Text

from kvtop.model import format as fmt
from kvtop.model.remote import FLEET, EngineRow, EventFacts, RemoteFacts, SlotRow, total, total_known, usage_of
from kvtop.model.view import View
from kvtop.panels.content import Asked
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


#: Commands whose outcome is shown.
_MAX_COMMANDS: Final = 4
#: Cells of a fleet's server, on a narrow and on a wide screen, and of an engine's kind; notes shown at most.
_SERVER: Final = 24
_WIDE: Final = 104
_WIDE_SERVER: Final = 36
_KIND: Final = 13
_NOTES: Final = 3
#: Seconds after which a server's numbers are old: by then it has been scraped several times, or would have been.
STALE_S: Final = 90.0
#: Seconds later than at best from which events are told to be behind.
_BEHIND_S: Final = 2.0
#: The action that turns the mirror.
_MAP: Final = "show('map')"
_FLEET_COLUMNS: Final = (("used", 7), ("hit", 7), ("run", 6), ("wait", 6), ("preempt", 8))
#: What a fleet can be sorted by.
_SORTS: Final[tuple[tuple[str, Callable[[EngineRow], float | None]], ...]] = (
    ("name", lambda row: 0.0),
    ("used", lambda row: row.usage_ratio),
    ("hit", lambda row: row.hit_ratio),
    ("waiting", lambda row: row.waiting),
    ("preempted", lambda row: row.preemptions),
    ("age", lambda row: row.age_s),
)


class RemotePane(Pane):
    """Scrolls as one page: the engines, the prefixes, the table of capabilities, notes."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._facts: RemoteFacts | None = None
        self._asked = Asked()
        self._top = 0
        self._target: str | None = None
        self._sort = 0
        self._is_inverted = False
        self._wanted: tuple[str, ...] = ()

    def show(self, view: View, asked: Asked | None = None) -> None:
        """Draw a view's facts, and what was asked of the engine from here."""
        self._asked = asked or self._asked
        if view.remote is None or self._facts is None or view.remote.kind != self._facts.kind:
            self._top = 0
        self._facts = view.remote
        self.redraw()

    @property
    def target(self) -> str | None:
        """The server under the cursor of a fleet's table: the first, until somebody has moved it or if it is gone."""
        return self._under(self._sorted()) if self._is_fleet else None

    def _under(self, rows: Sequence[EngineRow]) -> str | None:
        is_there = any(row.target == self._target for row in rows)
        return self._target if is_there else rows[0].target if rows else None

    @property
    def _is_fleet(self) -> bool:
        return self._facts is not None and self._facts.kind == FLEET

    def find(self, wanted: str) -> None:
        """Show only a fleet's engines with all of these words in server, model or kind; empty shows all."""
        self._wanted = tuple(wanted.lower().split())
        self.redraw()

    def invert(self) -> None:
        """Sort a fleet the other way round."""
        self._is_inverted = not self._is_inverted
        self._top = 0
        self.redraw()

    def move(self, way: str) -> None:
        """Scroll, or move a fleet's cursor; left and right choose what a fleet is sorted by."""
        if self._is_fleet:
            self._move_in_fleet(way)
            return
        page = max(1, self.size.height - 2)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -(10**6)}
        self._top = max(0, self._top + (step | {"last": 10**6, "left": 0, "right": 0})[way])
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        if self._facts is None:
            return [line()] * height
        if self._is_fleet:
            return self._fleet(width, height)
        lines = self._page(self._facts, width)
        self._top = max(0, min(self._top, len(lines) - height))
        shown = lines[self._top : self._top + height]
        left = len(lines) - self._top - height
        if left > 0:
            shown[-1] = line((fit(f" … {left + 1} more lines: j", width), self.look.style("dim")))
        return shown + [line()] * (height - len(shown))

    def _sorted(self) -> list[EngineRow]:
        """Return a fleet's wanted rows: the largest first, those not known last; by name in the first order."""
        assert self._facts is not None
        value, sign = _SORTS[self._sort][1], 1 if self._is_inverted else -1
        rows = [row for row in self._facts.rows if self._is_wanted(row)]
        by_name = sorted(rows, key=lambda row: (row.target, row.engine), reverse=self._is_inverted and not self._sort)

        def key(row: EngineRow) -> tuple[bool, float]:
            number = value(row)
            return number is None, sign * (number or 0.0)

        return sorted(by_name, key=key)

    def _is_wanted(self, row: EngineRow) -> bool:
        text = f"{row.target} {row.model or ''} {row.kind} {row.trouble or ''}".lower()
        return all(word in text for word in self._wanted)

    def _move_in_fleet(self, way: str) -> None:
        if way in ("left", "right"):
            self._sort = (self._sort + (1 if way == "right" else -1)) % len(_SORTS)
            self._top = 0
        else:
            rows = self._sorted()
            targets = list(dict.fromkeys(row.target for row in rows)) or [""]
            at = targets.index(self._under(rows) or "")
            page = max(1, self.size.height - 2)
            step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -at, "last": len(targets)}
            self._target = targets[max(0, min(len(targets) - 1, at + step[way]))]
        self.redraw()

    def _fleet(self, width: int, height: int) -> list[Text]:
        look, rows = self.look, self._sorted()
        assert self._facts is not None
        under = self._under(rows)
        size, kind = (_WIDE_SERVER, _KIND) if width >= _WIDE else (_SERVER, 0)
        order = f"by {_SORTS[self._sort][0]}{', inverted' if self._is_inverted else ''}: ← →"
        shown, known = fmt.count(len(rows)), fmt.count(len(self._facts.rows))
        notes = [known if shown == known else f"{shown} of {known}", f"{look.key('select')} opens one", order]
        lines = [rule(look, width, "Servers", notes, key=look.key("show('map')"), focused=self.has_focus)]
        lines += [self._cut(f" {note}", width, "warn") for note in self._facts.notes[:_NOTES]]
        heading = f"  {fit('server', size)} {fit('engine', kind)}{fit('model', _MODEL)}{'rank':>5}{'age':>8}"
        lines.append(self._cut(heading + "".join(f"{name:>{size}}" for name, size in _FLEET_COLUMNS), width, "dim"))
        room = max(1, height - len(lines))
        at = next((i for i, row in enumerate(rows) if row.target == under), 0)
        self._top = max(0, min(max(self._top, at - room + 1), at, len(rows)))
        for row in rows[self._top : self._top + room]:
            is_here = row.target == under
            text = f"{'>' if is_here else ' '} {fit(row.target, size)} "
            if kind:
                text += fit(row.kind, kind - 1) + " "
            text += row.trouble if row.trouble is not None else _fleet_numbers(row, fmt.UNKNOWN if kind else row.kind)
            lines.append(self._cut(text, width, _fleet_style(row, is_here)))
        return lines + [line()] * (height - len(lines))

    def _page(self, facts: RemoteFacts, width: int) -> list[Text]:
        look = self.look
        lines = [
            rule(
                look,
                width,
                "Engines",
                [fmt.count(len(facts.rows))],
                key=look.key("show('map')"),
                focused=self.has_focus,
            )
        ]
        heading = " " + fit("model", _model_width(width)) + " rank"
        lines.append(self._cut(heading + "".join(f"{name:>{size}}" for name, size in _COLUMNS), width, "dim"))
        lines += [self._engine(row, width) for row in facts.rows]
        lines += [self._cut(f" {note}", width, "warn") for note in facts.notes]
        lines += self._commands(width)
        lines += self._slots(facts.slots, width)
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

    def _commands(self, width: int) -> list[Text]:
        """Return the latest commands with what came of them, in full: the event line is short."""
        latest = self._asked.commands[-_MAX_COMMANDS:]
        if not latest:
            return []
        lines = [rule(self.look, width, "Asked from here")]
        for at, command, ok, message in reversed(latest):
            said = f"{at} {command}: {printable(message)}"
            style = "text" if ok else "bad"
            lines += [self._cut(f" {row}", width, style) for row in wrap(said, max(1, width - 1))]
        return lines

    def _slots(self, slots: tuple[SlotRow, ...], width: int) -> list[Text]:
        if not slots:
            return []
        lines = [rule(self.look, width, "Slots", [fmt.count(len(slots))])]
        for slot in slots:
            text = line((f" {slot.slot_id:>4}  ", self.look.style("label")))
            share = slot.held_tokens / slot.total_tokens if slot.total_tokens else None
            text.append_text(bar(self.look, max(8, min(40, width - 48)), [(share, "bar")]))
            held = f" {fmt.short(slot.held_tokens):>6}/{fmt.short(slot.total_tokens):<6} tokens"
            text.append(held, self.look.style("value"))
            text.append("  busy" if slot.is_busy else "", self.look.style("warn"))
            lines.append(text)
        return lines

    def _events(self, events: EventFacts, width: int) -> list[Text]:
        look = self.look
        style = "good" if events.state == "complete" else "warn"
        notes = [f"{fmt.short(events.distinct)} blocks", f"{look.key(_MAP)} shows the mirror"]
        lines = [rule(look, width, "Resident prefixes", notes)]
        text = line((f" {events.state}", look.style(style)))
        if events.behind_s >= _BEHIND_S:
            text.append(f"  {fmt.seconds(events.behind_s)} behind", look.style("warn"))
        for label, value in (
            ("batches", fmt.short(events.batches)),
            ("stored", fmt.short(events.stored)),
            ("removed", fmt.short(events.removed)),
            ("cleared", fmt.short(events.cleared)),
            ("mean life", fmt.seconds(events.mean_life_s)),
            ("gaps", fmt.short(events.gaps)),
            ("missed", fmt.short(events.missed)),
            ("replayed", fmt.short(events.replayed)),
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


def _is_stale(row: EngineRow) -> bool:
    return row.age_s is not None and row.age_s > STALE_S


def _fleet_style(row: EngineRow, is_here: bool) -> str:
    if not row.is_up:
        return "bad"
    return "warn" if _is_stale(row) else "value" if is_here else "text"


def _fleet_numbers(row: EngineRow, nameless: str) -> str:
    values = (
        fmt.percent(row.usage_ratio),
        fmt.percent(row.hit_ratio),
        fmt.short(row.running),
        fmt.short(row.waiting),
        fmt.short(row.preemptions),
    )
    text = f"{fit(row.model or nameless, _MODEL)}{row.engine[:4]:>5}{fmt.seconds(row.age_s):>8}"
    return text + "".join(f"{value:>{size}}" for value, (_, size) in zip(values, _FLEET_COLUMNS, strict=True))


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
        if all(c.reason is not None for c in facts.capabilities if c.operations):
            first.append(" READ ONLY ", look.style("badge-dim"))
        states = [printable(name) for name, is_so in facts.states if is_so]
        if states:
            first.append(f" {', '.join(states).upper()} ", look.style("badge-warn"))
        if not all(row.is_up for row in rows):
            lost = len({row.target for row in rows if not row.is_up})
            first.append(f" {lost} lost " if facts.kind == FLEET else " its engine is lost ", look.style("badge-bad"))
        if facts.kind == FLEET and (stale := sum(_is_stale(row) for row in rows)):
            first.append(f" {fmt.count(stale)} stale ", look.style("badge-warn"))
        _field(look, first, "engines", fmt.count(len(rows)))
        models = sorted({row.model for row in rows if row.model})
        room = width - first.cell_len - 9
        if models and room > 4:
            _field(look, first, "model", fit(", ".join(models), room).rstrip())
    if facts.kind == FLEET:
        return [first, *_fleet_header(look, rows, width)]
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


def _fleet_header(look: Look, rows: Sequence[EngineRow], width: int) -> list[Text]:
    """Return what the engines that tell it have together: some of a fleet are always unknown."""
    told = [row for row in rows if row.usage_ratio is not None]
    usage = usage_of(told)
    use = line((" USED  ", look.style("label")))
    use.append_text(bar(look, max(8, min(44, width - 64)), [(usage, "bar")]))
    use.append(f" {fmt.percent(usage):<6}", look.style("value"))
    fullest = max(told, key=lambda row: row.usage_ratio or 0.0, default=None)
    fields = [("over", _engines(len(told)))] if told else []
    if fullest is not None:
        fields.append(("fullest", f"{printable(fullest.target)} {fmt.percent(fullest.usage_ratio)}"))
    hit = line((" HIT   ", look.style("label")))
    hits = [row for row in rows if row.hit_ratio is not None]
    worst = min(hits, key=lambda row: row.hit_ratio or 0.0, default=None)
    if worst is None:
        hit.append(f" {fmt.UNKNOWN}", look.style("value"))
    else:
        _field(look, hit, "told by", _engines(len(hits)))
        _field(look, hit, "lowest", f"{printable(worst.target)} {fmt.percent(worst.hit_ratio)}")
    load = line((" LOAD  ", look.style("label")))
    for label, values in (
        ("run", [row.running for row in rows]),
        ("wait", [row.waiting for row in rows]),
        ("preempt", [row.preemptions for row in rows]),
    ):
        told_by = len([value for value in values if value is not None])
        fields_of_load = f"{fmt.short(total_known(values))} of {fmt.count(told_by)}" if told_by else fmt.UNKNOWN
        if load.cell_len + len(label) + 14 <= width:
            _field(look, load, label, f"{fields_of_load:<12}")
    for label, value in fields:
        if use.cell_len + len(label) + len(value) + 3 <= width:
            _field(look, use, label, value)
    return [use, hit, load]


def _engines(number: int) -> str:
    return f"{fmt.count(number)} {'engine' if number == 1 else 'engines'}"


def _field(look: Look, text: Text, label: str, value: str) -> None:
    text.append(f"  {label} ", look.style("dim"))
    text.append(value, look.style("value"))
