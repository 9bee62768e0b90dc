"""What the system tells of other processes."""

from __future__ import annotations


def program_of(pid: int) -> str | None:
    """Return a process's program; ``None`` where it is gone or may not be seen."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() or None
    except OSError:
        return None
