"""Keys typed ahead: those that came before a dialog stood, though it was asked for, are the dialog's."""

from __future__ import annotations

from typing import Final

from textual import events
from textual.app import App

from kvtop.tui.screens.dialog import Dialog

#: Where a key keeps the screen it was first given to.
_FIRST: Final = "kvtop_first_screen"


class TypedAhead(App[None]):
    """Without this, a pasted ``:resize 900`` opens the command line and then does what r, e, s and the others do."""

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key):
            if not event.is_forwarded:
                setattr(event, _FIRST, self.screen)
            elif isinstance(self.screen, Dialog) and getattr(event, _FIRST, None) is not self.screen:
                # Nobody below wanted it, and meanwhile there is somebody above.
                again = events.Key(event.key, event.character)
                again._set_forwarded()
                setattr(again, _FIRST, self.screen)
                self.screen.post_message(again)
                return
        await super().on_event(event)
