"""Operations through kvtop on real servers: what is reported as seen is so, and what is refused changes nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_servers import EngineServer, vllm_server
from fake_engine import until

from allocator.plans import Outcome
from kvtop.model.observation import Focus
from kvtop.model.remote import RemoteFacts
from kvtop.serving_commands import (
    AnyCommand,
    ContinueGeneration,
    EraseSlot,
    PauseGeneration,
    ReleaseMemory,
    ResetPrefixCache,
    RestoreSlot,
    SaveSlot,
    Sleep,
    Wake,
)
from kvtop.sources.remote.offers import DEVELOPMENT, IDLE_ONLY, MEMORY_SAVER, SLEEP_MODE
from kvtop.sources.remote.source import RemoteSource
from kvtop.targets import open_target

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

#: Seconds in which a server that shares its machine brings out a token.
BUSY_BOUND_S = 60.0
#: Seconds without an event after which an engine without requests takes no more steps.
QUIET_S = 1.0
PROMPT = list(range(100, 420))


class Driven:
    """One server, driven through kvtop as a person would."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.attachment = open_target(server.url, allow_operations=True)
        self.operations = self.attachment.operations
        source = self.attachment.source
        assert isinstance(source, RemoteSource)
        source.settle(20.0)
        self.source = source

    def facts(self) -> RemoteFacts:
        return self.source.read(Focus(), 10).facts

    def apply(self, command: AnyCommand) -> Outcome:
        return self.operations.apply(command)

    def refusal(self, command: AnyCommand) -> str | None:
        return self.operations.plan(command).refusal

    def hits(self, prompt: list[int], name: str = "vllm:prefix_cache_hits_total") -> float:
        """Return the prompt tokens that a request finds cached."""
        before = self.server.metric(name)
        self.server.complete(prompt, tokens=2)
        until(lambda: self.facts().age_s < 5)
        return self.server.metric(name) - before

    def rests(self) -> None:
        """Wait until nothing runs and nothing was told for a while: the engine takes no step any more."""
        seen: list[tuple[float, int]] = []

        def is_quiet() -> bool:
            facts = self.facts()
            batches = -1 if facts.events is None else facts.events.batches
            if any(row.running or row.waiting for row in facts.rows) or (seen and seen[-1][1] != batches):
                seen.clear()
            seen.append((time.monotonic(), batches))
            return seen[-1][0] - seen[0][0] > QUIET_S

        until(is_quiet, BUSY_BOUND_S)

    @contextlib.contextmanager
    def busy(self) -> Iterator[Stream]:
        """Let a long request run meanwhile; it is given up at the end."""
        stream = Stream(self.server.url)
        try:
            until(lambda: stream.chunks > 0, BUSY_BOUND_S)
            yield stream
        finally:
            stream.close()


