"""MapActions: what the keys do to the map: colours, scale, going to a block, following, ranges, copying."""

from __future__ import annotations

from typing import Final

from textual.app import App

from kvtop.attachment import Attachment
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.tui.changes import WATCHES
from kvtop.tui.look import Look
from kvtop.tui.screens.ask import AskNumber, Target
from kvtop.tui.shades import MODES
from kvtop.tui.widgets.block_map import BlockMap, BlockRef
from kvtop.tui.widgets.inspector import block_facts, range_facts
from kvtop.tui.widgets.sequences import Sequences

_WATCH_WORDS: Final = {"moves": "blocks that moved", "all": "every change", "off": "nothing"}


class MapActions(App[None]):
    """The map's share of the console's actions. ``KvtopApp`` is the only subclass."""

    look: Look
    attachment: Attachment | None
    selected: int | None
    following = False

    @property
    def view(self) -> View:
        """The view that is drawn."""
        raise NotImplementedError

    @property
    def main(self) -> BlockMap:
        """The map."""
        raise NotImplementedError

    def say(self, note: str, style: str = "text") -> None:
        """Show a note on the event line for a while."""
        raise NotImplementedError

    def choose(self, seq_id: int | None) -> None:
        """Select a sequence, or none."""
        raise NotImplementedError

    def action_colour(self) -> None:
        order = MODES
        self.main.set_mode(order[(order.index(self.main.mode) + 1) % len(order)])
        self.say(f"map: coloured by {self.main.mode}")

    def action_zoom(self) -> None:
        self._zoom_by(1)

    def action_zoom_out(self) -> None:
        self._zoom_by(-1)

    def _zoom_by(self, steps: int) -> None:
        order = self.main.zoom_steps()
        at = order.index(self.main.zoom) if self.main.zoom in order else 0
        zoom = order[(at + steps) % len(order)]
        self.main.set_zoom(zoom)
        names = {"fit": "all blocks", "dense": "one block half a cell", "glyph": "one block a cell"}
        words = (
            names[zoom]
            if isinstance(zoom, str)
            else f"{zoom} blocks {'a cell' if self.look.glyphs_only else 'half a cell'}"
        )
        self.say(f"map: {words}")

    def action_go_to_block(self) -> None:
        tier = self.main.cursor.tier
        shown = self.view.maps.get(tier)
        if shown is None:
            self.say("there is no map yet")
            return

        def go(target: Target | None) -> None:
            if target is None:
                return
            if target.is_sequence:
                self.go_to_sequence(target.number)
            else:
                self.main.put_cursor(BlockRef(tier, target.number))

        self.push_screen(AskNumber(self.look, f"Go to {tier} block", shown.arrays.num_blocks - 1), go)

    def go_to_sequence(self, seq_id: int) -> None:
        """Select a sequence and follow it to its last block."""
        snapshot = self.view.snapshot
        if snapshot is None or all(row.seq_id != seq_id for row in snapshot.sequences):
            self.say(f"no sequence {seq_id} in the list")
            return
        self.choose(seq_id)
        self.following = True

    def action_follow(self) -> None:
        if self.following:
            self.following = False
            self.say("no longer following")
        elif self.selected is None:
            self.say("select a sequence first, then follow it")
        else:
            self.following = True
            self.say(f"following sequence {self.selected}")
            self._follow(self.view)

    def _follow(self, view: View) -> None:
        """Put the cursor on the last block of the sequence that is followed."""
        if self.selected is None:
            self.following = False
        table = view.focus_table
        if self.following and table is not None and len(table):
            block = BlockRef("device", int(table[-1]))
            if block != self.main.cursor:
                self.main.put_cursor(block)

    def action_mark(self) -> None:
        if self.main.marked is not None:
            self.main.mark(None)
        else:
            self.following = False
            self.main.mark(self.main.cursor)
            copy, pin, mark, leave = map(self.look.key, ("copy", "pin", "mark", "deselect"))
            self.say(f"range: move the cursor to its end; {copy} copies, {pin} pins, {mark} or {leave} ends it")

    def action_watch(self) -> None:
        self.main.set_watch(WATCHES[(WATCHES.index(self.main.watching) + 1) % len(WATCHES)])
        self.say(f"map: {_WATCH_WORDS[self.main.watching]} flashes for a second")

    def action_copy(self) -> None:
        what, text = self._selection()
        if not text:
            self.say("there is nothing to copy here")
            return
        self.copy_to_clipboard(text)
        self.say(f"copied {what}, if the terminal lets programs write to its clipboard")

    def _selection(self) -> tuple[str, str]:
        """Return what ``y`` copies: its name, and its text."""
        view, chosen = self.view, self.main.range
        if chosen is not None:
            facts = range_facts(view, *chosen)
            return f"{fmt.blocks(chosen[2] - chosen[1] + 1)}", "\n".join(f"{k}: {v}" for k, v in facts)
        focused = self.focused
        if isinstance(focused, Sequences) and focused.cursor is not None:
            return f"sequence {focused.cursor}", focused.row_text()
        block = block_facts(view, self.main.under)
        return (block.name, block.as_text()) if block else ("", "")
