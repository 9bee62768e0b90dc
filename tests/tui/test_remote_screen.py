"""The console on an engine over the network: what is unknown is a dash, and what is not offered says why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from event_samples import payload, stored
from tui_fakes import console

from kvtop.model.observation import RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, EventFacts, PrefixLine, RemoteFacts
from kvtop.model.what_if import WhatIf
from kvtop.sources.remote.capabilities import capabilities_of
from kvtop.sources.remote.fleet import Fleet
from kvtop.sources.remote.kv_events import decode
from kvtop.sources.remote.lookups import Lookup
from kvtop.sources.remote.residency import Residency
from kvtop.sources.remote.what_if import what_if
from kvtop.sources.scripted import ScriptedSource

MISSING = {"operations": "read only: a test", "sequences": "not offered by this engine"}
ROWS = (
    EngineRow("big", "0", usage_ratio=0.5, total_blocks=511, used_blocks=255, block_size=32, running=3, waiting=0),
    EngineRow("big", "1", usage_ratio=0.7, total_blocks=511, used_blocks=357, block_size=32, running=1, waiting=9),
)
EVENTS = EventFacts(
    "joined late: partial",
    resident=(("GPU", 0, 7),),
    distinct=8,
    prefixes=(PrefixLine(0xABC, 3, 5, 2, 4, 12.0, 0, 0, "GPU"),),
    batches=9,
)


def facts(rows: tuple[EngineRow, ...] = ROWS, events: EventFacts | None = None, kind: str = "vLLM") -> RemoteFacts:
    table = capabilities_of(kind, rows, events_reason=None, has_events=events is not None)
    return RemoteFacts(kind, "0.33.0", "http://h:1", rows, 0, table, ("a note",), events)


def source(*readings: RemoteFacts) -> ScriptedSource:
    return ScriptedSource([RemoteObservation(r) for r in readings], name="h:1", missing=MISSING)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_engines_are_shown_and_no_map_is(size: tuple[int, int]) -> None:
    async with console(source=source(facts()), size=size) as c:
        text = c.screen_text()
        assert "vLLM 0.33.0" in text
        assert "READ ONLY" in text
        assert "held 612" in text
        assert "60.0%" in text
        assert "255/511" in text
        assert "swap —" in text
        assert "a note" in text
        assert not c.app.main.display
        assert "STARTING" not in text


async def test_unknown_numbers_are_dashes_and_not_zeros() -> None:
    async with console(source=source(facts((EngineRow(),), kind="llama.cpp"))) as c:
        text = c.screen_text()
        header = c.text_of("Header")
        assert "0.0%" not in text
        assert header.count("—") >= 8
        assert "0" not in header.replace("0.33.0", "").replace("engines 1", "")
        assert "gone from its metrics; needs /slots" in text


async def test_prefixes_and_capabilities_scroll() -> None:
    async with console(source=source(facts(events=EVENTS)), size=(80, 24)) as c:
        pane = c.text_of("#remote")
        assert "joined late: partial" in pane
        assert "0000000000000abc" in pane
        assert "more lines" in pane
        await c.press("end")
        assert "physical block map" in c.text_of("#remote")
        assert "needs the plugin" in c.text_of("#remote")
        await c.press("home")
        assert "Engines" in c.text_of("#remote")


async def test_what_is_not_offered_says_why() -> None:
    async with console(source=source(facts())) as c:
        await c.press("2")
        assert "sequences: not offered by this engine" in c.note()
        await c.press("C")
        assert "not offered by this engine" in c.note()
        await c.press("E")
        assert "read only: a test" in c.note()
        await c.press("enter", "z", "question_mark", "escape")
        assert c.operations.planned == []


async def test_a_lost_engine_keeps_its_last_facts() -> None:
    script = source(facts())
    async with console(source=script) as c:
        script.failure = "nothing listens there"
        await c.poll(after_s=3)
        assert "engine lost 3.0 s ago" in c.text_of("Header")
        assert "nothing listens there" in c.text_of("Header")
        assert "255/511" in c.screen_text()
        script.failure = None
        await c.poll()
        assert "engine lost" not in c.screen_text()


async def test_old_facts_say_their_age() -> None:
    async with console(source=source(replace(facts(), age_s=9.0))) as c:
        assert "no news for 9.0 s" in c.text_of("Header")


async def test_names_from_afar_cannot_move_the_cursor() -> None:
    hostile = replace(ROWS[0], model="\x1b[2J[bold]evil[/]\n")
    async with console(source=source(facts((hostile,)))) as c:
        text = c.screen_text()
        assert "\x1b" not in text
        assert "[bold]" in text


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_fleet_is_a_table_that_is_sorted_and_opened(size: tuple[int, int]) -> None:
    servers = []
    for name, usage in (("a:1", 0.2), ("b:1", 0.9), ("c:1", None)):
        row = EngineRow("m", usage_ratio=usage, running=1)
        servers.append(ScriptedSource([RemoteObservation(facts((row,)))], name=name, missing=MISSING))
    servers[2].failure = "nothing listens there"
    async with console(source=Fleet(servers), size=size) as c:  # type: ignore[arg-type]

        def names() -> list[str]:
            return [line[2:5] for line in c.text_of("#remote").splitlines()[2:5]]

        assert names() == ["a:1", "b:1", "c:1"]
        assert "nothing listens there" in c.text_of("#remote")
        assert "1 lost" in c.text_of("Header")
        await c.press("right")
        assert names() == ["b:1", "a:1", "c:1"]
        await c.press("home", "enter")
        assert "b:1: Esc goes back" in c.note()
        await c.poll()
        assert "What this engine offers" in c.screen_text()
        assert "90.0%" in c.screen_text()
        await c.press("escape")
        await c.poll()
        assert names() == ["b:1", "a:1", "c:1"]
        await c.press("end", "down", "left")
        assert c.text_of("#remote").splitlines()[4].startswith("> c:1")


async def test_a_fleet_is_filtered_and_turned_round() -> None:
    rows = (
        EngineRow("llama", target="a:1", kind="vLLM", usage_ratio=0.2, running=2),
        EngineRow("qwen", target="b:1", kind="SGLang", usage_ratio=0.9, age_s=170.0),
        EngineRow(target="c:1", trouble="cannot be scraped", is_up=False),
    )
    table = RemoteFacts(FLEET, None, "http://p:9090", rows, notes=("some stores did not answer",))
    async with console(source=source(table), size=(120, 40)) as c:

        def names() -> list[str]:
            return [line[2:5] for line in c.text_of("#remote").splitlines()[3:6]]

        header = c.text_of("Header")
        assert "55.0%   over 2 engines" in header
        assert "fullest b:1 90.0%" in header
        assert "run 2 of 1" in header
        assert "1 lost" in header
        assert "1 stale" in header
        assert "some stores did not answer" in c.text_of("#remote")
        assert names() == ["a:1", "b:1", "c:1"]
        await c.press("o")
        assert names() == ["c:1", "b:1", "a:1"]
        await c.press("s")
        assert names() == ["a:1", "b:1", "c:1"]  # the emptiest first, what is not known last
        assert "HIT    —" in header
        assert "told by" not in header
        await c.press("slash", *"sglang", "enter")
        assert names()[0] == "b:1"
        assert "1 of 3" in c.text_of("#remote")
        assert "c:1" not in c.text_of("#remote")
        await c.press("slash", *["backspace"] * 6, *"none such", "enter", "down", "enter")
        assert "0 of 3" in c.text_of("#remote")


async def test_a_fleet_that_tells_nothing_has_no_numbers() -> None:
    silent, one = (
        EngineRow("m", target="a:1"),
        EngineRow("m", target="b:1", usage_ratio=0.5, told_hit_ratio=0.25, running=2),
    )
    async with console(source=source(RemoteFacts(FLEET, None, "http://p:9090", (silent,)))) as c:
        use, hit, load = c.text_of("Header").splitlines()[1:4]
        assert "over" not in use
        assert hit.split() == ["HIT", "—"]
        assert "run —" in load
        assert not set("0123456789") & set(use + hit + load)
    async with console(source=source(RemoteFacts(FLEET, None, "http://p:9090", (silent, one)))) as c:
        assert "over 1 engine " in c.text_of("Header")
        assert "told by 1 engine  lowest b:1 25.0%" in c.text_of("Header")


def mirrored(state: str = "complete") -> RemoteObservation:
    residency = Residency()
    residency.apply(decode(payload(stored([0xABC, 2, 3]), stored([4], 2), stored([5], medium="CPU"), time_s=3.0)), 0)
    reading = residency.mirror({0: 64}, state)
    reading = replace(reading, block=residency.block_at("device", 1, reading.places))
    events = EventFacts(state, residency.by_medium(), residency.distinct, residency.prefixes(), batches=1, stored=5)
    return RemoteObservation(facts(events=events), reading)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_cache_events_drive_a_map_whose_placement_is_ours(size: tuple[int, int]) -> None:
    engine = ScriptedSource([mirrored("joined late: partial")], name="h:1", missing=MISSING)
    async with console(source=engine, size=size) as c:
        assert "shows the mirror" in c.text_of("#remote")
        assert not c.app.main.display
        await c.press("1")
        await c.poll()
        assert c.app.main.display
        assert not c.app._base.query_one("#remote").display
        assert "placement is kvtop's, not the engine's" in c.screen_text()
        assert c.app.main.mode == "owner"
        assert "Mirror GPU" in c.screen_text()
        assert "Mirror CPU" in c.screen_text()
        assert "events do not tell" not in c.text_of("Header")
        await c.press("right")
        assert engine.asked[-1].block_id is not None
        await c.poll()
        assert "0000000000000002" in c.screen_text()
        if size[0] > 80:
            inspector = c.text_of("Inspector")
            assert "parent    0000000000000abc" in inspector
            assert "depth     2, 2 follow it" in inspector
            assert "4/4" in inspector
            assert "not told by events" in inspector
            assert "joined late: partial" in c.text_of("#prefixes")
            assert "4 of 64 copies" in c.text_of("#prefixes")
        await c.press("end")
        await c.poll()
        assert "nothing told" in c.screen_text()
        for _ in range(5):  # every colour mode can be drawn of it
            await c.press("c")
            await c.poll()
        await c.press("escape")
        assert not c.app.main.display
        assert "What this engine offers" in c.screen_text()


async def test_a_mirror_needs_events_and_goes_with_them() -> None:
    plain = RemoteObservation(facts())
    async with console(source=ScriptedSource([plain, mirrored(), plain], name="h:1", missing=MISSING)) as c:
        await c.press("1")
        assert "a mirror needs the engine's cache events" in c.note()
        await c.poll()
        await c.press("1")
        assert c.app.main.display
        await c.poll()
        assert not c.app.main.display
        assert c.app._base.query_one("#remote").display


class Estimating(ScriptedSource):
    """A source that has estimates from the second time on that it is asked."""

    asked_for = 0

    def what_if(self) -> WhatIf | None:
        self.asked_for += 1
        lookups = {0: [Lookup([1, 2, 3, 4], 0, 1.0), Lookup([1, 2, 5, 6], 2, 9.0, again=1)]}
        return what_if(lookups, 64, 4, block_size=16, is_told=True) if self.asked_for > 1 else None


@pytest.mark.parametrize("size", [(80, 24), (120, 50)])
async def test_advice_for_an_attached_engine_is_what_its_events_allow(size: tuple[int, int]) -> None:
    engine = Estimating([mirrored("gap: partial")], name="h:1", missing=MISSING)
    async with console(source=engine, size=size) as c:
        assert engine.asked_for == 0  # nobody pays for what nobody looks at
        await c.press("a")
        assert "Working out what other caches would have made" in c.screen_text()
        await c.poll()
        text = " ".join(re.sub(r"[^ -~]", " ", c.screen_text()).split())
        assert "25.0% were resident" in text
        assert "leaves no event" in text
        if size[1] > 24:
            assert "64 blocks" in text
            assert "32 tokens" in text
            assert "FIFO" in text
            assert "known only in part: gap: partial" in text


async def test_advice_without_events_says_what_it_needs() -> None:
    async with console(source=source(facts())) as c:
        await c.press("a")
        assert "Estimates need the engine's cache events" in c.screen_text()
