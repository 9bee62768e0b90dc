"""FaultyStorage: any storage, with copies that fail, take long or do not come back when they are told to.

Copies may come from any thread, and faults may be armed from any other. Faults at random depend on the seed and on
how many copies came before, so a run whose copies come in the same order meets the same faults.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.errors import StorageError
from allocator.fault_kinds import FAULTS, FaultKind
from allocator.ids import Tier
from allocator.plans import CopyJob
from allocator.storage import Storage


class Strike(NamedTuple):
    """A fault that struck a copy.

    Attributes:
        kind: Its kind.
        text: One line about it.
        copy: How many copies had come before that one.
    """

    kind: FaultKind
    text: str
    copy: int


class FaultyStorage:
    """Passes everything on to ``inner``, except that faults strike its copies.

    Args:
        inner: The storage that does the work.
        rates: Probability with which each kind strikes a copy; kinds that strike no copies are ignored.
        seed: Seed of everything random.
        wait: Waits until an event is set, for so many seconds at most, and returns whether it was.

    Attributes:
        inner: The storage that does the work.
        strikes: What struck copies and was not taken yet, oldest first.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        rates: Mapping[FaultKind, float] | None = None,
        seed: int = 0,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self.inner = inner
        self.block_bytes = inner.block_bytes
        self.device_name = inner.device_name
        self._rates = {kind: rate for kind, rate in (rates or {}).items() if FAULTS[kind].strikes_copies}
        self._random = {kind: random.Random(f"{seed} {kind}") for kind, fault in FAULTS.items() if fault.strikes_copies}
        self._wait = wait
        self._lock = threading.Lock()
        #: Copies still to be struck on purpose, and for how long each.
        self._armed: dict[FaultKind, tuple[int, float]] = {}
        self.strikes: deque[Strike] = deque()
        self._num_copies = 0
        self._stuck: list[str] = []
        self._released = threading.Event()
        self._closed = threading.Event()

    # -- faults --------------------------------------------------------------------------------------

    def arm(self, kind: FaultKind, count: int, seconds: float) -> None:
        """Let ``kind`` strike the next ``count`` copies, for ``seconds`` each; 0 copies takes it back.

        Taking back ``stuck-executor`` also lets the copies go on that are stuck.
        """
        with self._lock:
            self._armed[kind] = (count, seconds)
        if kind == "stuck-executor" and count == 0:
            self.release()

    def armed(self, kind: FaultKind) -> int:
        """Return how many copies ``kind`` is still to strike on purpose."""
        with self._lock:
            return self._armed.get(kind, (0, 0.0))[0]

    def release(self) -> None:
        """Let every copy that is stuck go on, as if the executor had recovered."""
        with self._lock:
            released, self._released = self._released, threading.Event()
        released.set()

    @property
    def stuck_reason(self) -> str | None:
        """Why copies do not come back; ``None`` while none is stuck. Safe from any thread."""
        with self._lock:
            return self._stuck[0] if self._stuck else None

    def take_strikes(self, num_ended: int | None = None) -> list[Strike]:
        """Return what struck copies since the last call, oldest first.

        Args:
            num_ended: Tell of so many copies at most, the first ones, and keep the rest; ``None`` tells of all.
        """
        taken = []
        with self._lock:
            while self.strikes and (num_ended is None or self.strikes[0].copy < num_ended):
                taken.append(self.strikes.popleft())
        return taken

    # -- storage -------------------------------------------------------------------------------------

    def copy(self, job: CopyJob) -> int:
        blocks = len(job.sources)
        if blocks == 0:
            return self.inner.copy(job)
        with self._lock:
            number, self._num_copies = self._num_copies, self._num_copies + 1
            slow_s, stuck_s = self._drawn("slow-copy"), self._drawn("stuck-executor")
            good = self._random["failing-copy"].randrange(blocks)  # drawn for each copy, struck or not
            fails = self._drawn("failing-copy") is not None
            what = f"copy of {blocks} block{'' if blocks == 1 else 's'}, {job.source_tier} to {job.destination_tier}"
            if slow_s is not None:
                self.strikes.append(Strike("slow-copy", f"{what}, takes {slow_s:g} s longer", number))
        if slow_s is not None:
            self._wait(self._closed, slow_s)
        if stuck_s is not None:
            self._be_stuck(what, stuck_s, number)
        if not fails:
            return self.inner.copy(job)
        self.inner.copy(CopyJob(job.source_tier, job.sources[:good], job.destination_tier, job.destinations[:good]))
        text = f"{what}, failed after {good} of them"
        with self._lock:
            self.strikes.append(Strike("failing-copy", text, number))
        raise StorageError(f"injected: {text}")

    def resize(self, tier: Tier, num_blocks: int) -> None:
        self.inner.resize(tier, num_blocks)

    def write_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> None:
        self.inner.write_stamps(tier, slots, stamps)

    def check_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return self.inner.check_stamps(tier, slots, stamps)

    def flip_bit(self, tier: Tier, slot: int, bit: int) -> None:
        self.inner.flip_bit(tier, slot, bit)

    def num_slabs(self, tier: Tier) -> int:
        return self.inner.num_slabs(tier)

    def close(self) -> None:
        self._closed.set()
        self.release()
        self.inner.close()

    # -- inside --------------------------------------------------------------------------------------

    def _drawn(self, kind: FaultKind) -> float | None:
        """Return the seconds for which ``kind`` strikes this copy; ``None`` when it does not."""
        count, seconds = self._armed.get(kind, (0, 0.0))
        rate = self._rates.get(kind)
        struck = rate is not None and self._random[kind].random() < rate
        if count:
            self._armed[kind] = (count - 1, seconds)
            return seconds
        return FAULTS[kind].seconds if struck else None

    def _be_stuck(self, what: str, seconds: float, number: int) -> None:
        text = f"{what}, stuck for {seconds:g} s at most"
        with self._lock:
            released = self._released
            if self._closed.is_set():
                return
            self.strikes.append(Strike("stuck-executor", text, number))
            reason = f"executor stuck: {text} (injected)"
            self._stuck.append(reason)
        try:
            came_back = self._wait(released, seconds)
        finally:
            with self._lock:
                self._stuck.remove(reason)
        if not came_back:
            raise StorageError(f"injected: {what}, did not come back in {seconds:g} s and is given up")
