"""Pipeline: the engine's copies under way, when each is due in virtual time, and what follows its commit.

A copy is committed at the step its cost says, whatever the machine did: if it has ended long before, it waits;
if it has not ended, the engine waits for it, within a bound. So the same seed and commands give the same run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from allocator.config import STEP_S
from allocator.errors import CopyCancelled, StorageError
from allocator.executor import CopyTicket, Executor
from allocator.manager import BlockManager
from allocator.snapshot import CopyNumbers
from allocator.transfers import Transfer, TransferKind
from allocator.work import Work

#: Longest wait for a copy that is due, in one turn: whoever owns the engine has others to answer. [s]
TURN_WAIT_S: Final = 0.2
#: How often a command in progress looks after its copies. [s]
LOOK_S: Final = 0.01
#: Longest wait for a copy when all are to be committed. [s]
WAIT_BOUND_S: Final = 10.0


class UnderWay(NamedTuple):
    """One copy under way.

    Attributes:
        transfer: What it does.
        ticket: Its place in the executor's queue.
        due_step: Step before which it is committed.
        done: Called after its commit.
        failed: Called after it was aborted, with the reason.
    """

    transfer: Transfer
    ticket: CopyTicket
    due_step: int
    done: Callable[[], None]
    failed: Callable[[StorageError], None]


class Pipeline:
    """Copies between scheduling and commit. Used by the engine's thread alone.

    Args:
        manager: Whose blocks are copied.
        executor: Carries the copies out.
        bytes_per_s: Speed of copies in virtual time; one copy at a time.
    """

    def __init__(self, manager: BlockManager, executor: Executor, bytes_per_s: float) -> None:
        self.executor = executor
        self._manager = manager
        self._bytes_per_s = bytes_per_s
        self._under_way: deque[UnderWay] = deque()
        self._busy_until_s = 0.0
        self._late_since_s: float | None = None
        #: Time that the copy committed or aborted last took. [s]
        self.last_seconds = 0.0
        #: Copies of the jobs that were committed or given up, each part of a job being one.
        self.num_ended = 0

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        """Whether another copy can start."""
        return self.executor.has_room

    @property
    def next_due(self) -> int | None:
        """Step before which the next copy is committed; ``None`` when none is under way."""
        return self._under_way[0].due_step if self._under_way else None

    @property
    def late_s(self) -> float | None:
        """Real seconds since a copy that was due was first found not to have ended; ``None`` when none is late. [s]"""
        return None if self._late_since_s is None else time.perf_counter() - self._late_since_s

    @property
    def pending_blocks(self) -> int:
        """Device blocks that copies under way will make allocatable."""
        return sum(copy.transfer.frees for copy in self._under_way)

    def numbers(self) -> CopyNumbers:
        """Return what observers are told."""
        executor = self.executor
        return CopyNumbers(
            mode=executor.mode,
            in_flight=len(self._under_way),
            capacity=executor.capacity,
            pending_blocks=self.pending_blocks,
            submitted=executor.num_submitted,
            refused=executor.num_refused,
            busy_s=executor.busy_s,
            wait_s=executor.wait_s,
            late_s=self.late_s,
            model_gb_per_s=self._bytes_per_s / 1e9,
        )

    def count(self, kind: TransferKind) -> int:
        """Return how many copies of a kind are under way."""
        return sum(1 for copy in self._under_way if copy.transfer.kind == kind)

    def start(
        self,
        begin: Callable[[], Transfer],
        step: int,
        done: Callable[[], None],
        failed: Callable[[StorageError], None],
    ) -> Transfer | None:
        """Begin a transfer and queue its copy; ``None`` when the queue has no slot, and then nothing has begun.

        A transfer without blocks to copy is committed at once.

        Raises:
            RequestError: From ``begin``.
        """
        if not self.executor.has_room:
            self.executor.num_refused += 1
            return None
        transfer = begin()
        if len(transfer.job.sources) == 0:
            self._manager.transfers.commit(transfer)
            done()
            return transfer
        ticket = self.executor.submit(transfer.job)
        assert ticket is not None
        seconds = len(transfer.job.sources) * self._manager.storage.block_bytes / self._bytes_per_s
        self._busy_until_s = max(self._busy_until_s, step * STEP_S) + seconds
        due = max(step + 1, math.ceil(self._busy_until_s / STEP_S - 1e-9))
        self._under_way.append(UnderWay(transfer, ticket, due, done, failed))
        return transfer

    def commit_due(self, step: int) -> str | None:
        """Commit, in order, all copies due by ``step``; return why not all could be, or ``None``."""
        while self._under_way and self._under_way[0].due_step <= step:
            if (reason := self._commit_first(TURN_WAIT_S)) is not None:
                return reason
        return None

    def settle(self) -> str | None:
        """Commit all copies under way, due or not; return why not all could be, or ``None``."""
        while self._under_way:
            if (reason := self._commit_first(WAIT_BOUND_S)) is not None:
                return reason
        self._busy_until_s = 0.0
        return None

    def commit_next(self) -> str | None:
        """Commit the first of the copies under way, due or not; return why it could not be, or ``None``."""
        return self._commit_first(WAIT_BOUND_S)

    def watch(self, work: Work) -> Iterator[None]:
        """Let a command's copies go on until they can be committed without a wait; yields while they do not end.

        A cancelled command's copies fail, at their next part or when they have ended.
        """
        moved_at_s = time.perf_counter()
        for copy in list(self._under_way):
            ticket, before = copy.ticket, work.done_blocks
            while not self.executor.wait(ticket, LOOK_S):
                ticket.is_cancelled = work.is_cancelled
                if work.done_blocks != before + ticket.copied_blocks:
                    work.done_blocks, moved_at_s = before + ticket.copied_blocks, time.perf_counter()
                elif time.perf_counter() - moved_at_s > WAIT_BOUND_S:
                    return  # whoever commits it finds it late, and says so
                yield
            work.done_blocks = before + ticket.copied_blocks
            if work.is_cancelled:  # in time, since nothing is committed yet
                ticket.error = ticket.error or CopyCancelled()

    def close(self) -> None:
        """End the executor's thread."""
        self.executor.close()

    def _commit_first(self, bound_s: float) -> str | None:
        copy = self._under_way[0]
        transfer, ticket = copy.transfer, copy.ticket
        started_s = time.perf_counter()
        if not self.executor.wait(ticket, bound_s):
            self._late_since_s = self._late_since_s or started_s
            return f"a {transfer.kind} of {len(ticket.job.sources)} blocks has not come back"
        self._late_since_s = None
        self._under_way.popleft()
        self.executor.collect(ticket)
        self.last_seconds, self.num_ended = ticket.seconds, ticket.num_copies
        if ticket.error is not None:
            self._manager.transfers.abort(transfer)
            copy.failed(ticket.error)
        else:
            self._manager.transfers.commit(transfer, ticket.seconds)
            copy.done()
        return None
