"""HelpScreen: every key, made from the action table, and what is refused here with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from kvtop.tui.actions import GROUP_TITLES, Action
from kvtop.tui.look import Look
from kvtop.tui.screens.overlay import Overlay
from kvtop.tui.widgets.lines import fit, line

_KEYS: Final = 7
#: Of the lines in which a heading goes on, and the narrowest that words become. [columns]
_INDENT: Final = 2
_MIN_WORDS: Final = 10
_MOUSE: Final = (
    "hover inspects; click moves the cursor, or selects a row; wheel moves",
    "drag the edges beside and below the map, or a tab to its new place",
)


class HelpScreen(Overlay):
    """Every key.

    Args:
        look: How to draw.
        refusal: Says why an action cannot be done here.
    """

    def __init__(self, look: Look, refusal: Callable[[Action], str | None]) -> None:
        self._refusal = refusal
        super().__init__(look, "Keys", opened_by="help", width=76)

    def text(self) -> Text:
        """Return what it says."""
        look = self.look
        keys = max(_KEYS, *(cell_len(a.shown) for a in look.table.actions if a.help))
        rows: list[Text] = []
        for group, title in GROUP_TITLES.items():
            actions = [a for a in look.table.actions if a.group == group and a.help]
            refusal = next((r for a in actions if (r := self._refusal(a))), None)
            heading = line((title, look.style("title")))
            heading.append(f"   not here: {refusal}" if refusal else "", look.style("warn"))
            rows += self._hang(line(), heading)
            for action in actions:
                grey = self._refusal(action) is not None
                key = line(
                    (f"  {fit(action.shown or f':{action.line}', keys)} ", look.style("faint" if grey else "key"))
                )
                rows += self._hang(key, line((action.help, look.style("faint" if grey else "text"))))
        rows.append(line(("Mouse", look.style("title"))))
        for words in _MOUSE:
            rows += self._hang(line("  "), line((words, look.style("text"))))
        rows += [
            line(),
            *self._hang(line(), line(("Lower case looks; a capital acts, and asks first.", look.style("dim")))),
        ]
        return Text("\n", end="").join(rows)

    def _hang(self, first: Text, words: Text) -> list[Text]:
        """Return words after what stands before them; the lines they go on in begin below the words."""
        indent = first.cell_len
        parts = words.wrap(self.app.console, max(_MIN_WORDS, self.room - (indent or _INDENT)), no_wrap=False)
        rows = [first if i == 0 else line(" " * (indent or _INDENT)) for i in range(len(parts))]
        for row, part in zip(rows, parts, strict=True):
            part.rstrip()
            row.append_text(part)
        return rows
