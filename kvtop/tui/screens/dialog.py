"""Dialog: a screen above the panes that is answered once, however fast the keys come."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen, ScreenResultType


class Dialog(ModalScreen[ScreenResultType]):
    """Base of the dialogs. The keys of a held key may arrive while the first one's answer still closes the dialog;
    answered again, it would do its command twice and close the screen below it."""

    _is_answered = False

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close with ``result``; does nothing the second time."""
        if self._is_answered:
            return AwaitComplete.nothing()
        self._is_answered = True
        return super().dismiss(result)
