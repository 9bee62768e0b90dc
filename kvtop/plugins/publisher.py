"""PoolPublisher: publishes a foreign engine's block pool by a name on this machine. Owns its socket, map and threads.

To a console it is like any published engine, except that it takes no commands. Nothing is read while nobody looks.
Readings are made so seldom that they and the answers take about a hundredth of the engine process's time; who asks in
between is told the last one. When anything fails, the publication ends and the engine's methods are put back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from allocator.block_map import BlockMapWriter
from allocator.commands import Command, command_name
from allocator.config import STEP_S
from allocator.ids import IdArray
from allocator.plans import Outcome, Plan
from allocator.snapshot import MAX_SEQUENCES, Counters, Snapshot
from kvtop.errors import SourceError
from kvtop.local_socket import NamedSocket
from kvtop.model.lineage import lineage
from kvtop.model.observation import MAX_VICTIMS, BlockHolders, Focus, Kin, Observation
from kvtop.plugins.pool_state import ForeignPool, PoolFacts, PoolState, Showing, Shown
from kvtop.plugins.step_gate import StepGate
from kvtop.server import FIRST_WORD_S, EngineServer

#: Share of the engine's process's time that readings and answers may take, and seconds between two readings, at least.
#: Answers alone never put a reading off by more than a reading does: many consoles must not stop each other's map.
SHARE: Final = 0.01
EVERY_S: Final = 0.05
#: Seconds for which other threads get their turn between two slices of a large pool.
_PAUSE_S: Final = 0.0003
#: Seconds between two looks at the rate of steps, at least.
_RATE_S: Final = 1.0
_MAX_HOLDERS: Final = 64
#: Seconds in which the engine must reach the end of a step, at most, and in which a reading must end at the close.
_STEP_S: Final = 5.0
_END_S: Final = 1.0


class _Published(NamedTuple):
    """What the newest reading showed.

    Attributes:
        snapshot, shown, victims: As it was read.
        holders: Holders of the blocks that were asked for since.
        kin: Who shares with whom, once that was asked for.
    """

    snapshot: Snapshot
    shown: Shown
    victims: tuple[int, ...] | None
    holders: dict[int, BlockHolders | None]
    kin: list[tuple[Kin, ...]]


class PoolPublisher:
    """Publishes one pool until ``close``, or until something fails.

    Args:
        name: The name.
        pool: The pool.
        gate: Reads it between two steps.
        log: Told when it fails.
        on_failure: Called when it failed, such as to put the engine's methods back; must not raise.
        clock: Monotonic seconds.
        thread_clock: Processor seconds of the calling thread.

    Attributes:
        failure: Why it ended by itself; ``None`` while it has not.

    Raises:
        UserError: It is no name, or an engine with that name runs already.
        KvtopError: The socket or the map cannot be made.
    """

    def __init__(
        self,
        name: str,
        pool: ForeignPool[Any],
        gate: StepGate[Any],
        *,
        log: Callable[[str], None],
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.name = name
        self.failure: str | None = None
        self._pool, self._gate = pool, gate
        self._facts: PoolFacts = pool.facts
        self._log = log
        self._on_failure = on_failure
        self._clock, self._thread_clock = clock, thread_clock
        self._began_s = clock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._published: _Published | None = None
        self._read_s = self._began_s
        self._cost_s = 0.0
        self._answers_s = 0.0
        self._thread = threading.local()
        self._rate: float | None = None
        self._rate_from = (self._began_s, 0)
        self._showing = Showing(self._facts.block_size)
        self._socket = NamedSocket(name)
        self.path = self._socket.path
        self._map: BlockMapWriter | None = None
        try:
            self._map = BlockMapWriter(
                self._socket.create_map(),
                engine=name,
                block_size=self._facts.block_size,
                block_bytes=self._facts.block_bytes,
                slab_size=1,
            )
            self._server = EngineServer(
                self,
                engine=name,
                notes=self._facts.notes,
                missing=self._facts.missing,
                first_word_s=FIRST_WORD_S,
                complain=log,
            )
            self._socket.start(self._server.serve, log)
        except BaseException:
            self._socket.close()
            raise

    # ---- what consoles ask, in the threads of their connections

    def observe(self, focus: Focus, timeout_s: float) -> Observation:
        """Return the newest reading, made now if one is due.

        Raises:
            SourceError: The engine ended no step in time, or the publication has ended.
        """
        began_s = self._thread_clock()
        # What this thread did since it left here is the sending of that answer, and the taking of this question.
        since_s = began_s - getattr(self._thread, "left_s", began_s)
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise SourceError(f"another console is not answered after {timeout_s:g} s")
        try:
            self._answers_s += since_s
            if self._is_closed:
                raise SourceError(self.failure or "the engine has stopped")
            if self._published is None or self._clock() >= self._reading_due_s():
                self._pool.want_victims(min(focus.num_victims, MAX_VICTIMS))
                try:
                    self._publish(timeout_s)
                except SourceError:
                    raise
                except Exception as error:
                    self._fail(error)
                    raise SourceError(self.failure or "") from None
                began_s = self._thread_clock()  # what the reading took is known already
            assert self._published is not None
            answer = _observation(self._published, focus)
            self._thread.left_s = self._thread_clock()
            self._answers_s += self._thread.left_s - began_s
            return answer
        finally:
            self._lock.release()

    def plan(self, command: Command, timeout_s: float = 5.0) -> Plan:
        """Return that nothing can be done from here."""
        return Plan(summary=command_name(command), refusal=self._facts.missing["operations"])

    def apply(self, command: Command, timeout_s: float = 60.0) -> Outcome:
        """Do nothing, and say why."""
        return Outcome(ok=False, message=f"{command_name(command)}: {self._facts.missing['operations']}")

    # ---- the publication

    def _reading_due_s(self) -> float:
        """Return when the next reading is due."""
        cost_s = self._cost_s + min(self._answers_s, self._cost_s)
        return self._read_s + max(EVERY_S, cost_s / SHARE)

    def close(self) -> None:
        """End the publication and remove its files. Safe to call twice, from any thread."""
        self._is_closed = True
        self._socket.close()
        self._server.close()
        if self._lock.acquire(timeout=_END_S):  # else the map goes with the process
            if self._map is not None:
                self._map.close()
                self._map = None
            self._lock.release()

    def _publish(self, timeout_s: float) -> None:
        taken = self._gate.read(min(timeout_s, _STEP_S))
        began_s = self._thread_clock()
        state = self._pool.digest(taken, _give_way)
        now_s = self._clock()
        step = max(int((now_s - self._began_s) / STEP_S), self._published.snapshot.step if self._published else 0)
        shown = self._showing.show(state, step)
        assert self._map is not None
        self._map.publish(step, shown.arrays, None)
        self._published = _Published(self._snapshot(state, shown, step, now_s), shown, state.victims, {}, [])
        self._read_s, self._answers_s = now_s, 0.0
        self._cost_s = self._gate.cost_s + self._thread_clock() - began_s

    def _fail(self, error: Exception) -> None:
        self.failure = f"the publication ended by itself: {type(error).__name__}: {error}"
        self._is_closed = True
        self._on_failure()
        with contextlib.suppress(Exception):
            self._log(f"{self.name}: {self.failure}; the engine is not affected")
        # In a thread of its own: this one is a connection's, and closing waits for those.
        threading.Thread(target=self._close_slowly, name="kvtop-close", daemon=True).start()

    def _close_slowly(self) -> None:
        """Close, and leave consoles the time to hear why."""
        self._socket.close()
        time.sleep(_END_S)
        self.close()

    def _snapshot(self, state: PoolState, shown: Shown, step: int, now_s: float) -> Snapshot:
        facts = self._facts
        since_s, steps = self._rate_from
        if now_s - since_s >= _RATE_S:
            self._rate = (state.steps - steps) / (now_s - since_s)
            self._rate_from = (now_s, state.steps)
        return Snapshot(
            step=step,
            time_s=step * STEP_S,
            phase="running" if state.num_running or state.num_waiting else "idle",
            speed=1.0,
            steps_per_s=self._rate,
            source=self.name,
            workload=facts.model,
            geometry=facts.layout,
            device=facts.device,
            block_size=facts.block_size,
            block_bytes=facts.block_bytes,
            slab_size=max(1, len(state.ref_count)),
            eviction=facts.eviction,
            preempt=facts.preempt,
            policy=facts.policy,
            compact="none",
            compact_threshold_ratio=float("nan"),
            watermark_ratio=float("nan"),
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_swapped=0,
            counters=msgspec.convert(state.totals, Counters),
            unknown_counters=tuple(name for name in Counters.__struct_fields__ if name not in state.totals),
            sequences=shown.rows[:MAX_SEQUENCES],
            notes=facts.notes,
        )


def _observation(published: _Published, focus: Focus) -> Observation:
    """Return what is asked for; what takes a walk over all tables is made once a reading."""
    tables, victims = published.shown.tables, published.victims
    if focus.block_id is not None and focus.block_id not in published.holders:
        published.holders[focus.block_id] = _holders(published.shown, focus.block_id)
    if focus.lineage and not published.kin:
        published.kin.append(lineage(tables))
    return Observation(
        snapshot=published.snapshot,
        device=published.shown.arrays,
        host=None,
        focus_table=None if focus.seq_id is None else tables.get(focus.seq_id),
        focus_block=None if focus.block_id is None else published.holders[focus.block_id],
        next_victims=None if victims is None or not focus.num_victims else victims[: focus.num_victims],
        lineage=published.kin[0] if focus.lineage else None,
    )


def _holders(shown: Shown, block_id: int) -> BlockHolders | None:
    """Return who holds a block, as far as tables tell; ``None`` where there is no such block."""
    if not 0 <= block_id < shown.arrays.num_blocks:
        return None
    found = [(number, place) for number, table in shown.tables.items() for place in _places(table, block_id)]
    total = max(len(found), int(shown.arrays.ref_count[block_id]))
    return BlockHolders(block_id, tuple(found[:_MAX_HOLDERS]), total)


def _places(table: IdArray, block_id: int) -> Iterable[int]:
    places: list[int] = np.flatnonzero(table == block_id).tolist()
    return places


def _give_way() -> None:
    time.sleep(_PAUSE_S)
