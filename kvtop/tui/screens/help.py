"""HelpScreen: every key, made from the action table, and what is refused here with the reason."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.text import Text

from kvtop.tui.actions import GROUP_TITLES, Action
from kvtop.tui.look import Look
from kvtop.tui.screens.overlay import Overlay
from kvtop.tui.widgets.lines import fit, line

_KEYS = 7


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
        text = Text(end="")
        for group, title in GROUP_TITLES.items():
            actions = [a for a in look.table.actions if a.group == group and a.help]
            refusal = next((r for a in actions if (r := self._refusal(a))), None)
            text.append(f"{title}", look.style("title"))
            text.append(f"   not here: {refusal}" if refusal else "", look.style("warn"))
            text.append("\n")
            for action in actions:
                grey = self._refusal(action) is not None
                text.append_text(
                    line(
                        (f"  {fit(action.shown or f':{action.line}', keys)}", look.style("faint" if grey else "key")),
                        (f" {action.help}\n", look.style("faint" if grey else "text")),
                    )
                )
        text.append("Mouse", look.style("title"))
        text.append("\n  hover inspects; click moves the cursor, or selects a row; wheel moves", look.style("text"))
        text.append("\n  drag the edges beside and below the map, or a tab to its new place\n", look.style("text"))
        text.append("\nLower case looks; a capital acts, and asks first.", look.style("dim"))
        return text
