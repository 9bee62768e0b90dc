"""Dividers: containers whose inner edge is dragged with the mouse. They tell where to; somebody else arranges."""

from __future__ import annotations

from textual import events
from textual.containers import Horizontal
from textual.message import Message


class Divided(Horizontal):
    """A row of panes with an edge that can be dragged."""

    class Dragged(Message):
        """The edge is being dragged to here.

        Attributes:
            row: The row whose edge it is.
            column, line: Where to, on the screen.
        """

        def __init__(self, row: Divided, column: int, line: int) -> None:
            super().__init__()
            self.row, self.column, self.line = row, column, line

    _is_dragged = False

    def is_edge(self, column: int, line: int) -> bool:
        """Return whether a place of the screen is the edge."""
        raise NotImplementedError

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if self.is_edge(int(event.screen_x), int(event.screen_y)):
            event.stop()
            self._is_dragged = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_dragged:
            event.stop()
            self.post_message(self.Dragged(self, int(event.screen_x), int(event.screen_y)))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._is_dragged:
            event.stop()
            self._is_dragged = False
            self.release_mouse()


class Body(Divided):
    """The map and what stands beside it; its edge is the gap between the two."""

    def is_edge(self, column: int, line: int) -> bool:
        side = self.query_one("#right").region
        return (
            bool(side.width) and column in (side.x - 1, side.right) and self.region.x < column < self.region.right - 1
        )


class Bottom(Divided):
    """The bottom row; its edge is its first line, with the titles."""

    def is_edge(self, column: int, line: int) -> bool:
        return line == self.region.y
