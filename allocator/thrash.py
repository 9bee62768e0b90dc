"""ThrashGuard: when preemptions undo more work than gets done, fewer sequences may run. Pure; owned by Engine.

A run thrashes when, within ``WINDOW_STEPS`` steps, at least ``MIN_PREEMPTIONS`` preemptions for room gave up more
tokens than were generated since the first of them. As many may then run as run after the last of them, and the count
starts anew. For each ``WINDOW_STEPS`` steps without a preemption twice as many may run, until that is no limit. So a
pool that holds one sequence at a time ends up with one, and gives up at most ``MIN_PREEMPTIONS`` sequences' tokens a
window for finding out whether it still must. Virtual time alone counts, so skipped steps decide alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

#: Steps over which preemptions are weighed, and after which a limit is eased: 5 virtual seconds.
WINDOW_STEPS: Final = 200
MIN_PREEMPTIONS: Final = 4


@dataclass(slots=True)
class ThrashGuard:
    """The weighing of preemptions against progress.

    Attributes:
        max_running: Limit without thrash.
        limit: Sequences that may run at once on account of thrash; ``None`` is no such limit.
        episodes: Times a run began to thrash.
    """

    max_running: int
    limit: int | None = None
    episodes: int = 0
    _quiet_since: int = 0
    _recent: deque[tuple[int, int, int]] = field(default_factory=deque)

    def preempted(self, step: int, lost_tokens: int, generated_tokens: int, num_running: int) -> str | None:
        """Weigh one preemption for room; return what to say when it made the limit tighter.

        Args:
            step: The step.
            lost_tokens: Tokens the victim had written.
            generated_tokens: Tokens generated in the run so far.
            num_running: Sequences that run after it.
        """
        self._quiet_since = step
        recent = self._recent
        recent.append((step, lost_tokens, generated_tokens))
        while recent[0][0] <= step - WINDOW_STEPS:
            recent.popleft()
        lost = sum(tokens for _, tokens, _ in recent)
        gained = generated_tokens - recent[0][2]
        if len(recent) < MIN_PREEMPTIONS or lost <= gained:
            return None
        limit = max(1, num_running)
        said = (
            f"thrashing: {len(recent)} preemptions in {step - recent[0][0] + 1} steps gave up {lost:,} tokens "
            f"for {gained:,} new ones; at most {limit} may run"
        )
        recent.clear()
        if self.limit is not None and limit >= self.limit:
            return None
        self.episodes += self.limit is None
        self.limit = limit
        return said

    def pass_time(self, step: int) -> str | None:
        """Ease the limit for every quiet window that ended by ``step``; return what to say when one did."""
        if self.limit is None or step < self._quiet_since + WINDOW_STEPS:
            return None
        while self.limit is not None and step >= self._quiet_since + WINDOW_STEPS:
            self._quiet_since += WINDOW_STEPS
            self.limit = 2 * self.limit if 2 * self.limit < self.max_running else None
        return "no more thrashing: no limit" if self.limit is None else f"at most {self.limit} may run, after thrashing"

    def next_change(self) -> int | None:
        """Return the step at which ``pass_time`` next eases the limit if nobody is preempted; ``None`` is never."""
        return None if self.limit is None else self._quiet_since + WINDOW_STEPS
