"""KvtopError and UserError: failures of the console, with the exit code the command line promises."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_INTERRUPTED: Final = 130


class KvtopError(Exception):
    """Root of the console's errors."""

    exit_code = EXIT_FAILED


class UserError(KvtopError):
    """The request was wrong: one line that says what, where, and what is allowed."""

    exit_code = EXIT_USAGE


class SourceError(KvtopError):
    """The far end failed or is gone; the last view stays, marked stale."""

    exit_code = EXIT_UNREACHABLE
