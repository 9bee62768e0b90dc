"""One suite for every door for commands: in-process, from a thread and by hand; another process; read-only."""

from __future__ import annotations

import math
import tempfile
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from published import ThreadedDaemon, own_directories

from allocator.block_map import FIELDS
from allocator.commands import (
    Abort,
    Annotate,
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Preempt,
    Resize,
    Resume,
    SetAutoCompaction,
    SetLoad,
    SetPolicy,
    SetSpeed,
    SetWatermark,
    Step,
    SubmitLoad,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
)
from allocator.plans import Outcome, Plan
from kvtop.engine_process import EngineProcess
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.observation import Focus, Observation
from kvtop.operations import Operations, ReadOnly
from kvtop.runner import EngineRunner
from kvtop.serving_commands import AnyCommand, EraseSlot, ResetPrefixCache
from kvtop.sources.base import Source
from kvtop.sources.in_process import InProcessOperations, InProcessSource
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine

OPTIONS = EngineOptions(num_blocks=64, geometry="none", speed=None, seed=5)
NO_SEQUENCE = 10**9

#: One of each kind; every engine must be able to say something about each.
COMMANDS: tuple[Command, ...] = (
    Pause(),
    Resume(),
    Step(2),
    SetSpeed(2.0),
    SubmitLoad(10, 5, 2),
    SetLoad(2.0, 0.5),
    Cancel(NO_SEQUENCE),
    Fork(NO_SEQUENCE),
    Preempt(NO_SEQUENCE),
    SwapOut(NO_SEQUENCE),
    SwapIn(NO_SEQUENCE),
    Compact(),
    Resize(80),
    EvictCached(1),
    Pin((1, 2)),
    Unpin((1, 2)),
    SetPolicy("sjf"),
    SetWatermark(0.1),
    SetAutoCompaction("auto", 0.4),
    VerifyContents(),
    InjectFault("failing-copy"),
    InjectFault("host-tier-full", 2),
    Annotate("here it begins"),
    Abort(),
)
#: Each must be refused, with words, and change nothing.
IMPOSSIBLE: tuple[AnyCommand, ...] = (
    Step(0),
    Step(-5),
    SetSpeed(0.0),
    SetSpeed(math.nan),
    SubmitLoad(0, 5),
    SubmitLoad(10, 5, 0),
    SetLoad(),
    SetLoad(0.0),
    SetLoad(1.0, 101.0),
    SetLoad(math.nan),
    Cancel(NO_SEQUENCE),
    Fork(NO_SEQUENCE),
    Preempt(-1),
    SwapOut(NO_SEQUENCE),
    SwapIn(NO_SEQUENCE),
    Resize(0),
    Resize(-1),
    Resize(2**60),
    Pin((64,)),
    Pin((-1,)),
    Unpin((10**9,)),
    SetWatermark(1.5),
    SetWatermark(math.nan),
    SetAutoCompaction("auto", -0.1),
    Compact(max_moves=-1),
    Compact("longest-run", run_blocks=0),
    InjectFault("failing-copy", -1),
    InjectFault("failing-copy", 10**9),
    InjectFault("failing-copy", 1, 1.0),
    InjectFault("slow-copy", 1, 0.0),
    InjectFault("slow-copy", 1, math.nan),
    InjectFault("stuck-executor", 1, 1e9),
    InjectFault("lost-client", 0),
    Annotate(""),
    Annotate("x" * 201),
    Annotate("one\nline"),
    InjectFault("flipped-bit"),
    ResetPrefixCache(),
    EraseSlot(0),
)


@dataclass
class Door:
    operations: Operations
    source: Source

    def look(self) -> Observation:
        return self.source.read(Focus(), 30)


def in_process(*, runs: bool) -> Iterator[Door]:
    engine, notes = build_engine(OPTIONS)
    runner = EngineRunner(engine, speed=OPTIONS.speed, notes=notes)
    source = InProcessSource(runner, on_close=engine.close)
    if runs:
        source.start()
    yield Door(InProcessOperations(runner), source)
    source.close()


def local() -> Iterator[Door]:
    process = EngineProcess.start(OPTIONS)
    process.wait_ready(30)
    source = LocalSource(process)
    yield Door(LocalOperations(process), source)
    source.close()


