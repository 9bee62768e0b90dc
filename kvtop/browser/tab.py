"""The console of one browser tab, a process of its own: ``python -m kvtop.browser.tab ORDER``.

It attaches, whatever it looks at, and starts no engine; so closing a tab ends nothing else, and a console that may
only look has no door that would do anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from kvtop.attachment import Attachment
from kvtop.browser.order import ConsoleOrder
from kvtop.console import make_app
from kvtop.targets import open_targets
from kvtop.tui.app import KvtopApp


def tab_app(order: ConsoleOrder) -> KvtopApp:
    """Return the console that is ordered."""

    def connect() -> Attachment:
        return open_targets(order.targets, order.options)

    return make_app(connect, order.look(), again="attaches again")


def main(arguments: Sequence[str]) -> int:
    """Show the console that the first argument orders, a ``ConsoleOrder`` as JSON, and return its exit code."""
    app = tab_app(msgspec.json.decode(arguments[0], type=ConsoleOrder))
    try:
        app.run()
        return app.return_code or 0
    finally:
        if app.attachment is not None:
            app.attachment.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
