"""Attachment: one source, one door for commands, and the current view. The screens' only link to an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation, RemoteObservation
from kvtop.model.reduce import MAX_EVENTS, fail, reduce
from kvtop.model.view import View
from kvtop.operations import Operations
from kvtop.sources.base import Source


class Attachment:
    """Reads a source and keeps the newest view.

    ``poll`` is called by one thread at a time; ``view`` may be read from any thread, since a view
    is frozen and replaced whole.
    """

    def __init__(self, source: Source, operations: Operations, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self.operations = operations
        self.clock = clock
        self.view = View(source=source.name)
        self._poll_lock = threading.Lock()
        self._focus_seq: int | None = None
        self._focus_block: int | None = None
        self._num_victims = 0
        self._wants_lineage = False
        self._next_event = 0

    def look_at(self, *, seq_id: int | None, block_id: int | None, num_victims: int = 0, lineage: bool = False) -> None:
        """Ask from the next reading on for more than the whole.

        Args:
            seq_id: A sequence whose block table is wanted.
            block_id: A block whose holders are wanted.
            num_victims: How many of the next victims are wanted.
            lineage: Whether it is wanted who shares blocks with whom.
        """
        self._focus_seq, self._focus_block, self._num_victims = seq_id, block_id, num_victims
        self._wants_lineage = lineage

    def poll(self, timeout_s: float = 2.0) -> View:
        """Read once and fold the reading into ``view``; a failure keeps the last facts, with the reason."""
        with self._poll_lock:
            focus = Focus(
                self._focus_seq,
                self._focus_block,
                self._next_event,
                self._num_victims,
                self._wants_lineage,
                max_events=MAX_EVENTS,
            )
            try:
                observation = self.source.read(focus, timeout_s)
                before = self.view.snapshot
                if (
                    isinstance(observation, Observation)
                    and before is not None
                    and observation.snapshot.step < before.step
                ):
                    # A recording was wound back: nothing that was known of later steps has happened yet.
                    self.view = View(source=self.source.name, generation=self.view.generation)
                    self._next_event = 0
                    observation = self.source.read(msgspec.structs.replace(focus, next_event=0), timeout_s)
            except SourceError as error:
                self.view = fail(self.view, str(error))
                return self.view
            if isinstance(observation, Observation) and observation.snapshot.events:
                self._next_event = observation.snapshot.events[-1].number + 1
            elif isinstance(observation, RemoteObservation):
                self._next_event = 0  # the next of ours that is opened may be another engine
            self.view = reduce(self.view, observation, self.clock())
            return self.view

    @property
    def reason(self) -> str | None:
        """Why the last reading failed, without the seconds until the next one, which change with each look."""
        return None if self.view.error is None else self.view.error.partition("; asked again")[0]

    def close(self) -> None:
        """Let go of the engine; ends it if this console started it."""
        self.source.close()