def named() -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory, pytest.MonkeyPatch.context() as patch:
        own_directories(patch, Path(directory))
        daemon = ThreadedDaemon("t", OPTIONS)
        link = NamedEngine("t")
        source = LocalSource(link)
        yield Door(LocalOperations(link), source)
        source.close()
        daemon.close()


KINDS: dict[str, Callable[[], Iterator[Door]]] = {
    "in-process": lambda: in_process(runs=True),
    "stepped": lambda: in_process(runs=False),
    "local": local,
    "named": named,
}


@pytest.fixture(params=KINDS)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """A door to an engine that was run for a while and is paused."""
    made = KINDS[request.param]()
    door = next(made)
    assert door.operations.apply(Pause()).ok
    assert door.operations.apply(Step(400)).ok
    yield door
    next(made, None)


def assert_same(before: Observation, after: Observation) -> None:
    assert before.snapshot.step == after.snapshot.step
    assert before.snapshot.counters == after.snapshot.counters
    assert before.snapshot.sequences == after.snapshot.sequences
    for left, right in ((before.device, after.device), (before.host, after.host)):
        assert left is not None
        assert right is not None
        for name, _ in FIELDS:
            assert np.array_equal(getattr(left, name), getattr(right, name)), name


def test_there_is_one_command_of_each_kind() -> None:
    assert {type(command) for command in COMMANDS} == set(typing.get_args(Command))


def test_every_command_can_be_planned_and_planning_changes_nothing(door: Door) -> None:
    before = door.look()
    for command in (*COMMANDS, *IMPOSSIBLE):
        plan = door.operations.plan(command)
        assert isinstance(plan, Plan)
        assert plan.summary
    assert_same(before, door.look())


def test_every_command_has_an_outcome(door: Door) -> None:
    for command in COMMANDS:
        outcome = door.operations.apply(command)
        assert isinstance(outcome, Outcome)
        assert outcome.message
    door.operations.apply(Pause())
    assert door.look().snapshot.counters.integrity_faults == 0


@pytest.mark.parametrize("command", IMPOSSIBLE, ids=repr)
def test_the_impossible_is_refused_and_changes_nothing(command: AnyCommand) -> None:
    made = in_process(runs=False)
    door = next(made)
    door.operations.apply(Pause())
    door.operations.apply(Step(400))
    before = door.look()
    assert door.operations.plan(command).refusal
    outcome = door.operations.apply(command)
    assert not outcome.ok
    assert outcome.message
    assert "\n" not in outcome.message
    assert_same(before, door.look())
    next(made, None)


def test_refusals_come_through_every_door(door: Door) -> None:
    before = door.look()
    for command in IMPOSSIBLE:
        outcome = door.operations.apply(command)
        assert not outcome.ok, command
    assert_same(before, door.look())


def test_step_is_exact_and_stays_paused(door: Door) -> None:
    before = door.look().snapshot
    assert door.operations.apply(Step(7)).ok
    after = door.look().snapshot
    assert (after.step, after.phase) == (before.step + 7, "paused")


def test_an_applied_command_is_seen_by_the_next_reading(door: Door) -> None:
    assert door.operations.apply(Resize(100)).ok
    seen = door.look()
    assert seen.device is not None
    assert seen.device.num_blocks >= 100
    assert any(event.kind == "resize" for event in seen.snapshot.events)


def test_a_plan_and_its_outcome_agree(door: Door) -> None:
    door.operations.apply(VerifyContents())  # commits copies under way: a plan is of the state it finds
    plan = door.operations.plan(Compact())
    outcome = door.operations.apply(Compact())
    if plan.refusal is None:
        assert (outcome.moved_blocks, outcome.moved_bytes) == (plan.moved_blocks, plan.moved_bytes)
    assert door.operations.plan(Compact()).moved_blocks == 0  # a second one in a row moves nothing


@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_read_only_refuses_everything_with_its_reason(command: AnyCommand) -> None:
    operations: Operations = ReadOnly("attached without --allow-operations")
    assert operations.plan(command).refusal == "attached without --allow-operations"
    assert operations.apply(command) == Outcome(ok=False, message="attached without --allow-operations")
