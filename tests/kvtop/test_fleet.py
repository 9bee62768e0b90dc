"""Several servers as one source: rows of all, the lost among them, one opened in full; what targets may be."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from scripted_http import ScriptedHttp, answer

from kvtop.attachment import Attachment
from kvtop.cli import run
from kvtop.errors import SourceError
from kvtop.exporter import ViewCollector
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, RemoteFacts
from kvtop.operations import ReadOnly
from kvtop.remote_metrics import RemoteCollector
from kvtop.sources.remote.fleet import Fleet
from kvtop.sources.scripted import ScriptedSource
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
        (["http://a:1", "local:b"], "local:b: of several targets each is http(s)://HOST:PORT"),
        (["http://a:1", "http://a:1"], "named twice"),
        (["http://a:1", "http://a:1/"], "the same server"),
        (["http://a:1", "http://b:0"], "the port is from 1"),
        (["http://a:1", "http://b:1", "--events", "tcp://a:1"], "with one target only"),
        (["http://a:1", "http://b:1", "--allow-operations"], "with one target only"),
    ],
)
def test_what_several_targets_may_be(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attach", *args, "--headless", "--metrics-port", "0"]) == 2
    assert words in capsys.readouterr().err