class Stream:
    """A request that is answered token by token, and the same again when it is over, for as long as it lasts.

    Attributes:
        chunks: Parts of the answers that have come.
        ended: Whether no more will come.
    """

    def __init__(self, url: str) -> None:
        self.chunks = 0
        self.ended = threading.Event()
        body = {"model": "tiny", "prompt": PROMPT[:40], "max_tokens": 1900, "temperature": 0}
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        self._closing = False
        self._asked = json.dumps({**body, "ignore_eos": True, "stream": True})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def goes_on(self) -> None:
        """Wait until more of the answer comes."""
        seen = self.chunks
        until(lambda: self.chunks > seen, BUSY_BOUND_S)

    def close(self) -> None:
        self._closing = True
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while not self._closing:
                self._connection.request("POST", "/v1/completions", self._asked, {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                while line := answer.readline():
                    self.chunks += line.startswith(b"data: {")
        self.ended.set()


Drive = Callable[[EngineServer], Driven]


@pytest.fixture
def drive() -> Iterator[Drive]:
    made: list[Driven] = []

    def start(server: EngineServer) -> Driven:
        made.append(Driven(server))
        return made[-1]

    yield start
    for driven in made:
        driven.attachment.close()


def test_vllm_a_reset_on_an_idle_engine_is_acknowledged_and_seen_with_the_next_request(
    vllm: EngineServer, drive: Drive
) -> None:
    driven = drive(vllm)
    driven.server.complete(PROMPT, tokens=2)
    assert driven.hits(PROMPT) > 0
    until(lambda: (e := driven.facts().events) is not None and e.distinct >= len(PROMPT) // 32 - 1)
    driven.rests()
    before = driven.facts().events
    assert before is not None
    assert driven.operations.plan(ResetPrefixCache()).evicted_blocks >= len(PROMPT) // 32 - 1
    outcome = driven.apply(ResetPrefixCache())
    assert (outcome.ok, outcome.is_seen) == (True, False), outcome.message
    assert "the engine reports success; not yet visible" in outcome.message
    assert driven.hits(PROMPT) == 0  # it is empty, although nothing showed it
    until(lambda: (e := driven.facts().events) is not None and e.cleared == before.cleared + 1)


def test_vllm_a_reset_under_requests_needs_to_be_asked_for(vllm: EngineServer, drive: Drive) -> None:
    driven = drive(vllm)
    with driven.busy() as stream:
        until(lambda: sum(row.running or 0 for row in driven.facts().rows) == 1, BUSY_BOUND_S)
        assert "the engine will refuse while 1 requests run" in driven.operations.plan(ResetPrefixCache()).summary
        outcome = driven.apply(ResetPrefixCache())
        assert not stream.ended.is_set(), "nothing runs any more"
        assert not outcome.ok
        assert "blocks are held" in outcome.message
        outcome = driven.apply(ResetPrefixCache(running=True))
        assert (outcome.ok, outcome.is_seen) == (True, True), outcome.message
        assert "observed: all blocks cleared" in outcome.message
        assert "1 requests taken off their blocks" in outcome.message
        stream.goes_on()


def test_vllm_pauses_and_goes_on(vllm: EngineServer, drive: Drive) -> None:
    driven = drive(vllm)
    with driven.busy() as stream:
        outcome = driven.apply(PauseGeneration("keep"))
        assert "observed: the engine is paused" in outcome.message
        try:
            assert driven.facts().is_now("paused") is True
            before = driven.server.metric("vllm:generation_tokens_total")
            assert not stream.ended.wait(1.0)
            assert driven.server.metric("vllm:generation_tokens_total") == before
        finally:
            assert "no longer paused" in driven.apply(ContinueGeneration()).message
        stream.goes_on()


def test_vllm_sleeps_as_far_as_it_was_started_for_that(vllm: EngineServer, drive: Drive) -> None:
    driven = drive(vllm)
    assert driven.refusal(Sleep(1)) == SLEEP_MODE
    assert not driven.apply(Sleep(1)).ok
    assert driven.facts().is_now("sleeping") is False
    try:
        assert "observed: the engine is asleep" in driven.apply(Sleep(0)).message
    finally:
        assert "observed: the engine is awake" in driven.apply(Wake()).message
    assert driven.server.complete("and on", tokens=2)["choices"]


def test_vllm_without_development_mode_offers_nothing(drive: Drive, servers_dir: Path) -> None:
    with vllm_server(servers_dir, VLLM_SERVER_DEV_MODE="0") as server:
        driven = drive(server)
        for command in (ResetPrefixCache(), Sleep(), Wake(), PauseGeneration(), ContinueGeneration()):
            assert driven.refusal(command) == DEVELOPMENT
            assert not driven.apply(command).ok
        assert driven.facts().states == ()


def test_sglang_a_flush_is_seen_at_once(sglang: EngineServer, drive: Drive) -> None:
    driven = drive(sglang)
    driven.server.complete(PROMPT, tokens=2)
    until(lambda: (e := driven.facts().events) is not None and e.distinct > 0)
    outcome = driven.apply(ResetPrefixCache())
    assert (outcome.ok, outcome.is_seen) == (True, True), outcome.message
    assert "observed: all blocks cleared" in outcome.message
    events = driven.facts().events
    assert events is not None
    assert events.distinct == 0
    assert driven.refusal(ResetPrefixCache(running=True)) == IDLE_ONLY
    assert driven.refusal(ReleaseMemory()) == MEMORY_SAVER


def test_sglang_refuses_to_flush_while_it_serves_and_pauses_for_it(sglang: EngineServer, drive: Drive) -> None:
    driven = drive(sglang)
    with driven.busy() as stream:
        outcome = driven.apply(ResetPrefixCache())
        assert not stream.ended.is_set(), "nothing runs any more"
        assert not outcome.ok
        paused = driven.apply(PauseGeneration("retract"))
        assert (paused.ok, paused.is_seen) == (True, False)
        try:
            assert driven.apply(ResetPrefixCache()).ok
            assert not stream.ended.is_set()
        finally:
            assert driven.apply(ContinueGeneration()).ok
        stream.goes_on()


def slot_of(driven: Driven) -> Any:
    return max(driven.facts().slots, key=lambda slot: slot.held_tokens)


def test_llama_cpp_saves_erases_and_restores_a_slot(llama: EngineServer, drive: Drive) -> None:
    driven = drive(llama)
    driven.server.complete("one two three four five six seven eight nine ten " * 6, tokens=4)
    until(lambda: slot_of(driven).held_tokens > 0)
    slot = slot_of(driven)
    saved = driven.apply(SaveSlot(slot.slot_id, "kvtop-test.bin"))
    assert saved.ok, saved.message
    assert f"{slot.held_tokens:,} tokens saved" in saved.message
    erased = driven.apply(EraseSlot(slot.slot_id))
    assert f"observed: slot {slot.slot_id}: {slot.held_tokens:,} → 0 tokens" in erased.message
    assert driven.refusal(SaveSlot(slot.slot_id, "x.bin")) == "the slot holds nothing"
    restored = driven.apply(RestoreSlot(slot.slot_id, "kvtop-test.bin"))
    assert f"observed: slot {slot.slot_id}: 0 → {slot.held_tokens:,} tokens" in restored.message
    assert not driven.apply(RestoreSlot(slot.slot_id, "kvtop-nowhere.bin")).ok


def test_llama_cpp_a_slot_that_does_not_exist_is_not_another_one(llama: EngineServer, drive: Drive) -> None:
    """This server takes any number, and acts on the slot that is left of it by division."""
    driven = drive(llama)
    driven.server.complete("eleven twelve thirteen fourteen " * 6, tokens=4)
    until(lambda: slot_of(driven).held_tokens > 0)
    slot, count = slot_of(driven), len(driven.facts().slots)
    assert "there is no slot" in (driven.refusal(EraseSlot(slot.slot_id + count)) or "")
    assert not driven.apply(EraseSlot(slot.slot_id + count)).ok
    assert slot_of(driven).held_tokens == slot.held_tokens
