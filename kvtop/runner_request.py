"""RunnerRequest: what another thread asks of an engine's thread, and its answer."""

from __future__ import annotations

import threading
from enum import Enum

from allocator.commands import Command
from allocator.errors import AllocatorError
from allocator.plans import Outcome, Plan
from kvtop.model.observation import Focus, Observation


class RequestState(Enum):
    """How far a request has come."""

    QUEUED = "queued"
    TAKEN = "taken"
    ABANDONED = "abandoned"


class RunnerRequest:
    """One question of another thread; ``state`` changes under the queue's lock only."""

    __slots__ = ("answer", "answered", "error", "payload", "state", "wants_plan")

    def __init__(self, payload: Command | Focus, wants_plan: bool = False) -> None:
        self.payload = payload
        self.wants_plan = wants_plan
        self.state = RequestState.QUEUED
        self.answered = threading.Event()
        self.answer: Plan | Outcome | Observation | None = None
        self.error: str | None = None

    def finish(self, answer: Plan | Outcome | Observation | None, error: str | None = None) -> None:
        """Give the answer, or say why there is none, and end the wait for it."""
        self.answer, self.error = answer, error
        self.answered.set()


def describe(error: Exception) -> str:
    """Return what went wrong, in the words of whoever asked."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, AllocatorError) else f"{type(error).__name__}: {text}"
