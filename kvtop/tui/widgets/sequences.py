"""Sequences: the table of unfinished sequences. Owns the row cursor, which stays on its sequence when rows move."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.message import Message

from allocator.snapshot import SequenceRow
from kvtop.model import format as fmt
from kvtop.model.view import View, is_attached
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Pane, fit, line, rule

_STATUS_STYLES = {"running": "good", "waiting": "warn", "swapped": "label"}
_SHORT_STATUS = {"running": "run", "waiting": "wait", "swapped": "swap"}
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

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.cursor: int | None = None
        self._rows: tuple[SequenceRow, ...] = ()
        self._counts: tuple[str, ...] = ()
        self._chosen: int | None = None
        self._top = 0
        self._empty = "no sequences yet"

    def show(self, view: View, chosen: int | None) -> None:
        """Draw a view's sequences; ``chosen`` is the selected one."""
        snapshot = view.snapshot
        self._rows = snapshot.sequences if snapshot else ()
        self._chosen = chosen
        if snapshot:
            self._empty = "no sequences"
            self._counts = (
                f"{fmt.short(snapshot.num_running)} run",
                f"{fmt.short(snapshot.num_waiting)} wait",
                f"{fmt.short(snapshot.num_swapped)} swap",
            )
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
            rule(look, width, "Sequences", self._counts, key="2", focused=self.has_focus),
            line((fit(_HEADINGS + (" SOURCE" if width > _NARROW else ""), width), look.style("dim"))),
        ]
        room = height - 2
        index = self._index() or 0
        self._top = max(0, min(max(self._top, index - room + 1), index, len(self._rows) - room))
        for row in self._rows[self._top : self._top + room]:
            lines.append(self._row(row, width))
        if not self._rows:
            lines.append(line((f" {self._empty}", look.style("dim"))))
        lines += [line()] * (height - len(lines))
        return lines

    def _row(self, row: SequenceRow, width: int) -> Text:
        look = self.look
        chosen = row.seq_id == self._chosen
        text = line((f"{row.seq_id:>6} ", look.style("chosen" if chosen else "value")))
        status = "att" if is_attached(row) else _SHORT_STATUS.get(row.status, row.status)[:4]
        text.append(f"{status:<4} ", look.style(_STATUS_STYLES.get(row.status, "dim")))
        tokens = f"{fmt.short(row.num_tokens)}/{fmt.short(row.num_target)}"
        numbers = f"{fmt.short(row.num_blocks):>5} {fmt.short(row.shared_blocks):>5} {tokens:>11}"
        numbers += f" {fmt.short(row.hit_blocks):>5} {row.runs or fmt.UNKNOWN:>4}"
        if row.reason and width <= _NARROW:
            # Without a column for it, why a sequence waits is worth more than the numbers of one that stands.
            numbers = fit(row.reason, max(0, width - text.cell_len))
        text.append(numbers, look.style("chosen" if chosen else "text"))
        room = width - text.cell_len - 1
        if room > 0:
            text.append(" " + fit(f"{row.reason} · {row.label}" if row.reason else row.label, room), look.style("dim"))
        text.append(" " * (width - text.cell_len))
        if row.seq_id == self.cursor:
            if look.depth == "ansi":  # reversed, each word's own colour would become a patch of background
                text = line((text.plain, look.style("chosen" if chosen else "text")))
            text.stylize(look.style("row-focus" if self.has_focus else "row"))
        return text

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
        index = self._top + event.y - 2
        if event.y >= 2 and index < len(self._rows):
            self.cursor = self._rows[index].seq_id
            self.post_message(self.Chosen(self.cursor))
            self.redraw()
