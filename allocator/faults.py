"""FaultInjector: lets faults strike an engine between two steps, at random or when an operator asks. Owns what is due.

Faults of copies are handed to the engine's ``FaultyStorage``; the others strike here, after a turn and before
anybody checks. Randomness depends on the seed and the step alone: a rate becomes the step of the next strike, and no
turn skips it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from allocator.config import EngineConfig
from allocator.errors import Refused
from allocator.fault_kinds import FAULT_KINDS, FAULTS, MAX_COUNT, MAX_SECONDS, FaultKind
from allocator.faulty_storage import FaultyStorage
from allocator.ids import BlockFlag, IdArray, Tier
from allocator.plans import Plan

if TYPE_CHECKING:
    from allocator.commands import InjectFault
    from allocator.engine import Engine
    from allocator.manager import BlockManager

#: Steps until a strike that never comes.
_NEVER: Final = 1 << 62
#: Bits of a slot that one may choose from: enough for every row of the largest geometry.
_BITS: Final = 1 << 16


class FaultInjector:
    """The faults of one engine.

    Args:
        config: The engine's settings.
        storage: The storage that its copies go through.

    Attributes:
        struck: How often each kind struck.
        lose_client: Loses an attached client and says which, or ``None`` when there is none. Without it, or then, the
            client behind a sequence of the workload is lost.
    """

    def __init__(self, config: EngineConfig, storage: FaultyStorage) -> None:
        self.struck: dict[FaultKind, int] = dict.fromkeys(FAULT_KINDS, 0)
        self.lose_client: Callable[[], str | None] | None = None
        self._config, self._storage = config, storage
        self._random = {kind: random.Random(f"{config.seed} {kind}") for kind in FAULT_KINDS}
        self._rates = {kind: rate for kind, rate in config.inject if not FAULTS[kind].strikes_copies}
        self._due = {kind: self._next_strike(kind, 0) for kind in self._rates}
        self._host_open_at: int | None = None
        self._look_ahead()

    # -- between two steps ---------------------------------------------------------------------------

    def steps_until(self, step: int) -> int:
        """Return how many steps may be taken at once, from ``step`` on, so that no strike comes late; at least 1."""
        return max(1, self._next - step)

    def release(self) -> None:
        """Let stuck copies go on."""
        self._storage.release()

    def after_turn(self, engine: Engine) -> None:
        """Let strike what is due, end what is over, and tell what struck copies meanwhile."""
        if self._storage.strikes:
            self.tell_copies(engine)
        if engine.step < self._next:
            return
        if self._host_open_at is not None and engine.step >= self._host_open_at:
            self._open_host(engine)
        for kind, due in self._due.items():
            if engine.step >= due:
                self._due[kind] = self._next_strike(kind, engine.step)
                if self._missing(engine, kind) is None:
                    self._strike(engine, kind, FAULTS[kind].count)
        self._look_ahead()

    def tell_copies(self, engine: Engine) -> None:
        """Tell what struck copies that have been committed, or given up, since the last time.

        A copy runs beside the engine, at its own pace: told as soon as it struck, a fault would stand elsewhere among
        the events in each run.
        """
        for strike in self._storage.take_strikes(engine.copies.num_ended):
            self._tell(engine, strike.kind, strike.text)

    def notes(self) -> tuple[str, ...]:
        """Return what is out of order on purpose just now, one line each."""
        notes = [f"host tier full until step {self._host_open_at} (injected)"] if self._host_open_at is not None else []
        for kind in FAULT_KINDS:
            if (count := self._storage.armed(kind)) > 0:
                notes.append(f"{kind}: strikes the next {_many(count, 'copy')} (injected)")
        stuck = self._storage.stuck_reason
        return (*notes, stuck) if stuck else tuple(notes)

    # -- by an operator ------------------------------------------------------------------------------

    def plan(self, engine: Engine, command: InjectFault) -> Plan:
        """Return what a fault would do.

        Raises:
            Refused: It cannot strike here and now, or its numbers are out of range.
        """
        kind, fault = command.kind, FAULTS[command.kind]
        count = fault.count if command.count is None else command.count
        if not 0 <= count <= MAX_COUNT:
            raise Refused(f"from 0 to {MAX_COUNT} at once")
        if command.seconds is not None and not fault.seconds:
            raise Refused(f"{kind}: takes no seconds")
        if command.seconds is not None and not 0 < command.seconds <= MAX_SECONDS:
            raise Refused(f"{kind}: above 0 and at most {MAX_SECONDS:g} s")
        refusal = self._config.fault_refusal(kind) or (self._missing(engine, kind) if count else None)
        if refusal is not None:
            raise Refused(f"{kind}: {refusal}")
        if count == 0:
            if not fault.strikes_copies and kind != "host-tier-full":
                raise Refused(f"{kind}: what has struck cannot be taken back")
            return Plan(summary=f"{kind}: no more of it")
        many = _many(count, fault.unit)
        if fault.seconds:
            many += f", {command.seconds or fault.seconds:g} s each"
        proof = "to be survived" if fault.caught_by is None else f"a check must find law {fault.caught_by} broken"
        return Plan(summary=f"{fault.effect} ({many}): {proof}")

    def inject(self, engine: Engine, command: InjectFault) -> str:
        """Let a fault strike that ``plan`` did not refuse; return what was done, in one line."""
        kind, fault = command.kind, FAULTS[command.kind]
        count = fault.count if command.count is None else command.count
        if fault.strikes_copies:
            self._storage.arm(kind, count, command.seconds or fault.seconds)
            return f"{kind}: strikes the next {_many(count, 'copy')}" if count else f"{kind}: taken back"
        if count == 0:
            self._open_host(engine)
            return "host-tier-full: taken back"
        return f"{kind}: {self._strike(engine, kind, count)}"

    # -- inside --------------------------------------------------------------------------------------

    def _next_strike(self, kind: FaultKind, step: int) -> int:
        """Return the step of the next strike, as if each step after ``step`` were drawn with the rate."""
        rate = self._rates[kind]
        if rate >= 1:
            return step + 1
        return step + 1 + math.floor(math.log(1 - self._random[kind].random()) / math.log1p(-rate))

    def _look_ahead(self) -> None:
        """Note the next step at which something is due."""
        due = min(self._due.values(), default=_NEVER)
        self._next = due if self._host_open_at is None else min(due, self._host_open_at)

    def _missing(self, engine: Engine, kind: FaultKind) -> str | None:
        """Return what this kind would need and is not there; ``None`` when it can strike."""
        if kind == "lost-client" and self.lose_client is None and not engine.unfinished():
            return "there is no client, and no sequence"
        if kind == "leaked-reference" and not engine.manager.device.num_active:
            return "no block is held"
        if kind == "flipped-bit" and not _held_slots(engine):
            return "no block is held"
        return None

    def _strike(self, engine: Engine, kind: FaultKind, count: int) -> str:
        if kind == "host-tier-full":
            text = self._fill_host(engine, count)
            self._tell(engine, kind, text)
            return text
        texts: list[str] = []
        while len(texts) < count and self._missing(engine, kind) is None:
            if (done := self._strike_once(engine, kind)) is None:
                break
            self._tell(engine, kind, done)
            texts.append(done)
        return texts[0] if len(texts) == 1 else f"{_many(len(texts), FAULTS[kind].unit)}; see the events"

    def _strike_once(self, engine: Engine, kind: FaultKind) -> str | None:
        chance = self._random[kind]
        if kind == "lost-client":
            lost = self.lose_client() if self.lose_client is not None else None
            if lost is not None:
                return lost
            if not (sequences := engine.unfinished()):
                return None
            sequence = chance.choice(sequences)
            engine.lifecycle.cancel(sequence)
            return f"the client of sequence {sequence.seq_id} is gone"
        if kind == "leaked-reference":
            pool = engine.manager.device
            with engine.manager.lock:
                block = chance.choice(np.flatnonzero(pool.facts.ref_counts()).tolist())
                pool.share(np.array([block]))
            return f"block {block} counts one holder too many"
        with engine.manager.lock:
            tier, slots = chance.choice(_held_slots(engine))
            slot, bit = int(chance.choice(slots)), chance.randrange(_BITS)
            self._storage.flip_bit(tier, slot, bit)
        block, offset = divmod(slot, self._config.block_size)
        return f"a bit of {tier} block {block}, offset {offset} flipped"

    def _fill_host(self, engine: Engine, steps: int) -> str:
        # Withheld like pinned blocks, the host's own operations and the laws need to know nothing of it.
        _withhold_host(engine.manager, True)
        self._host_open_at = engine.step + steps
        self._look_ahead()
        return f"the host tier takes no more blocks until step {self._host_open_at}"

    def _open_host(self, engine: Engine) -> None:
        if self._host_open_at is not None:
            self._host_open_at = None
            _withhold_host(engine.manager, False)
            self._look_ahead()

    def _tell(self, engine: Engine, kind: FaultKind, text: str) -> None:
        self.struck[kind] += 1
        engine.emit("fault", f"injected {kind}: {text}")


def _withhold_host(manager: BlockManager, withheld: bool) -> None:
    with manager.lock:
        blocks = np.arange(manager.host.num_blocks)
        change = manager.host.set_flag if withheld else manager.host.clear_flag
        change(blocks, BlockFlag.PINNED)


def _held_slots(engine: Engine) -> list[tuple[Tier, IdArray]]:
    """Return the written slots of every sequence whose contents a check reads, copies in progress aside."""
    manager, held = engine.manager, list[tuple[Tier, IdArray]]()
    for sequence in engine.unfinished():
        tier: Tier = "device" if sequence.row is not None else "host"
        row = sequence.row if sequence.row is not None else sequence.host_row
        if row is None:
            continue
        pool, tables = (manager.device, manager.tables) if tier == "device" else (manager.host, manager.host_tables)
        slots = manager.slots(tier, row, 0, int(tables.num_tokens[row]))
        slots = slots[(pool.facts.flags[slots // manager.block_size] & np.uint8(BlockFlag.FENCED)) == 0]
        if len(slots):
            held.append((tier, slots))
    return held


def _many(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit.removesuffix('y')}{'ies' if unit[-1] == 'y' else 's'}"
