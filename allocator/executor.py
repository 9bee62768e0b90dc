"""Executor: a bounded queue of copies, and the one thread that carries them out. Owns no block and takes no lock.

The scheduler submits, goes on with the next step, and commits between steps what is due by then. Jobs are copied in
the order in which they were submitted. A slot of the queue is free again when its job has been collected, so
that at most ``capacity`` copies keep blocks fenced; whoever finds no slot is told so and never waits for one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from allocator.config import ExecutorMode
from allocator.errors import CopyCancelled, StorageError
from allocator.plans import CopyJob
from allocator.work import parts_of

#: Copies under way at once.
CAPACITY: Final = 8
#: Longest wait for the thread when the executor is closed. [s]
CLOSE_BOUND_S: Final = 5.0


class CopyTicket:
    """A submitted copy.

    Attributes:
        job: What is copied.
        seconds: Time the copy took, once done.
        moved_bytes: Bytes read, once done.
        error: Why it failed; ``None`` when it did not.
        copied_blocks: Blocks copied so far.
        num_copies: Copies that the executor had begun by its end, each part of a job being one.
        is_cancelled: Whether it is to fail before its next part.
    """

    __slots__ = ("_done", "copied_blocks", "error", "is_cancelled", "job", "moved_bytes", "num_copies", "seconds")

    def __init__(self, job: CopyJob) -> None:
        self.job = job
        self.seconds = 0.0
        self.moved_bytes = self.copied_blocks = self.num_copies = 0
        self.is_cancelled = False
        self.error: StorageError | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        return self._done.is_set()


class Executor:
    """Carries out copies in a thread of its own, or at once in the caller's.

    Args:
        copy: Copies one job and returns the bytes read; raises ``StorageError``.
        mode: ``thread``, or ``inline`` to copy at submission.
        capacity: Jobs that may be submitted and not yet collected.
        part_blocks: Blocks of a job that are copied at once, at most; between two parts it can be cancelled.

    Attributes:
        num_queued: Jobs submitted and not yet collected.
        num_submitted: Jobs submitted so far.
        num_refused: Times there was no slot.
        busy_s: Time spent copying. [s]
        wait_s: Time ``wait`` waited. [s]
    """

    def __init__(
        self,
        copy: Callable[[CopyJob], int],
        mode: ExecutorMode = "thread",
        capacity: int = CAPACITY,
        part_blocks: int = 1 << 62,
    ) -> None:
        self._part_blocks = part_blocks
        self.mode: ExecutorMode = mode
        self.capacity = capacity
        self.num_queued = self.num_submitted = self.num_refused = 0
        self.busy_s = self.wait_s = 0.0
        self._copy = copy
        self._slots = threading.Semaphore(capacity)
        self._jobs: queue.SimpleQueue[CopyTicket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Counted by whoever carries jobs out.
        self._num_copies = 0

    def submit(self, job: CopyJob) -> CopyTicket | None:
        """Queue a copy; return its ticket, or ``None`` when every slot is taken."""
        if not self._slots.acquire(blocking=False):
            self.num_refused += 1
            return None
        ticket = CopyTicket(job)
        self.num_queued += 1
        self.num_submitted += 1
        if self.mode == "inline":
            self._carry_out(ticket)
            return ticket
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
            self._thread.start()
        self._jobs.put(ticket)
        return ticket

    @property
    def has_room(self) -> bool:
        """Whether ``submit`` would find a slot."""
        return self.num_queued < self.capacity

    def wait(self, ticket: CopyTicket, timeout_s: float) -> bool:
        """Wait for a copy to end; return whether it has."""
        if ticket.done:
            return True
        started = time.perf_counter()
        done = ticket._done.wait(timeout_s)
        self.wait_s += time.perf_counter() - started
        return done

    def collect(self, ticket: CopyTicket) -> None:
        """Free the slot of a copy that has ended."""
        assert ticket.done
        self.num_queued -= 1
        self._slots.release()

    def close(self) -> None:
        """Let the thread end after what is queued, and wait for it, within ``CLOSE_BOUND_S``."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_BOUND_S)
            self._thread = None

    def _work(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            self._carry_out(ticket)

    def _carry_out(self, ticket: CopyTicket) -> None:
        started = time.perf_counter()
        try:
            for part in parts_of(ticket.job, self._part_blocks):
                if ticket.is_cancelled:
                    raise CopyCancelled
                self._num_copies += 1
                ticket.moved_bytes += self._copy(part)
                ticket.copied_blocks += len(part.sources)
        except StorageError as error:
            ticket.error = error
        except Exception as error:  # whatever else goes wrong in a copy must reach the engine, not end this thread
            ticket.error = StorageError(f"copying {len(ticket.job.sources)} blocks failed: {error!r}")
        ticket.seconds = time.perf_counter() - started
        self.busy_s += ticket.seconds
        ticket.num_copies = self._num_copies
        ticket._done.set()
