"""Operations on servers that are not ours: what each release is asked, what its answers mean, what is seen after."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_http import ScriptedHttp, answer

from allocator.commands import Compact
from kvtop.audit import AuditLog
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import Capability, EngineRow, EventFacts, RemoteFacts, SlotRow
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
    Sleep,
    Wake,
)
from kvtop.sources.remote.capabilities import capabilities_of
from kvtop.sources.remote.fetch import Remote
from kvtop.sources.remote.operations import RemoteOperations
from kvtop.sources.remote.source import RemoteSource

EVENTS = EventFacts("complete", distinct=11, batches=3, cleared=2)
CLEARED = replace(EVENTS, distinct=0, cleared=3)


def facts(kind: str = "vLLM", version: str | None = "0.32.0", **known: object) -> RemoteFacts:
    rows = (EngineRow("m", running=0, waiting=0, cached_tokens=64, preemptions=6.0),)
    table = capabilities_of(kind, rows, events_reason=None, has_events=True, may_operate=True)
    return RemoteFacts(kind, version, "http://h:1", rows, capabilities=table, **known)  # type: ignore[arg-type]


def slots(*held: int) -> tuple[SlotRow, ...]:
    return tuple(SlotRow(number, 1024, tokens, False) for number, tokens in enumerate(held))


class Looking:
    """Reads given facts one after another; afterwards nothing new comes."""

    name = "h:1"

    def __init__(self, url: str, *readings: RemoteFacts, token_file: str | None = None) -> None:
        self.remote = Remote(url, token_file)
        self.readings = list(readings)
        self.error: str | None = None

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        if self.error is not None:
            raise SourceError(self.error)
        return RemoteObservation(self.readings[0])

    def facts_after(self, at_s: float, timeout_s: float) -> RemoteFacts | None:
        if len(self.readings) == 1:
            return None
        self.readings.pop(0)
        return self.readings[0]


@pytest.fixture
def server() -> Iterator[ScriptedHttp]:
    made = ScriptedHttp({})
    yield made
    made.close()


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def door(looking: Looking, audit: Path) -> RemoteOperations:
    return RemoteOperations(looking, AuditLog(audit), sleep=lambda seconds: None)


def lines(audit: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


# What is asked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "version", "command", "path", "body"),
    [
        ("vLLM", "0.6.6", ResetPrefixCache(), "/reset_prefix_cache", None),
        ("vLLM", "0.32.0", ResetPrefixCache(True), "/reset_prefix_cache?reset_running_requests=true", None),
        ("vLLM", "0.14.0", Sleep(2), "/sleep?level=2", None),
        ("vLLM", "0.33.0", Sleep(0, "keep"), "/sleep?level=0&mode=keep", None),
        ("vLLM", None, Sleep(), "/sleep?level=1&mode=wait", None),
        ("vLLM", "0.33.0", Wake(), "/wake_up", None),
        ("vLLM", "0.33.0", Wake(("weights", "kv_cache")), "/wake_up?tags=weights&tags=kv_cache", None),
        ("vLLM", "0.14.0", PauseGeneration("wait"), "/pause?wait_for_inflight_requests=true&clear_cache=false", None),
        ("vLLM", "0.15.0", PauseGeneration("abort"), "/pause?wait_for_inflight_requests=false&clear_cache=false", None),
        ("vLLM", "0.16.0", PauseGeneration("wait"), "/pause?mode=wait&clear_cache=false", None),
        ("vLLM", "0.16.0", PauseGeneration("keep"), "/pause?mode=keep", None),
        ("vLLM", "0.33.0", PauseGeneration(), "/pause?mode=keep", None),
        ("vLLM", "0.33.0", ContinueGeneration(), "/resume", None),
        ("SGLang", "0.5.23", ResetPrefixCache(), "/flush_cache", None),
        ("SGLang", "0.5.23", PauseGeneration(), "/pause_generation", {"mode": "in_place"}),
        ("SGLang", "0.5.23", PauseGeneration("retract"), "/pause_generation", {"mode": "retract"}),
        ("SGLang", "0.5.3", PauseGeneration("abort"), "/pause_generation", {}),
        ("SGLang", "0.5.23", ContinueGeneration(), "/continue_generation", {}),
        ("SGLang", "0.5.23", ReleaseMemory(), "/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("SGLang", "0.5.23", ResumeMemory(("weights",)), "/resume_memory_occupation", {"tags": ["weights"]}),
        ("llama.cpp", None, EraseSlot(1), "/slots/1?action=erase", None),
        ("llama.cpp", None, SaveSlot(1, "a.bin"), "/slots/1?action=save", {"filename": "a.bin"}),
        ("llama.cpp", None, RestoreSlot(1, "a.bin"), "/slots/1?action=restore", {"filename": "a.bin"}),
    ],
    ids=lambda value: str(value),
)
def test_each_release_is_asked_in_its_own_words_and_once(
    server: ScriptedHttp,
    audit: Path,
    kind: str,
    version: str | None,
    command: AnyCommand,
    path: str,
    body: dict[str, object] | None,
) -> None:
    server.answers[path] = answer("{}")
    looking = Looking(server.url, facts(kind, version, slots=slots(5, 9)))
    assert door(looking, audit).apply(command).ok
    (request,) = server.requests
    head, _, sent = request.partition("\r\n\r\n")
    assert head.startswith(f"POST {path} HTTP/1.1")
    assert (json.loads(sent) if sent else None) == body


@pytest.mark.parametrize(
    ("kind", "version", "command", "words"),
    [
        ("vLLM", "0.32.0", PauseGeneration("retract"), "retract: vLLM has keep, wait and abort"),
        ("vLLM", "0.14.0", PauseGeneration("keep"), "keep: vLLM 0.14.0 has wait and abort"),
        ("vLLM", "0.32.0", EraseSlot(0), "not offered by this engine"),
        ("vLLM", "0.32.0", Compact(), "not offered by this engine"),
        ("SGLang", "0.5.23", PauseGeneration("wait"), "wait: SGLang has keep, retract and abort"),
        ("SGLang", "0.5.3", PauseGeneration("keep"), "keep: SGLang 0.5.3 has abort alone"),
        ("SGLang", "0.5.23", ReleaseMemory(()), "name some of kv_cache, weights, cuda_graph"),
        ("SGLang", "0.5.23", Sleep(), "not offered by this engine"),
        ("llama.cpp", None, ResetPrefixCache(), "not offered by this engine"),
        ("llama.cpp", None, EraseSlot(99), "there is no slot 99: its slots are 0 to 1"),
        ("llama.cpp", None, SaveSlot(1, "a"), "the slot holds nothing"),
        ("TGI", None, ResetPrefixCache(), "not offered by this engine"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(
    server: ScriptedHttp, audit: Path, kind: str, version: str | None, command: AnyCommand, words: str
) -> None:
    operations = door(Looking(server.url, facts(kind, version, slots=slots(5, 0))), audit)
    assert operations.plan(command).refusal == words
    outcome = operations.apply(command)
    assert (outcome.ok, outcome.message) == (False, words)
    assert server.requests == []
    assert lines(audit)[0]["outcome"]["message"] == words  # type: ignore[index]


@pytest.mark.parametrize("running", [3, None])
def test_an_old_vllm_is_not_put_to_sleep_under_requests(audit: Path, running: int | None) -> None:
    busy = replace(facts(version="0.14.0"), rows=(EngineRow("m", running=running),))
    plan = door(Looking("http://127.0.0.1:1", busy), audit).plan(Sleep())
    assert plan.refusal is not None
    assert "vLLM 0.14.0 sleeps at once" in plan.refusal
    assert ("3 requests run" if running else "not known whether requests run") in plan.refusal


# What a plan says ---------------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_known_and_leaves_open_what_is_not(audit: Path) -> None:
    plan = door(Looking("http://127.0.0.1:1", facts(events=EVENTS)), audit).plan(ResetPrefixCache(True))
    assert plan.refusal is None
    assert plan.evicted_blocks == 11
    effects = {e.name: (e.before, e.after) for e in plan.effects}
    assert effects["resident blocks"] == (11, None)
    assert effects["running requests"] == (0, None)
    assert effects["preemptions"] == (6, None)
    unknown = replace(facts(), rows=(EngineRow("m"),))
    plan = door(Looking("http://127.0.0.1:1", unknown), audit).plan(ResetPrefixCache())
    effects = {e.name: (e.before, e.after) for e in plan.effects}
    assert effects == {"resident blocks": (None, 0), "running requests": (None, None), "waiting requests": (None, None)}


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_a_plan_warns_of_requests_that_run(audit: Path, kind: str) -> None:
    busy = replace(facts(kind), rows=(EngineRow("m", running=3),))
    plan = door(Looking("http://127.0.0.1:1", busy), audit).plan(ResetPrefixCache())
    assert "the engine will refuse while 3 requests run" in plan.summary
    assert plan.refusal is None  # numbers may be old: the engine decides


def test_a_plan_for_a_slot_tells_what_is_in_it(audit: Path) -> None:
    busy = (SlotRow(0, 1024, 99, True),)
    operations = door(Looking("http://127.0.0.1:1", facts("llama.cpp", None, slots=busy)), audit)
    plan = operations.plan(RestoreSlot(0, "a"))
    assert "the 99 tokens in it are dropped" in plan.summary
    assert "a request is being served in it" in plan.summary
    assert [(e.before, e.after) for e in operations.plan(EraseSlot(0)).effects] == [(99, 0)]


# What comes of it ---------------------------------------------------------------------------------------------------

Told = tuple[str, str, AnyCommand, str, bytes, RemoteFacts, RemoteFacts | None]

OUTCOMES: dict[str, tuple[str, AnyCommand, bytes, Sequence[RemoteFacts], tuple[bool, bool, str]]] = {
    "seen": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer('{"success":true}'),
        [facts(events=EVENTS), facts(events=EVENTS), facts(events=CLEARED)],
        (True, True, "observed: all blocks cleared, 11 → 0 resident blocks; the engine reports success"),
    ),
    "idle": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer('{"success":true}'),
        [facts(events=EVENTS), facts(events=EVENTS)],
        (
            True,
            False,
            "acknowledged; the engine reports success; not yet visible: an idle engine publishes with its next step",
        ),
    ),
    "old and silent": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer(""),
        [facts(version="0.14.0")],
        (
            True,
            False,
            "acknowledged; this release does not say whether it worked; not visible from here without its cache events",
        ),
    ),
    "old and seen": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer(""),
        [facts(version="0.14.0", events=EVENTS), facts(version="0.14.0", events=CLEARED)],
        (
            True,
            True,
            "observed: all blocks cleared, 11 → 0 resident blocks; this release does not say whether it worked",
        ),
    ),
    "not reset": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer('{"success":false}'),
        [facts(events=EVENTS)],
        (
            False,
            True,
            "the engine has not reset it: blocks are held, by running requests or by transfers under way",
        ),
    ),
    "history that comes late is no success": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer(""),
        [facts(events=EventFacts("no events yet")), facts(events=CLEARED)],
        (
            True,
            False,
            "acknowledged; this release does not say whether it worked; "
            "not yet visible: an idle engine publishes with its next step",
        ),
    ),
    "running": (
        "/reset_prefix_cache?reset_running_requests=true",
        ResetPrefixCache(True),
        answer('{"success":true}'),
        [
            facts(events=EVENTS),
            replace(facts(events=CLEARED), rows=(EngineRow("m", running=0, waiting=0, preemptions=9.0),)),
        ],
        (
            True,
            True,
            "observed: all blocks cleared, 11 → 0 resident blocks; 3 requests taken off their blocks; "
            "the engine reports success",
        ),
    ),
    "no development mode": (
        "/elsewhere",
        ResetPrefixCache(),
        b"",
        [facts()],
        (False, True, "the server has no such operation (404)"),
    ),
    "asleep": (
        "/sleep?level=1&mode=wait",
        Sleep(),
        answer('{"status":"sleeping","level":1}'),
        [facts(states=(("sleeping", False),)), facts(states=(("sleeping", True),))],
        (True, True, "observed: the engine is asleep; the engine says: sleeping"),
    ),
    "a lie": (
        "/sleep?level=1&mode=wait",
        Sleep(),
        answer('{"status":"sleeping","level":1}'),
        [facts(states=(("sleeping", False),)), facts(states=(("sleeping", False),))],
        (True, False, "acknowledged; the engine says: sleeping; not yet visible"),
    ),
    "awake": (
        "/wake_up",
        Wake(),
        answer(""),
        [facts(states=(("sleeping", True),)), facts(states=(("sleeping", False),))],
        (True, True, "observed: the engine is awake"),
    ),
    "partly awake": (
        "/wake_up?tags=weights",
        Wake(("weights",)),
        answer('{"status":"sleeping","tags":["weights"]}'),
        [facts(states=(("sleeping", True),)), facts(states=(("sleeping", True),))],
        (True, True, "observed: the engine sleeps on until the rest is woken too; the engine says: sleeping"),
    ),
    "paused already": (
        "/pause?mode=keep",
        PauseGeneration(),
        answer('{"status":"paused"}'),
        [facts(states=(("paused", True),)), facts(states=(("paused", True),))],
        (True, True, "observed: the engine is paused, as it was; the engine says: paused"),
    ),
    "goes on": (
        "/resume",
        ContinueGeneration(),
        answer('{"status":"resumed"}'),
        [facts(states=(("paused", True),)), facts(states=(("paused", False),))],
        (True, True, "observed: the engine is no longer paused; the engine says: resumed"),
    ),
    "pause fails": (
        "/pause?mode=wait&clear_cache=false",
        PauseGeneration("wait"),
        answer('{"error":"Failed to pause generation: no"}', status="500 Internal Server Error"),
        [facts()],
        (False, True, "it answers 500: Failed to pause generation: no"),
    ),
    "flushed": (
        "/flush_cache",
        ResetPrefixCache(),
        answer("Cache flushed.\nPlease check backend logs for more details.\n"),
        [facts("SGLang", events=EVENTS), facts("SGLang", events=CLEARED)],
        (True, True, "observed: all blocks cleared, 11 → 0 resident blocks; the engine says: Cache flushed"),
    ),
    "flush that nothing shows": (
        "/flush_cache",
        ResetPrefixCache(),
        answer("Cache flushed.\n"),
        [facts("SGLang")],
        (
            True,
            False,
            "acknowledged; the engine says: Cache flushed; not visible from here: "
            "an idle engine's metrics stand still, and there are no cache events",
        ),
    ),
    "not flushed": (
        "/flush_cache",
        ResetPrefixCache(),
        answer("Flush cache failed: 2 running\n", status="400 Bad Request"),
        [facts("SGLang")],
        (False, True, "Flush cache failed: 2 running"),
    ),
    "not flushed, in silence": (
        "/flush_cache",
        ResetPrefixCache(),
        answer("", status="400 Bad Request"),
        [facts("SGLang")],
        (False, True, "the engine has not flushed it: requests run or wait"),
    ),
    "admin key": (
        "/flush_cache",
        ResetPrefixCache(),
        answer('{"error":"Unauthorized"}', status="401 Unauthorized"),
        [facts("SGLang")],
        (False, True, "it wants another bearer token (401); --token-file FILE gives one"),
    ),
    "nothing shows a pause": (
        "/pause_generation",
        PauseGeneration("retract"),
        answer('{"message":"Generation paused successfully.","status":"ok"}'),
        [facts("SGLang")],
        (
            True,
            False,
            "acknowledged; the engine says: Generation paused successfully; this engine has nothing that would show it",
        ),
    ),
    "erased": (
        "/slots/1?action=erase",
        EraseSlot(1),
        answer('{"id_slot":1,"n_erased":42}'),
        [facts("llama.cpp", slots=slots(7, 42)), facts("llama.cpp", slots=slots(7, 0))],
        (True, True, "observed: slot 1: 42 → 0 tokens; the server says: 42 tokens erased"),
    ),
    "not erased in fact": (
        "/slots/1?action=erase",
        EraseSlot(1),
        answer('{"id_slot":1,"n_erased":42}'),
        [facts("llama.cpp", slots=slots(7, 42)), facts("llama.cpp", slots=slots(7, 42))],
        (True, False, "acknowledged; the server says: 42 tokens erased; not yet visible in /slots"),
    ),
    "no slot path": (
        "/slots/1?action=erase",
        EraseSlot(1),
        answer('{"error":{"code":501,"message":"needs --slot-save-path"}}', status="501 Not Implemented"),
        [facts("llama.cpp", slots=slots(7, 42))],
        (False, True, "it answers 501: needs --slot-save-path"),
    ),
    "saved": (
        "/slots/1?action=save",
        SaveSlot(1, "a.bin"),
        answer('{"id_slot":1,"filename":"a.bin","n_saved":42,"n_written":1048}'),
        [facts("llama.cpp", slots=slots(7, 42))],
        (
            True,
            False,
            "acknowledged; the server says: 42 tokens saved, 1,048 bytes written; "
            "its file is on the server's machine, not visible from here",
        ),
    ),
    "restored": (
        "/slots/0?action=restore",
        RestoreSlot(0, "a.bin"),
        answer('{"id_slot":0,"filename":"a.bin","n_restored":42,"n_read":1048}'),
        [facts("llama.cpp", slots=slots(0, 0)), facts("llama.cpp", slots=slots(42, 0))],
        (True, True, "observed: slot 0: 0 → 42 tokens; the server says: 42 tokens restored, 1,048 bytes read"),
    ),
    "a redirect": (
        "/resume",
        ContinueGeneration(),
        answer("", status="307 Temporary Redirect", headers="Location: http://evil/resume\r\n"),
        [facts()],
        (False, True, "it redirects (307); that is not followed"),
    ),
    "words that move the cursor": (
        "/resume",
        ContinueGeneration(),
        answer('{"error":"\\u001b[2Jno\\nway"}', status="500 Internal Server Error"),
        [facts()],
        (False, True, "it answers 500: \N{REPLACEMENT CHARACTER}[2Jno"),
    ),
    "a page of another service": (
        "/resume",
        ContinueGeneration(),
        answer("<html><title>login</title>", status="502 Bad Gateway"),
        [facts()],
        (False, True, "it answers 502"),
    ),
    "JSON of the wrong kind": (
        "/reset_prefix_cache",
        ResetPrefixCache(),
        answer('{"success":"yes","status":["sleeping"]}'),
        [facts()],
        (True, False, "acknowledged; not visible from here without its cache events"),
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_outcome_is_what_was_seen(server: ScriptedHttp, audit: Path, name: str) -> None:
    path, command, told, readings, (ok, is_seen, message) = OUTCOMES[name]
    server.answers[path] = told
    outcome = door(Looking(server.url, *readings), audit).apply(command)
    assert (outcome.ok, outcome.is_seen, outcome.message) == (ok, is_seen, message)
    assert len(server.requests) == 1
    (line,) = lines(audit)
    assert (line["engine"], line["error"]) == ("h:1", None)
    assert line["outcome"]["message"] == message  # type: ignore[index]
    assert line["plan"] is not None


@pytest.mark.parametrize("reading", [facts("SGLang"), facts("llama.cpp", slots=slots(7))], ids=["SGLang", "llama.cpp"])
def test_what_nothing_shows_is_not_waited_for(server: ScriptedHttp, audit: Path, reading: RemoteFacts) -> None:
    command = PauseGeneration() if reading.kind == "SGLang" else SaveSlot(0, "a")
    server.answers["/pause_generation"] = server.answers["/slots/0?action=save"] = answer("{}")
    looking = Looking(server.url, reading, reading, reading)
    assert door(looking, audit).apply(command).ok
    assert len(looking.readings) == 3


def test_long_words_of_a_server_are_cut(server: ScriptedHttp, audit: Path) -> None:
    server.answers["/resume"] = answer(json.dumps({"error": "x" * 100_000}), status="500 Oh")
    message = door(Looking(server.url, facts()), audit).apply(ContinueGeneration()).message
    assert len(message) < 200
    assert message.endswith("x…")


# No answer ----------------------------------------------------------------------------------------------------------


def hang(connection: socket.socket, over: threading.Event) -> None:
    over.wait(20)


def drop(connection: socket.socket, over: threading.Event) -> None:
    """End the connection in the middle of an answer."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


