"""The keys on an inference server that is not ours: each shows the plan first, and what is missing is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tui_fakes import FakeOperations, console

from allocator.plans import Outcome
from kvtop.errors import SourceError
from kvtop.model.observation import RemoteObservation
from kvtop.model.remote import EngineRow, RemoteFacts, SlotRow
from kvtop.serving_commands import (
    AnyCommand,
    ContinueGeneration,
    EraseSlot,
    PauseGeneration,
    ReleaseMemory,
    ResetPrefixCache,
    RestoreSlot,
    ResumeMemory,
    SaveSlot,
    SetMemoryLimit,
    Sleep,
    Wake,
)
from kvtop.sources.remote.capabilities import READ_ONLY, capabilities_of
from kvtop.sources.remote.offers import DEVELOPMENT, SLEEP_MODE
from kvtop.sources.scripted import ScriptedSource
from kvtop.tui.screens.prompt import Prompt
from kvtop.tui.screens.sheet import ActionSheet

SLOTS = (SlotRow(0, 1024, 99, False), SlotRow(1, 1024, 0, False), SlotRow(2, 1024, 512, True))


def facts(
    kind: str = "vLLM", offers: dict[str, str | None] | None = None, *, may_operate: bool = True, **known: object
) -> RemoteFacts:
    rows = (EngineRow("m", usage_ratio=0.5, running=2, waiting=0, limit_bytes=4 << 30),)
    table = capabilities_of(
        kind, rows, events_reason=None, has_events=False, offers=offers or {}, may_operate=may_operate
    )
    return RemoteFacts(kind, "1", "http://h:1", rows, capabilities=table, **known)  # type: ignore[arg-type]


def source(reading: RemoteFacts, *, may_operate: bool = True) -> ScriptedSource:
    missing = {} if may_operate else {"operations": READ_ONLY}
    return ScriptedSource([RemoteObservation(reading)], name="h:1", missing=missing)


async def _confirmed(reading: RemoteFacts, expected: AnyCommand, *keys: str) -> None:
    """Press the keys, check that nothing happens before ``y``, and that ``y`` applies the command."""
    async with console(source=source(reading)) as c:
        await c.press(*keys)
        sheet = c.app.screen
        assert isinstance(sheet, ActionSheet), c.note()
        await c.until(lambda: sheet.plan is not None, "the plan")
        assert c.operations.applied == []
        assert c.operations.planned[-1] == expected
        await c.press("y")
        await c.until(lambda: "12 blocks moved" in c.note(), "the outcome")
        assert c.operations.applied == [expected]


@pytest.mark.parametrize(
    ("expected", "keys"),
    [
        (Sleep(1), ["Z"]),
        (Sleep(2), ["Z", "right"]),
        (Sleep(0), ["Z", "right", "right"]),
        (Wake(), ["Z", "left"]),
    ],
)
async def test_sleeping(expected: AnyCommand, keys: list[str]) -> None:
    await _confirmed(facts(), expected, *keys)


async def test_action_sleep() -> None:
    await _confirmed(facts(states=(("sleeping", True),)), Wake(), "Z")
    await _confirmed(facts("SGLang"), ReleaseMemory(), "Z")
    await _confirmed(facts("SGLang"), ResumeMemory(), "Z", "right", "right")


async def test_action_slots() -> None:
    llama = facts("llama.cpp", slots=SLOTS)
    await _confirmed(llama, SaveSlot(2, "kvtop-slot-2.bin"), "K")
    await _confirmed(llama, RestoreSlot(0, "kvtop-slot-0.bin"), "K", "right", "right")
    async with console(source=source(facts("llama.cpp"))) as c:
        await c.press("K")
        assert "its slots are not known" in c.note()


async def test_resetting_and_erasing() -> None:
    await _confirmed(facts(), ResetPrefixCache(), "E")
    await _confirmed(facts(), ResetPrefixCache(True), "E", "right")
    await _confirmed(facts("SGLang"), ResetPrefixCache(), "E")
    await _confirmed(facts("llama.cpp", slots=SLOTS), EraseSlot(2), "E")
    async with console(source=source(facts("llama.cpp", slots=SLOTS[1:2]))) as c:
        await c.press("E")
        assert "no slot holds anything" in c.note()


async def test_pausing_asks_first_on_a_server() -> None:
    await _confirmed(facts(), PauseGeneration("keep"), "space")
    await _confirmed(facts(), PauseGeneration("wait"), "space", "right")
    await _confirmed(facts("SGLang"), PauseGeneration("retract"), "space", "right")
    await _confirmed(facts(states=(("paused", True),)), ContinueGeneration(), "space")


async def test_a_memory_limit_is_typed() -> None:
    await _confirmed(facts("kvcached"), SetMemoryLimit(4096), "R")
    await _confirmed(facts("kvcached"), SetMemoryLimit(20), "R", "2", "0")


async def test_what_the_server_lacks_is_said() -> None:
    offers: dict[str, str | None] = {"pause-generation": DEVELOPMENT, "sleep": SLEEP_MODE}
    async with console(source=source(facts(offers=offers))) as c:
        await c.press("space")
        assert DEVELOPMENT in c.note()
        for key in ("C", "K", "R", "full_stop"):
            await c.press(key)
            assert "refused: not offered by this engine" in c.note()
        await c.press("Z")  # some of it is on offer; the plan says which is not
        assert isinstance(c.app.screen, ActionSheet)


async def test_read_only_nothing_opens() -> None:
    async with console(source=source(facts(may_operate=False), may_operate=False)) as c:
        assert "READ ONLY" in c.text_of("Header")
        for key in ("E", "Z", "space"):
            await c.press(key)
            assert f"refused: {READ_ONLY}" in c.note()
        assert "Z sleep" not in c.text_of("Footer")
        assert c.operations.planned == []


async def test_the_door_is_shut_whatever_the_table_says() -> None:
    async with console(source=source(facts(), may_operate=False)) as c:
        await c.press("E")
        assert f"refused: {READ_ONLY}" in c.note()
        assert c.operations.planned == []


async def test_the_header_says_what_the_engine_says_of_itself() -> None:
    async with console(source=source(facts(states=(("sleeping", False), ("paused", True))))) as c:
        assert " PAUSED " in c.text_of("Header")
        assert "SLEEPING" not in c.text_of("Header")
        assert "READ ONLY" not in c.text_of("Header")
        assert "Z sleep" in c.text_of("Footer")
        assert "E evict" in c.text_of("Footer")
        assert "compact" not in c.text_of("Footer")
    async with console() as c:  # an engine of ours
        assert "Z sleep" not in c.text_of("Footer")
        await c.press("Z")
        assert "only for vLLM, SGLang and llama.cpp servers" in c.note()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_what_is_only_promised_and_what_is_not_known_look_different(size: tuple[int, int]) -> None:
    long = "acknowledged; the engine reports success; not yet visible: an idle engine publishes with its next step"
    operations = FakeOperations(outcome=Outcome(ok=True, message=long, is_seen=False))
    async with console(source=source(facts()), operations=operations, size=size) as c:
        await c.press("E")
        sheet = c.app.screen
        assert isinstance(sheet, ActionSheet)
        await c.until(lambda: sheet.plan is not None, "the plan")
        await c.press("y")
        await c.until(lambda: "acknowledged" in c.note(), "the outcome")
        await c.poll()
        pane = " ".join(c.text_of("#remote").split())
        assert f"reset-prefix-cache: {long}" in pane  # in full, however narrow
        operations.failure = SourceError("no answer: it hangs; whether it was done is not known")
        c.app.run_line("wake")
        await c.until(lambda: isinstance(c.app.screen, ActionSheet), "the sheet")


async def test_what_became_of_it_may_not_be_known() -> None:
    async with console(source=source(facts())) as c:
        await c.press("E")
        sheet = c.app.screen
        assert isinstance(sheet, ActionSheet)
        await c.until(lambda: sheet.plan is not None, "the plan")
        c.operations.failure = SourceError("no answer: it hangs; whether it was done is not known")
        await c.press("y")
        await c.until(lambda: "whether it was done is not known" in c.note(), "the outcome")
        assert "refused" not in c.note()


async def test_lines_of_the_command_line() -> None:
    async with console(source=source(facts())) as c:
        await c.press("colon", *"reset-")
        prompt = c.app.screen
        assert isinstance(prompt, Prompt)
        assert "Drop everything that is cached" in c.screen_text()
        await c.press("escape")
        c.app.run_line("reset-prefix-cache running=true")
        await c.until(lambda: c.operations.planned == [ResetPrefixCache(True)], "the plan")
        await c.press("escape")
        for line, words in (
            ("compact pack-low", "not offered by this engine"),
            ("sleep 9", "level: a whole number, at most 2"),
            ("save-slot 1 a/b", "filename: letters and digits"),
            ("wake up", "tags: one of weights, kv_cache, scheduling"),
        ):
            c.app.run_line(line)
            await c.pilot.pause()
            assert words in c.note(), line
        assert c.operations.planned == [ResetPrefixCache(True)]


async def test_slots_are_drawn() -> None:
    async with console(source=source(facts("llama.cpp", slots=SLOTS))) as c:
        pane = c.text_of("#remote")
        assert "Slots" in pane
        assert "512/1,024" in pane.replace("1.0K", "1,024").replace("1024", "1,024")
        assert "busy" in pane


async def test_hostile_slots_and_states_are_harmless() -> None:
    odd = replace(facts("llama.cpp"), slots=(SlotRow(0, 0, 10**15, False),), states=(("\x1b[2J", True),))
    async with console(source=source(odd)) as c:
        assert "\x1b" not in c.screen_text()
