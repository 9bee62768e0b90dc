"""An engine over HTTP as a source: addresses, readings, loss and return, the view, the exporter, the headless watch."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest
from scripted_http import ScriptedHttp, answer

from allocator.commands import Pause
from kvtop.attachment import Attachment
from kvtop.cli import run
from kvtop.driving import Ending
from kvtop.errors import SourceError, UserError
from kvtop.exporter import ViewCollector
from kvtop.exporting import run_exporting
from kvtop.metrics_address import MetricsAddress
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import EngineRow, EventFacts, PrefixLine, RemoteFacts
from kvtop.operations import ReadOnly
from kvtop.remote_metrics import RemoteCollector
from kvtop.serving_commands import ResetPrefixCache
from kvtop.sources.remote.dialects import recognise
from kvtop.sources.remote.exposition import parse
from kvtop.sources.remote.source import EventOptions, RemoteSource, split_url
from kvtop.sources.scripted import ScriptedSource
from kvtop.targets import AttachOptions, open_target

TIMEOUT_S = 20.0


def page(*, hits: int = 40, queries: int = 100, usage: float = 0.25) -> bytes:
    return answer(
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
        f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}\n'
        f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 3\n'
    )


@pytest.fixture
def server() -> Iterator[ScriptedHttp]:
    server = ScriptedHttp({"/metrics": page()})
    yield server
    server.close()


def until(condition: Callable[[], bool]) -> None:
    wait = threading.Event()
    for _ in range(2000):
        if condition():
            return
        wait.wait(0.01)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:1", ("http://h:1", None)),
        ("http://h:1/", ("http://h:1", None)),
        ("https://h", ("https://h", None)),
        ("http://[::1]:9", ("http://[::1]:9", None)),
        ("http://h:1/prometheus/metrics", ("http://h:1", "/prometheus/metrics")),
        ("http://h:1/?model=a", ("http://h:1", "/metrics?model=a")),
    ],
)
def test_addresses(url: str, wanted: tuple[str, str | None]) -> None:
    assert split_url(url) == wanted


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://[::1",
        "ftp://h",
        "http://u:p@h",
        "http://h#a",
        "http://h /",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError) as caught:
        split_url(url)
    assert "u:p" not in str(caught.value)


def test_replays_belong_to_streams() -> None:
    options = EventOptions(("tcp://a:1", "tcp://a:2"), ("tcp://a:3",), "kv")
    assert [(e.rank, e.endpoint, e.replay, e.topic) for e in options.endpoints()] == [
        (0, "tcp://a:1", "tcp://a:3", "kv"),
        (1, "tcp://a:2", None, "kv"),
    ]
    with pytest.raises(UserError, match="--replay: 1 of them, but 0 --events"):
        EventOptions((), ("tcp://a:3",)).endpoints()


def test_a_target_over_http_is_looked_at_only(server: ScriptedHttp) -> None:
    attachment = open_target(server.url)
    view = attachment.poll(TIMEOUT_S)
    assert view.error is None
    assert view.remote is not None
    assert (view.source, view.remote.kind, view.snapshot, view.device) == (
        f"127.0.0.1:{server.port}",
        "vLLM",
        None,
        None,
    )
    assert (view.hit_ratio, view.history.get("usage"), view.history.get("running")) == (0.4, (0.25,), (3,))
    assert view.history.get("preemptions") == (None,)
    assert set(attachment.source.missing) == {"block-map", "sequences", "events", "host-tier", "operations"}
    refusal = attachment.operations.plan(Pause()).refusal
    assert refusal is not None
    assert "read only" in refusal
    assert not attachment.operations.apply(Pause()).ok
    attachment.close()
    attachment.close()
    assert "closed" in (attachment.poll(0).error or "")


def test_operations_are_allowed_by_name(server: ScriptedHttp) -> None:
    attachment = open_target(server.url, allow_operations=True)
    try:
        assert "operations" not in attachment.source.missing
        refusal = attachment.operations.plan(ResetPrefixCache()).refusal
        assert refusal == "needs development mode: VLLM_SERVER_DEV_MODE=1 on the server"
    finally:
        attachment.close()


def test_a_source_that_was_never_read_closes() -> None:
    RemoteSource("http://127.0.0.1:1").close()


def test_loss_return_and_restart(server: ScriptedHttp) -> None:
    source = RemoteSource(server.url, every_s=0.01)

    def facts() -> RemoteFacts:
        return source.read(Focus(), TIMEOUT_S).facts

    def fails() -> bool:
        try:
            facts()
        except SourceError:
            return True
        return False

    assert facts().rows[0].hits == 40
    server.answers["/metrics"] = answer("", status="500 No")
    until(fails)
    with pytest.raises(SourceError, match="it answers 500; asked again in"):
        facts()
    server.answers["/metrics"] = page(hits=5, queries=10)
    until(lambda: not fails())
    assert (facts().restarts, facts().rows[0].hits, facts().rows[0].queries) == (1, 45, 110)
    assert any("started anew" in note for note in facts().notes)
    source.close()


def test_a_stream_that_the_server_tells_of_is_followed(server: ScriptedHttp) -> None:
    context = zmq.Context()
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    port, replay = (s.bind_to_random_port("tcp://127.0.0.1") for s in (pub, router))
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"}
    told = {"0": config | {"replay_endpoint": f"tcp://*:{replay}"}}
    server.answers["/kv_event_sources"] = answer(json.dumps(told))
    source = RemoteSource(server.url, every_s=0.01)
    assert source.read(Focus(), TIMEOUT_S).facts.rows[0].usage_ratio == 0.25
    assert pub.poll(10_000)
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
    }
    pub.send_multipart([b"kv", bytes(8), msgspec.msgpack.encode([1.0, [event], 0])])

    def events() -> EventFacts | None:
        return source.read(Focus(), TIMEOUT_S).facts.events

    until(lambda: (e := events()) is not None and e.batches == 1)
    found = events()
    assert found is not None
    assert (found.state, found.distinct) == ("complete", 2)
    reasons = {c.name: c.reason for c in source.read(Focus(), TIMEOUT_S).facts.capabilities}
    assert reasons["resident prefixes"] is None
    source.close()
    context.destroy(linger=0)


ROWS = tuple(
    EngineRow(
        "big",
        str(rank),
        usage_ratio=usage,
        total_blocks=100,
        block_size=16,
        running=running,
        hits=hits,
        queries=queries,
        hit_unit="tokens",
    )
    for rank, (usage, running, hits, queries) in enumerate(((0.5, 2, 10, 40), (0.7, 1, 20, 20)))
)
EVENTS = EventFacts(
    "joined late: partial",
    resident=(("GPU", 0, 7), ("CPU", 0, 2)),
    distinct=8,
    prefixes=(PrefixLine(0xABC, 3, 5, 2, 4, 12.0, 0, 0, "GPU"),),
    batches=9,
    stored=11,
    removed=2,
    gaps=1,
)


def export(facts: RemoteFacts) -> str:
    attachment = Attachment(ScriptedSource([RemoteObservation(facts)], name="h:1"), ReadOnly("a test"))
    view = attachment.poll()
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view))
    registry.register(RemoteCollector(lambda: [view]))
    return generate_latest(registry).decode()


def exported(facts: RemoteFacts) -> dict[str, float]:
    lines = [line for line in export(facts).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_is_known_is_exported_and_what_is_not_is_left_out() -> None:
    found = exported(RemoteFacts("vLLM", "0.33.0", "http://h:1", ROWS, events=EVENTS))
    assert found['kvtop_cache_usage_ratio{source="h:1",tier="device"}'] == pytest.approx(0.6)
    assert found['kvtop_pool_blocks{source="h:1",tier="device"}'] == 200
    assert found['kvtop_sequences{source="h:1",status="running"}'] == 3
    assert found['kvtop_prefix_cache_hit_tokens_total{source="h:1"}'] == 30
    assert found['kvtop_engine_cache_usage_ratio{engine="1",model="big",source="h:1",target=""}'] == 0.7
    assert found['kvtop_engine_info{engine_kind="vLLM",source="h:1",version="0.33.0"}'] == 1
    assert found['kvtop_resident_blocks{medium="CPU",rank="0",source="h:1"}'] == 2
    assert found['kvtop_events_complete{source="h:1"}'] == 0
    assert found['kvtop_source_up{source="h:1"}'] == 1
    for name in ("waiting", "preemptions", "hit_blocks", "host", "fragmentation", "evictions"):
        assert not any(name in series for series in found), name


def test_an_exporter_of_an_exporter_says_the_same() -> None:
    page = parse(export(RemoteFacts("vLLM", None, "http://h:1", (replace(ROWS[0], preemptions=4.0),))))
    dialect = recognise(page)
    assert dialect is not None
    (row,) = dialect.read(page).rows
    assert (dialect.kind, row.model, row.usage_ratio, row.total_blocks) == ("kvtop", "h:1", 0.5, 100)
    assert (row.hits, row.queries, row.hit_unit, row.preemptions) == (10, 40, "tokens", 4.0)


def test_an_unknown_use_is_no_series() -> None:
    found = exported(RemoteFacts("llama.cpp", None, "http://h:1", (EngineRow(running=0),)))
    assert not any("usage" in series or "resident" in series for series in found)
    assert found['kvtop_sequences{source="h:1",status="running"}'] == 0


def test_the_headless_watch_serves_through_loss_and_return(
    server: ScriptedHttp, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen: list[str] = []
    server.answers["/metrics"] = answer("<html>")

    def stop() -> Ending | None:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        source_up = next(line for line in text.splitlines() if line.startswith("kvtop_source_up{"))
        seen.append(source_up[-3:])
        server.answers["/metrics"] = page()
        return Ending.TERMINATED if source_up.endswith("1.0") else None

    assert run_exporting([server.url], AttachOptions(), address=MetricsAddress("127.0.0.1", port), stop=stop) == 0
    assert (seen[0], seen[-1]) == ("0.0", "1.0")
    said = capsys.readouterr().err
    assert "HTML page" in said
    assert "the engine answers" in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://h:1", "--headless"], "--headless and --metrics-port N: only together"),
        (["http://h:1", "--metrics-port", "0"], "--headless and --metrics-port N: only together"),
        (["http://u:p@h:1", "--headless", "--metrics-port", "0"], "no user in an address"),
        (["http://h:1", "--headless", "--metrics-port", "0", "--token-file", "/nowhere"], "--token-file /nowhere"),
        (["http://h:1", "--headless", "--metrics-port", "0", "--events", "x"], "--events x"),
        (["http://h:1", "--headless", "--metrics-port", "0", "--allow-operations"], "--allow-operations"),
        (["local:a", "--headless", "--metrics-port", "0", "--insecure"], "are for http(s)://HOST:PORT"),
    ],
)
def test_wrong_requests(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attach", *args]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
