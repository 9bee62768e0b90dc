"""What the console's tests share: a scripted engine that answers the focus, a recording door, and a running console."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from textual.pilot import Pilot

from allocator.block_map import BlockArrays
from allocator.events import Event
from allocator.ids import BlockFlag, BlockState, Tier
from allocator.plans import Effect, Outcome, Plan
from allocator.snapshot import Counters, SequenceRow, Snapshot
from kvtop.attachment import Attachment
from kvtop.model.lineage import lineage
from kvtop.model.observation import BlockHolders, Focus, Observation
from kvtop.serving_commands import AnyCommand
from kvtop.sources.scripted import ScriptedSource, block_arrays
from kvtop.tui.app import KvtopApp
from kvtop.tui.settings import Settings
from kvtop.tui.widgets.block_map import BlockRef
from kvtop.tui.widgets.lines import Lines

BLOCK_SIZE = 16
#: Block tables of the scripted engine's sequences, in token order.
TABLES: Mapping[int, tuple[int, ...]] = {
    7: (*range(40, 72), *range(200, 216)),
    8: (*range(40, 56), *range(300, 340)),
    9: tuple(range(500, 520)),
}
_MARKUP_LABEL = "chat [bold]turn 2[/]"


def scripted_arrays(num_blocks: int = 1024) -> BlockArrays:
    """Return a pool with free, cached, shared, reserved, pinned and fenced blocks."""
    state = np.full(num_blocks, BlockState.FREE, np.uint8)
    state[100:180] = BlockState.CACHED
    state[num_blocks // 2 + 100 : num_blocks - 60] = BlockState.ACTIVE
    ref_count = np.zeros(num_blocks, np.uint16)
    for table in TABLES.values():
        state[list(table)] = BlockState.ACTIVE
        ref_count[list(table)] += 1
    lone = (state == BlockState.ACTIVE) & (ref_count == 0)
    ref_count[lone] = 1 + (np.arange(num_blocks)[lone] // 40) % 12
    flags = np.zeros(num_blocks, np.uint8)
    flags[120:123] = BlockFlag.PINNED
    flags[310:314] = BlockFlag.FENCED
    state[190:194] = BlockState.RESERVED
    ids = np.arange(num_blocks, dtype=np.uint64)
    known = (state == BlockState.ACTIVE) | (state == BlockState.CACHED)
    return block_arrays(
        state,
        ref_count=ref_count,
        flags=flags,
        fill=np.where(known, BLOCK_SIZE - (np.arange(num_blocks) % 50 == 0), 0),
        last_used=np.where(known, 950 + np.arange(num_blocks) % 50, 0),
        hash64=np.where(known, (ids + 1) * np.uint64(0x9E3779B97F4A7C15), np.uint64(0)),
    )


def scripted_rows() -> tuple[SequenceRow, ...]:
    """Return the sequences table."""
    blocks = {seq_id: len(table) for seq_id, table in TABLES.items()}
    return (
        SequenceRow(7, 0, _MARKUP_LABEL, "running", "", 600, 768, 900, blocks[7], 16, 12, 2, 10),
        SequenceRow(8, 1, "chat", "running", "", 700, 896, 1024, blocks[8], 16, 16, 2, 20),
        SequenceRow(9, 2, "chat", "running", "", 300, 320, 400, blocks[9], 0, 0, 1, 30),
        SequenceRow(10, None, "chat", "waiting", "40 blocks needed, 12 allocatable", 600, 0, 700, 0, 0, 0, 0, 40),
        SequenceRow(11, None, "chat", "swapped", "by an operator", 500, 480, 600, 30, 0, 4, 0, 5),
    )


def scripted_observation(
    *,
    step: int = 1000,
    phase: str = "running",
    speed: float | None = 1.0,
    device: BlockArrays | None = None,
    host: BlockArrays | None = None,
    first_event: int = 0,
) -> Observation:
    """Return one reading of the scripted engine."""
    counters = Counters(
        submitted=40, finished=35, query_blocks=1000 + step, hit_blocks=300 + step // 4, evictions=12_345,
        preemptions_swap=3, preemptions_recompute=1, swap_out_blocks=210, swap_in_blocks=180, failures_capacity=2,
    )  # fmt: skip
    texts = (
        ("admit", "sequence 9: 20 blocks, 0 hit"),
        ("evict", "block 311, idle 82 steps"),
        ("finish", "sequence 6: 44 blocks released"),
    )
    events = tuple(
        Event(first_event + i, step - 2 + i, kind, text)  # type: ignore[arg-type]
        for i, (kind, text) in enumerate(texts)
    )
    snapshot = Snapshot(
        step=step, time_s=step * 0.025, phase=phase, speed=speed, steps_per_s=40.0, source="scripted", workload="chat",
        geometry="tiny", device="cpu", block_size=BLOCK_SIZE, block_bytes=1024, slab_size=256, eviction="lru",
        preempt="swap", policy="fcfs", compact="manual", compact_threshold_ratio=0.5, watermark_ratio=0.01,
        num_running=3, num_waiting=1, num_swapped=1, counters=counters, sequences=scripted_rows(), events=events,
    )  # fmt: skip
    if host is None:
        states = np.full(512, BlockState.FREE, np.uint8)
        states[10:40] = BlockState.ACTIVE
        host = block_arrays(states, fill=BLOCK_SIZE)
    return Observation(snapshot, scripted_arrays() if device is None else device, host)


class FocusedSource(ScriptedSource):
    """A scripted source that answers what the reader looks at, from ``TABLES``."""

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        observation = super().read(focus, timeout_s)
        table = TABLES.get(focus.seq_id) if focus.seq_id is not None else None
        holders = None
        if focus.block_id is not None:
            found = tuple((s, t.index(focus.block_id)) for s, t in TABLES.items() if focus.block_id in t)
            holders = BlockHolders(focus.block_id, found, len(found))
        events = tuple(e for e in observation.snapshot.events if e.number >= focus.next_event)
        return replace(
            observation,
            snapshot=_with_events(observation.snapshot, events),
            focus_table=None if table is None else np.array(table, np.int64),
            focus_block=holders,
            lineage=lineage({s: np.array(t) for s, t in TABLES.items()}) if focus.lineage else None,
        )


def _with_events(snapshot: Snapshot, events: tuple[Event, ...]) -> Snapshot:
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
    return Snapshot(**{**fields, "events": events})


_OUTCOME = Outcome(ok=True, message="12 blocks moved", moved_blocks=12, seconds=0.038)


@dataclass
class FakeOperations:
    """Plans the same for everything, refuses what it is told to, and notes what was asked."""

    planned: list[AnyCommand] = field(default_factory=list)
    applied: list[AnyCommand] = field(default_factory=list)
    refusal: str | None = None
    failure: Exception | None = None
    outcome: Outcome = _OUTCOME

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        self.planned.append(command)
        if self.failure is not None:
            raise self.failure
        return Plan(
            summary=f"plan {len(self.planned)}",
            moved_blocks=12,
            moved_bytes=12_288,
            evicted_blocks=3,
            sequences=(7, 8),
            effects=(Effect("largest free run", 208, 820), Effect("external fragmentation", 0.61, 0.12)),
            refusal=self.refusal,
        )

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        self.applied.append(command)
        if self.failure is not None:
            raise self.failure
        return self.outcome


class StillClock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Console:
    """A console under test, and everything behind it."""

    app: KvtopApp
    pilot: Pilot[None]
    source: ScriptedSource
    operations: FakeOperations
    clock: StillClock

    async def press(self, *keys: str) -> None:
        """Press keys and let the screen settle."""
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def poll(self, after_s: float = 0.0) -> None:
        """Let time pass, read once, draw."""
        self.clock.now_s += after_s
        await self.app.poll_once()
        await self.pilot.pause()

    async def point_at(self, tier: Tier, block_id: int) -> None:
        """Put the cursor on a block and read what is known of it."""
        self.app.main.put_cursor(BlockRef(tier, block_id))
        await self.pilot.pause()
        await self.poll()

    async def until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        """Wait, at most five seconds, for something that a thread of the console brings about."""
        await wait_until(self.pilot, condition, what)

    def screen_text(self) -> str:
        """Return the whole screen as plain text."""
        return screen_text(self.app)

    def note(self) -> str:
        """Return what the event line says."""
        return self.text_of("EventLine")

    def text_of(self, selector: str) -> str:
        """Return the lines of one pane."""
        widget = self.app.screen_stack[0].query_one(selector, Lines)
        return "\n".join(widget.line_text(y) for y in range(widget.size.height))


async def wait_until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    """Poll ``condition`` with a bounded deadline."""
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await pilot.pause(0.01)
    await pilot.pause()


def screen_text(app: KvtopApp) -> str:
    """Return every line of the screen as it is drawn, filters applied."""
    screen = app.screen
    return "\n".join(
        "".join(segment.text for segment in strip) for strip in screen._compositor.render_strips(screen.size)
    )


@asynccontextmanager
async def console(
    *,
    size: tuple[int, int] = (120, 40),
    source: ScriptedSource | None = None,
    operations: FakeOperations | None = None,
    restart: Callable[[], Attachment] | None = None,
    ascii_only: bool = False,
    nvml: object = None,
    settings: Settings | None = None,
) -> AsyncIterator[Console]:
    """Run a console that is stepped by hand, connected and drawn once; without a driver, unless one is given."""
    from fake_nvml import NO_LIBRARY, FakeNvml  # which the child of a test finds nowhere

    source = source or FocusedSource([scripted_observation()])
    operations = operations or FakeOperations()
    clock = StillClock()
    attachment = Attachment(source, operations, clock)
    app = KvtopApp(
        lambda: attachment,
        restart=restart,
        auto_poll=False,
        ascii_only=ascii_only,
        settings=settings,
        clock=clock,
        nvml=nvml or FakeNvml({"init": NO_LIBRARY}),
    )
    async with app.run_test(size=size) as pilot:
        running = Console(app, pilot, source, operations, clock)
        await running.until(lambda: app.attachment is not None, "the attachment")
        await running.poll()
        yield running
