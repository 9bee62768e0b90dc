"""ExportActions: what is shown, written to a file or downloaded by a browser: a picture, or the rows of a panel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

from textual.color import Color
from textual.screen import Screen
from textual.strip import Strip

from kvtop.errors import UserError
from kvtop.model.view import View
from kvtop.panels import export
from kvtop.panels.content import Asked
from kvtop.tui.background import Background
from kvtop.tui.map_actions import MapActions
from kvtop.tui.messages import Told

#: What can be written.
KINDS: Final = ("svg", "png", "csv", "json")


class ExportActions(MapActions):
    """The console's exports. ``KvtopApp`` is the only subclass."""

    panel: str
    _background: Background
    _held: View | None

    @property
    def asked(self) -> Asked:
        """What panels show besides the view."""
        raise NotImplementedError

    @property
    def _base(self) -> Screen[Any]:
        raise NotImplementedError

    def action_export(self) -> None:
        try:
            self.export("svg", None)
        except UserError as error:
            self.say(str(error), "bad")

    def export(self, kind: str, file: str | None) -> None:
        """Write the panel that is shown to a new file: a picture, or its rows. A browser downloads it instead.

        Raises:
            UserError: The file exists, or cannot be written.
        """
        view, asked = self._held or self.view, self.asked
        step = view.snapshot.step if view.snapshot else None
        # Whoever looks from a browser writes no files here, and learns nothing of those that there are.
        path = Path(f"kvtop-{self.panel}.{kind}") if self.is_web else export.new_file(self.panel, step, kind, file)
        if kind != "svg" and path.suffix != f".{kind}":
            raise UserError(f"export {kind} {path}: its name must end with .{kind}")
        if kind == "svg":
            self._save(self.export_screenshot(title="kvtop").encode(), path)
        elif kind == "png":
            self._export_png(path)
        else:
            self._export_rows(kind, path, view, asked, step)

    def _export_png(self, path: Path) -> None:
        strips, background = self._strips(), Color.parse(self.look.theme.background).rgb

        def work() -> None:
            from kvtop.tui.picture import to_png

            try:
                data = to_png(strips, background)
            except UserError as error:
                self.post_message(Told(str(error), False))
                return
            self.call_later(self._save_or_say, data, path)

        self._do(work)

    def _strips(self) -> list[Strip]:
        """Return the lines of the screen as they are drawn, a dialog above it included."""
        screen = self.screen
        # As the framework's own pictures do, which know only SVG.
        return list(screen._compositor.render_strips(screen.size))

    def _export_rows(self, kind: str, path: Path, view: View, asked: Asked, step: int | None) -> None:
        panel = self.panel

        def work() -> None:
            try:
                rows = export.rows_of(panel, view, asked)
                if self.is_web:
                    text, _ = export.rows_text(kind, rows, step, view.source)
                    self.call_later(self._save_or_say, text.encode(), path)
                    return
                number = export.write_rows(path, rows, step, view.source)
                self.post_message(Told(f"written: {path}, {number} rows", True))
            except UserError as error:
                self.post_message(Told(str(error), False))

        self._do(work)

    def _do(self, work: Any) -> None:
        if not self._background.submit(work):
            self.say("too many commands are waiting", "bad")

    def _save_or_say(self, data: bytes, path: Path) -> None:
        try:
            self._save(data, path)
        except UserError as error:
            self.say(str(error), "bad")

    def _save(self, data: bytes, path: Path) -> None:
        """Write a file, or let the browser download it."""
        if self.is_web:
            self.deliver_binary(io.BytesIO(data), save_filename=path.name)
            self.say(f"downloaded: {path}", "good")
            return
        try:
            with path.open("xb") as file:
                file.write(data)
        except OSError as error:
            raise UserError(f"export {path}: {error.strerror}") from None
        self.say(f"written: {path}", "good")

    def on_told(self, message: Told) -> None:
        self.say(message.text, "good" if message.ok else "bad")
