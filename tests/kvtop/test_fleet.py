"""Several servers as one source: rows of all, the lost among them, one opened in full; what targets may be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from published import ThreadedDaemon, own_directories
from scripted_http import ScriptedHttp, answer
from view_samples import make_snapshot

from allocator.events import Event
from allocator.ids import BlockState
from allocator.snapshot import Counters
from kvtop.attachment import Attachment
from kvtop.cli import run
from kvtop.errors import SourceError, UserError
from kvtop.exporter import ViewCollector
from kvtop.model.observation import Focus, Observation, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, RemoteFacts
from kvtop.operations import ReadOnly
from kvtop.remote_metrics import RemoteCollector
from kvtop.sources.member import AGAIN_S, ONE_OF_SEVERAL, LocalMember
from kvtop.sources.remote.fleet import Fleet
from kvtop.sources.scripted import ScriptedSource, block_arrays
from kvtop.targets import AttachOptions, open_targets

TIMEOUT_S = 20.0


def one(name: str, *usages: float) -> ScriptedSource:
    rows = tuple(EngineRow("m", str(i), usage_ratio=u, total_blocks=10, running=1) for i, u in enumerate(usages))
    return ScriptedSource([RemoteObservation(RemoteFacts("vLLM", "1", f"http://{name}", rows, age_s=2.0))], name=name)


def test_rows_of_all_and_the_lost_among_them() -> None:
    a, b = one("a", 0.5), one("b", 0.1, 0.9)
    b.failure = "nothing listens there"
    fleet = Fleet([a, b])  # type: ignore[list-item]
    facts = fleet.read(Focus(), TIMEOUT_S).facts
    assert (fleet.name, facts.kind) == ("2 servers", FLEET)
    assert [(r.target, r.usage_ratio, r.age_s, r.is_up) for r in facts.rows] == [
        ("a", 0.5, 2.0, True),
        ("b", None, None, False),
    ]
    assert facts.rows[1].trouble == "nothing listens there"
    b.failure = None
    assert [(r.target, r.engine) for r in fleet.read(Focus(), 0).facts.rows] == [("a", "0"), ("b", "0"), ("b", "1")]
    fleet.close()
    assert (a.closed, b.closed) == (True, True)


def test_one_is_opened_in_full() -> None:
    a, b = one("a", 0.5), one("b", 0.1, 0.9)
    fleet = Fleet([a, b])  # type: ignore[list-item]
    attachment = Attachment(fleet, ReadOnly("a test"))
    assert attachment.poll().history.get("usage") == (pytest.approx(0.5),)
    fleet.open("b")
    view = attachment.poll()
    assert view.remote is not None
    assert (view.remote.kind, len(view.remote.rows), fleet.opened) == ("vLLM", 2, "b")
    assert len(view.history.get("usage")) == 1  # a history of its own
    b.failure = "gone"
    with pytest.raises(SourceError, match="gone"):
        fleet.read(Focus(), 0)
    for nobody in ("c", None):
        fleet.open(nobody)
        assert fleet.opened is None
        assert fleet.read(Focus(), 0).facts.kind == FLEET


def test_series_of_a_fleet_do_not_collide() -> None:
    a, b = one("a", 0.5), one("b", 0.1, 0.9)
    attachment = Attachment(Fleet([a, b]), ReadOnly("a test"))  # type: ignore[list-item]
    view = attachment.poll()
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view))
    registry.register(RemoteCollector(lambda: [view]))
    lines = generate_latest(registry).decode().splitlines()
    names = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert 'kvtop_engine_cache_usage_ratio{engine="1",model="m",source="2 servers",target="b"} 0.9' in lines
    assert 'kvtop_engine_up{engine="0",model="m",source="2 servers",target="a"} 1.0' in lines


def test_servers_of_several_kinds_over_http() -> None:
    vllm = ScriptedHttp({"/metrics": answer("vllm:kv_cache_usage_perc 0.5\n")})
    sglang = ScriptedHttp({"/metrics": answer("sglang:token_usage 0.25\n")})
    other = ScriptedHttp({"/metrics": answer("<html>")})
    attachment = open_targets([s.url for s in (vllm, sglang, other)], AttachOptions())
    view = attachment.poll(TIMEOUT_S)
    assert view.remote is not None
    found = {row.kind: row.usage_ratio for row in view.remote.rows}
    assert found == {"vLLM": 0.5, "SGLang": 0.25, "": None}
    assert "HTML page" in (view.remote.rows[2].trouble or "")
    attachment.close()
    for server in (vllm, sglang, other):
        server.close()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://a:1", "prometheus+http://b:1"], "of several targets each is local:NAME or http(s)://HOST:PORT"),
        (["local", "local:b"], "local: of several targets each is local:NAME"),
        (["local:a", "local:b/c"], "b/c"),
        (["local:a", "local:a"], "named twice"),
        (["http://a:1", "http://a:1"], "named twice"),
        (["http://a:1", "http://a:1/"], "the same server"),
        (["http://a:1", "http://b:0"], "the port is from 1"),
        (["http://a:1", "http://b:1", "--events", "tcp://a:1"], "with one target only"),
    ],
)
def test_what_several_targets_may_be(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attach", *args, "--headless", "--metrics-port", "0"]) == 2
    assert words in capsys.readouterr().err


# Engines on this machine among servers --------------------------------------------------------------------------------


class Local:
    """A published engine that comes and goes."""

    def __init__(self) -> None:
        self.is_there = True
        self.made: list[ScriptedSource] = []

    def connect(self) -> ScriptedSource:
        if not self.is_there:
            raise SourceError("no engine of that name")
        self.made.append(ScriptedSource([an_observation()], name="local:demo"))
        return self.made[-1]


def an_observation() -> Observation:
    states = [BlockState.ACTIVE] * 3 + [BlockState.CACHED] * 2 + [BlockState.FREE] * 5
    counters = Counters(hit_blocks=6, query_blocks=8, preemptions_swap=2)
    return Observation(make_snapshot(counters=counters), block_arrays(states), None)


def test_several_are_only_looked_at() -> None:
    with pytest.raises(UserError, match="with one target only"):
        open_targets(["http://a:1", "local:b"], AttachOptions(allow_operations=True))


def test_a_local_engine_is_a_row_and_is_opened_in_full() -> None:
    local, server = Local(), one("b", 0.5)
    fleet = Fleet([LocalMember("local:demo", local.connect), server])
    attachment = Attachment(fleet, ReadOnly(ONE_OF_SEVERAL))
    view = attachment.poll(TIMEOUT_S)
    assert view.remote is not None
    row, other = view.remote.rows
    assert (row.target, row.kind, row.usage_ratio, row.used_blocks, row.total_blocks) == (
        "local:demo",
        "kvtop",
        0.3,
        3,
        10,
    )
    assert (row.hit_ratio, row.preemptions, row.hit_unit, other.target) == (0.75, 2, "blocks", "b")
    fleet.open("local:demo")
    view = attachment.poll(TIMEOUT_S)
    assert view.remote is None
    assert view.snapshot is not None
    assert view.device is not None
    assert view.device.numbers.cached == 2
    assert fleet.missing["operations"] == ONE_OF_SEVERAL
    fleet.open(None)
    view = attachment.poll(TIMEOUT_S)
    assert view.remote is not None
    assert (view.snapshot, view.device) == (None, None)
    assert fleet.name == "2 engines"
    attachment.close()
    assert all(source.closed for source in local.made)


def test_the_events_of_one_local_engine_are_not_taken_for_those_of_the_next() -> None:
    first, second = Local(), Local()
    fleet = Fleet([LocalMember("local:a", first.connect), LocalMember("local:b", second.connect)])
    attachment = Attachment(fleet, ReadOnly(ONE_OF_SEVERAL))
    attachment.poll(TIMEOUT_S)
    seen = an_observation()
    told = make_snapshot(events=(Event(50, 7, "note", "something"),))
    first.made[0]._observations = [Observation(told, seen.device, None)]
    fleet.open("local:a")
    attachment.poll(TIMEOUT_S)
    attachment.poll(TIMEOUT_S)
    assert first.made[0].asked[-1].next_event == 51
    fleet.open(None)
    attachment.poll(TIMEOUT_S)
    fleet.open("local:b")
    attachment.poll(TIMEOUT_S)
    assert second.made[0].asked[-1].next_event == 0
    attachment.close()


def test_a_local_engine_that_is_lost_is_waited_for() -> None:
    now_s, local = 0.0, Local()
    member = LocalMember("local:demo", local.connect, clock=lambda: now_s)
    fleet = Fleet([member])
    local.is_there = False
    assert fleet.read(Focus(), 0).facts.rows[0].trouble == "no engine of that name"  # type: ignore[union-attr]
    local.is_there = True
    assert fleet.read(Focus(), 0).facts.rows[0].is_up is False  # type: ignore[union-attr]
    now_s += AGAIN_S
    assert fleet.read(Focus(), 0).facts.rows[0].is_up is True  # type: ignore[union-attr]
    read = len(local.made[0].asked)
    fleet.read(Focus(), 0)
    assert len(local.made[0].asked) == read  # its table row is read once a second
    now_s += 1.0
    local.made[0].failure = "the engine has ended"
    assert fleet.read(Focus(), 0).facts.rows[0].trouble == "the engine has ended"  # type: ignore[union-attr]
    assert local.made[0].closed
    with pytest.raises(SourceError, match="has ended"):
        member.read(Focus(), 0)
    now_s += AGAIN_S
    assert fleet.read(Focus(), 0).facts.rows[0].is_up is True  # type: ignore[union-attr]
    assert len(local.made) == 2


def test_a_real_local_engine_beside_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        own_directories(monkeypatch, Path(directory))
        beside_a_server()


def beside_a_server() -> None:
    server = ScriptedHttp({"/metrics": answer("vllm:kv_cache_usage_perc 0.5\n")})
    daemon = ThreadedDaemon("demo")
    try:
        attachment = open_targets(["local:demo", server.url, "local:none"], AttachOptions())
        view = attachment.poll(TIMEOUT_S)
        assert view.remote is not None
        rows = {row.target: row for row in view.remote.rows}
        assert rows["local:demo"].total_blocks == 64
        assert "none" in (rows["local:none"].trouble or "")
        attachment.source.open("local:demo")  # type: ignore[attr-defined]
        assert attachment.poll(TIMEOUT_S).snapshot is not None
        attachment.close()
    finally:
        daemon.close()
        server.close()
