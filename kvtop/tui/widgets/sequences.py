"""Sequences: the table of unfinished sequences. Owns the row cursor, which stays on its sequence when rows move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rich.text import Text
from textual import events
from textual.message import Message

from allocator.snapshot import SequenceRow, Snapshot
from kvtop.model import format as fmt
from kvtop.model.lineage import grow_tree
from kvtop.model.observation import Kin
from kvtop.model.view import View, is_attached
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Pane, fit, line, rule

_STATUS_STYLES = {"running": "good", "waiting": "warn", "swapped": "label"}
_SHORT_STATUS = {"running": "run", "waiting": "wait", "swapped": "swap"}
#: Sort orders: name, heading, key of a row; the first is the order of the engine's queue.
_ORDERS: Final[tuple[tuple[str, str, Callable[[SequenceRow], float | str]], ...]] = (
    ("queue", "", lambda row: 0),
    ("seq", "SEQ", lambda row: row.seq_id),
    ("status", "ST", lambda row: row.status),
    ("blocks", "BLK", lambda row: -row.num_blocks),
    ("shared", "SHR", lambda row: -row.shared_blocks),
    ("tokens", "TOKENS", lambda row: -row.num_tokens),
    ("hit", "HIT", lambda row: -(row.hit_blocks or 0)),
    ("runs", "RUNS", lambda row: -row.runs),
    ("tree", "", lambda row: row.seq_id),
)
ORDERS: Final = tuple(name for name, _, _ in _ORDERS)
#: The order that nests sequences below those with which they share their first blocks.
TREE: Final = "tree"
_TREE_COLUMN: Final = 13
_TREE_HEADINGS = f"{'SEQ':<{_TREE_COLUMN}} {'ST':<4} {'BLK':>5} {'PREFIX':>6} {'TOKENS':>11}"
_HEADINGS = f"{'SEQ':>6} {'ST':<4} {'BLK':>5} {'SHR':>5} {'TOKENS':>11} {'HIT':>5} {'RUNS':>4}"
#: Up to this width there is no column for where a sequence comes from and why it waits.
_NARROW = 52


class Sequences(Pane):
    """One row a sequence: blocks, shared, tokens written of those wanted, hit blocks, runs, and why it waits."""

    class Chosen(Message):
        """The operator selected a sequence."""

        def __init__(self, seq_id: int) -> None:
            super().__init__()
            self.seq_id = seq_id

    class SortAsked(Message):
        """A heading was clicked: sort by it."""

        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order

    def __init__(self, look: Look, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(look, id=id, classes=classes)
        self.cursor: int | None = None
        self.order, self.inverted = ORDERS[0], False
        self.wanted = ""
        self._snapshot: Snapshot | None = None
        self._rows: tuple[SequenceRow, ...] = ()
        self._counts: tuple[str, ...] = ()
        self._chosen: int | None = None
        self._kin: dict[int, Kin] = {}
        self._branches: dict[int, str] = {}
        self._top = 0
        self._empty = "no sequences yet"

    def show(self, view: View, chosen: int | None) -> None:
        """Draw a view's sequences; ``chosen`` is the selected one."""
        snapshot = self._snapshot = view.snapshot
        if view.lineage is not None:
            self._kin = {kin.seq_id: kin for kin in view.lineage}
        self._chosen = chosen
        if snapshot:
            self._empty = "no sequences"
            self._counts = (
                f"{fmt.short(snapshot.num_running)} run",
                f"{fmt.short(snapshot.num_waiting)} wait",
                f"{fmt.short(snapshot.num_swapped)} swap",
            )
        self._reorder()

    def reorder(self, *, order: str | None = None, inverted: bool | None = None, wanted: str | None = None) -> None:
        """Sort by another order of ``ORDERS``, the other way round, or show only rows with some words."""
        self.order = self.order if order is None else order
        self.inverted = self.inverted if inverted is None else inverted
        self.wanted = self.wanted if wanted is None else wanted
        self._reorder()

    def _reorder(self) -> None:
        everyone: Sequence[SequenceRow] = self._snapshot.sequences if self._snapshot else ()
        rows: Iterable[SequenceRow] = everyone
        words = self.wanted.lower().split()
        if words:
            rows = [row for row in rows if all(word in _searched(row) for word in words)]
        if self.order == TREE:
            rows, self._branches = grow_tree(everyone, self._kin, {row.seq_id for row in rows}, self.inverted)
            self._rows = tuple(rows)
            self._settle_cursor()
            return
        key = next(key for name, _, key in _ORDERS if name == self.order)
        arranged = list(rows) if self.order == ORDERS[0] else sorted(rows, key=key)
        self._rows = tuple(reversed(arranged) if self.inverted else arranged)
        self._settle_cursor()

    def _settle_cursor(self) -> None:
        if self._index() is None:
            self.cursor = self._rows[0].seq_id if self._rows else None
        self.redraw()

    def move(self, way: str) -> None:
        """Move the row cursor; left and right do nothing."""
        index = self._index()
        if index is None:
            return
        page = max(1, self.size.height - 3)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -len(self._rows)}
        step |= {"last": len(self._rows), "left": 0, "right": 0}
        index = min(max(0, index + step[way]), len(self._rows) - 1)
        self.cursor = self._rows[index].seq_id
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        look = self.look
        lines = [
            rule(
                look,
                width,
                "Sequences",
                [*self._counts, *self._notes()],
                key=look.key("show('sequences')"),
                focused=self.has_focus,
            ),
            self._headings(width),
        ]
        room = height - 2
        index = self._index() or 0
        self._top = max(0, min(max(self._top, index - room + 1), index, len(self._rows) - room))
        for row in self._rows[self._top : self._top + room]:
            lines.append(self._row(row, width))
        if not self._rows:
            empty = f"no sequence with {self.wanted}" if self.wanted else self._empty
            lines.append(line((fit(f" {empty}", width).rstrip(), look.style("dim"))))
        lines += [line()] * (height - len(lines))
        return lines

    def _notes(self) -> list[str]:
        return [f"/{self.wanted}"] if self.wanted else []

    def _headings(self, width: int) -> Text:
        headings = _TREE_HEADINGS if self.order == TREE else _HEADINGS
        text = line((fit(headings + (" SOURCE" if width > _NARROW else ""), width), self.look.style("dim")))
        heading = next(heading for name, heading, _ in _ORDERS if name == self.order)
        at = text.plain.find(heading)
        if heading and at >= 0:
            text.stylize(self.look.style("key"), at, at + len(heading))
        return text

    def _row(self, row: SequenceRow, width: int) -> Text:
        look = self.look
        chosen = row.seq_id == self._chosen
        name = f"{row.seq_id:>6} "
        if self.order == TREE:
            name = fit(f"{self._branches.get(row.seq_id, '')}{row.seq_id}", _TREE_COLUMN) + " "
        text = line((name, look.style("chosen" if chosen else "value")))
        status = "att" if is_attached(row) else _SHORT_STATUS.get(row.status, row.status)[:4]
        text.append(f"{status:<4} ", look.style(_STATUS_STYLES.get(row.status, "dim")))
        numbers = self._numbers(row)
        if row.reason and width <= _NARROW:
            # Without a column for it, why a sequence waits is worth more than the numbers of one that stands.
            numbers = fit(row.reason, max(0, width - text.cell_len))
        text.append(numbers, look.style("chosen" if chosen else "text"))
        room = width - text.cell_len - 1
        if room > 3:
            text.append(" " + fit(f"{row.reason} · {row.label}" if row.reason else row.label, room), look.style("dim"))
        text.append(" " * (width - text.cell_len))
        if row.seq_id == self.cursor:
            if look.depth == "ansi":  # reversed, each word's own colour would become a patch of background
                text = line((text.plain, look.style("chosen" if chosen else "text")))
            text.stylize(look.style("row-focus" if self.has_focus else "row"))
        return text

    def _numbers(self, row: SequenceRow) -> str:
        tokens = f"{fmt.short(row.num_tokens)}/{fmt.short(row.num_target)}"
        if self.order == TREE:
            kin = self._kin.get(row.seq_id)
            return f"{fmt.short(row.num_blocks):>5} {fmt.short(kin.blocks) if kin else '':>6} {tokens:>11}"
        numbers = f"{fmt.short(row.num_blocks):>5} {fmt.short(row.shared_blocks):>5} {tokens:>11}"
        return f"{numbers} {fmt.short(row.hit_blocks):>5} {row.runs or fmt.UNKNOWN:>4}"

    def row_text(self) -> str:
        """Return the row under the cursor as lines to be copied."""
        index = self._index()
        if index is None:
            return ""
        row = self._rows[index]
        return "\n".join(f"{name}: {getattr(row, name)}" for name in row.__struct_fields__)

    def _index(self) -> int | None:
        return next((i for i, row in enumerate(self._rows) if row.seq_id == self.cursor), None)

    def on_click(self, event: events.Click) -> None:
        if event.y == 1:
            self._click_heading(event.x)
            return
        index = self._top + event.y - 2
        if event.y >= 2 and index < len(self._rows):
            self.cursor = self._rows[index].seq_id
            self.post_message(self.Chosen(self.cursor))
            self.redraw()

    def _click_heading(self, x: int) -> None:
        if self.order == TREE:
            self.post_message(self.SortAsked(ORDERS[0]))
            return
        for name, heading, _ in _ORDERS[1:]:
            end = _HEADINGS.find(heading) + len(heading)
            if end - max(len(heading), 5) <= x < end:
                self.post_message(self.SortAsked(name))
                return


def _searched(row: SequenceRow) -> str:
    """Return the words of a row that a filter looks at."""
    kind = "attached" if is_attached(row) else ""
    return f"{row.seq_id} {row.status} {row.reason} {row.label} {kind}".lower()
