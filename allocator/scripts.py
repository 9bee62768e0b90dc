"""Scripts: what a request's client does on its own, at token counts or after a time. Owns the acts and the deadlines.

The engine carries scripts out between two steps, in virtual time, so that a run is the same for the same requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from allocator.config import STEP_S
from allocator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ForkAt:
    """Once ``num_tokens`` tokens are written, continue in one child more for each script in ``children``.

    Attributes:
        num_tokens: Tokens of prompt and output, at least 1; inside the prompt, the end of the prompt.
        children: What each child does in its turn; an empty script just runs to its end. At least one.
    """

    num_tokens: int
    children: tuple[Script, ...]

    def __post_init__(self) -> None:
        _check_tokens(self.num_tokens)
        if not self.children:
            raise ConfigError("ForkAt.children", "()", "at least one script")


@dataclass(frozen=True, slots=True)
class CancelAt:
    """Hang up once ``num_tokens`` tokens are written, unless the request is finished with them."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class CancelAfter:
    """Hang up ``seconds`` of virtual time after arriving (a child: after the fork), in whatever stage it is."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError("CancelAfter.seconds", self.seconds, "a finite number from 0")


TokenAct: TypeAlias = ForkAt | CancelAt
Act: TypeAlias = ForkAt | CancelAt | CancelAfter
Script: TypeAlias = tuple[Act, ...]


def token_acts(script: Script) -> tuple[TokenAct, ...]:
    """Return the acts that wait for a token count, in the order they happen; at one count, as they were written."""
    acts = [act for act in script if not isinstance(act, CancelAfter)]
    return tuple(sorted(acts, key=lambda act: act.num_tokens))


def patience_steps(script: Script) -> int | None:
    """Return after how many steps the client hangs up; ``None`` when it never does."""
    seconds = [act.seconds for act in script if isinstance(act, CancelAfter)]
    return max(1, math.ceil(min(seconds) / STEP_S - 1e-9)) if seconds else None


class Deadlines:
    """At which step which sequence's client hangs up. Entries of ended sequences are dropped as they come up."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int]] = []

    def add(self, step: int, seq_id: int) -> None:
        """Let ``seq_id`` end at ``step``."""
        heapq.heappush(self._due, (step, seq_id))

    def pop_due(self, step: int) -> list[int]:
        """Return the sequences whose time has come by ``step``, the earliest first, and forget them."""
        due = []
        while self._due and self._due[0][0] <= step:
            due.append(heapq.heappop(self._due)[1])
        return due

    def next_step(self, is_unfinished: Callable[[int], bool]) -> int | None:
        """Return the step of the next deadline that still concerns anybody; ``None`` when there is none."""
        while self._due and not is_unfinished(self._due[0][1]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None


def _check_tokens(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ConfigError("num_tokens", num_tokens, "a whole number from 1")