def endless(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")


NO_ANSWERS: dict[str, tuple[Callable[[socket.socket, threading.Event], None], str]] = {
    "hang": (hang, "no whole answer within 0.2 s"),
    "drop": (drop, "something listens there that does not speak HTTP, or broke off"),
    "endless": (endless, "no whole answer within 0.2 s"),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_without_an_answer_it_is_not_known_and_not_asked_again(server: ScriptedHttp, audit: Path, name: str) -> None:
    server.answers["/resume"], reason = NO_ANSWERS[name]
    with pytest.raises(SourceError) as caught:
        door(Looking(server.url, facts()), audit).apply(ContinueGeneration(), timeout_s=0.2)
    words = str(caught.value)
    assert words.endswith("whether it was done is not known")
    assert reason in words or "goes on past" in words
    assert len(server.requests) == 1
    (line,) = lines(audit)
    assert line["outcome"] is None
    assert line["error"] == words


def test_without_an_answer_what_is_seen_counts(server: ScriptedHttp, audit: Path) -> None:
    server.answers["/resume"] = hang
    readings = (facts(states=(("paused", True),)), facts(states=(("paused", False),)))
    outcome = door(Looking(server.url, *readings), audit).apply(ContinueGeneration(), timeout_s=0.2)
    assert outcome.ok
    assert outcome.message == ("no answer: no whole answer within 0.2 s; but observed: the engine is no longer paused")
    assert len(server.requests) == 1


def test_what_was_never_sent_is_a_refusal(audit: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = door(Looking(f"http://127.0.0.1:{port}", facts()), audit).apply(ContinueGeneration())
    assert (outcome.ok, outcome.message) == (False, "not sent: nothing listens there")


def test_a_server_that_cannot_be_read_is_asked_for_nothing(server: ScriptedHttp, audit: Path) -> None:
    looking = Looking(server.url, facts())
    looking.error = "no answer yet"
    with pytest.raises(SourceError, match="no answer yet"):
        door(looking, audit).apply(ContinueGeneration())
    assert server.requests == []
    assert lines(audit)[0]["plan"] is None


def test_the_token_goes_with_it(server: ScriptedHttp, audit: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-1\n")
    server.answers["/resume"] = answer("{}")
    door(Looking(server.url, facts(), token_file=str(tmp_path / "token")), audit).apply(ContinueGeneration())
    assert "Authorization: Bearer secret-1" in server.requests[0].replace("authorization", "Authorization")
    assert "secret-1" not in audit.read_text()


# With a source that really reads ------------------------------------------------------------------------------------


def test_a_pause_is_seen_through_the_source(server: ScriptedHttp, audit: Path) -> None:
    """The server says that it is paused from the moment on at which it was asked."""
    server.answers["/metrics"] = answer('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n')
    server.answers["/version"] = answer('{"version":"0.32.0"}')
    server.answers["/is_sleeping"] = answer('{"is_sleeping":false}')
    server.answers["/is_paused"] = answer('{"is_paused":false}')

    def pause(connection: socket.socket, over: threading.Event) -> None:
        server.answers["/is_paused"] = answer('{"is_paused":true}')
        connection.sendall(answer('{"status":"paused"}'))

    server.answers["/pause?mode=keep"] = pause
    source = RemoteSource(server.url, may_operate=True, every_s=0.01)
    try:
        outcome = RemoteOperations(source, AuditLog(audit)).apply(PauseGeneration(), timeout_s=10)
        assert outcome.message == "observed: the engine is paused; the engine says: paused"
        assert source.read(Focus(), 10).facts.is_now("paused") is True
        assert "operations" not in source.missing
    finally:
        source.close()


def test_a_capability_that_nobody_has_is_not_offered() -> None:
    assert RemoteFacts("x", None, "", ()).refusal("sleep") == "not offered by this engine"
    table = (Capability("sleep", "needs a bed", ("sleep", "nap")),)
    assert RemoteFacts("x", None, "", (), capabilities=table).refusal("nap") == "needs a bed"
