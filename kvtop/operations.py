"""Operations: the one door for commands. Protocol, and the read-only door of attached engines."""

from __future__ import annotations

from typing import Final, Protocol

from allocator.plans import Outcome, Plan
from kvtop.serving_commands import AnyCommand

NOT_OFFERED: Final = "not offered by this engine"


class Operations(Protocol):
    """Plans and applies commands on one engine. Both wait for a step boundary: call them from a worker."""

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; a refusal is a plan with its reason.

        Raises:
            SourceError: The far end is gone or did not answer in ``timeout_s``.
        """

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Do ``command`` at the next step boundary, after checking it again there.

        Raises:
            SourceError: The far end is gone or did not answer in ``timeout_s``.
        """


class ReadOnly:
    """Refuses everything, with the reason: what an attached engine gets without ``--allow-operations``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        return Plan(summary="read only", refusal=self.reason)

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        return Outcome(ok=False, message=self.reason)
