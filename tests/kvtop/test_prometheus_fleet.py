"""A whole fleet from a Prometheus-compatible server: its answers and refusals, and a real one with many engines."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import until
from many_engines import ManyEngines, scrape_config
from real_servers import free_port, get, prometheus
from scripted_http import ScriptedHttp, answer

from kvtop.attachment import Attachment
from kvtop.cli import run
from kvtop.driving import Ending
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import SourceError, UserError
from kvtop.exporter import start_exporter
from kvtop.exporting import run_exporting
from kvtop.metrics_address import MetricsAddress
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.reduce import reduce
from kvtop.model.remote import FLEET, EngineRow, PastRows, RemoteFacts
from kvtop.model.view import View
from kvtop.operations import ReadOnly
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource
from kvtop.sources.remote import fleet_queries
from kvtop.sources.remote.dialects import recognise
from kvtop.sources.remote.exposition import Exposition, parse
from kvtop.sources.remote.fetch import FetchError
from kvtop.sources.remote.prometheus import FORGET_S, PrometheusFleet
from kvtop.targets import AttachOptions, open_target

TIMEOUT_S = 20.0
VALUES, AGES = (
    fleet_queries.instant_path(fleet_queries.values_query()),
    fleet_queries.instant_path(fleet_queries.ages_query()),
)
DOWN = fleet_queries.instant_path(fleet_queries.DOWN_QUERY)
NOW_S = 1_000.0
SAMPLES = Path(__file__).parents[3] / "shared" / "reference" / "metrics_samples"
PAGES = [*(Path(__file__).parents[1] / "data" / "remote").glob("*.prom"), *SAMPLES.glob("*.prom")]


def vector(*series: tuple[Mapping[str, str], float], at_s: float = NOW_S, **more: Any) -> bytes:
    result = [{"metric": dict(labels), "value": [at_s, str(value)]} for labels, value in series]
    return answer(json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, **more}))


def vllm(instance: str, usage: float, *, job: str = "llm", **more: str) -> list[tuple[dict[str, str], float]]:
    labels = {"instance": instance, "job": job, "model_name": "m", "engine": "0", **more}
    return [
        ({"__name__": "vllm:kv_cache_usage_perc", **labels}, usage),
        ({"__name__": "vllm:prefix_cache_queries_total", **labels}, 100.0),
        ({"__name__": "vllm:prefix_cache_hits_total", **labels}, 40.0),
    ]


def beat(instance: str, ago_s: float, job: str = "llm") -> tuple[dict[str, str], float]:
    return {"instance": instance, "job": job, "model_name": "m", "engine": "0"}, NOW_S - ago_s


@contextlib.contextmanager
def served(answers: Mapping[str, Any], prefix: str = ""):
    server = ScriptedHttp({prefix + path: reply for path, reply in answers.items()})
    fleet = PrometheusFleet(server.url + prefix)
    try:
        yield server, fleet
    finally:
        fleet.close()
        server.close()


def three(values: bytes, ages: bytes | None = None, down: bytes | None = None) -> dict[str, bytes]:
    return {VALUES: values, AGES: ages or vector(), DOWN: down or vector()}


# Queries ------------------------------------------------------------------------------------------------------------


class Noting(Exposition):
    """A page that notes the names it is asked for."""

    asked: set[str]

    def has(self, name: str) -> bool:
        self.asked.add(name)
        return super().has(name)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_name_that_a_dialect_reads_of_a_sample_is_asked_for(path: Path) -> None:
    page = Noting(parse(path.read_text())._series)
    page.asked = set()
    dialect = recognise(page)
    assert dialect is not None
    page.asked = set()
    dialect.read(page)
    assert page.asked <= fleet_queries.names()
    assert page.has(dialect.beat) or path.stem == "vllm_v1_offload"  # an excerpt


def test_the_queries_are_short_enough_for_any_proxy() -> None:
    assert max(map(len, (VALUES, AGES, DOWN))) < 4000


def test_labels_of_a_query_are_quoted() -> None:
    query = fleet_queries.past_query({"job": 'a"b\\c', "instance": "i:1"})
    assert query.endswith(',job="a\\"b\\\\c",instance="i:1"}')


# A table ------------------------------------------------------------------------------------------------------------


def test_a_row_for_each_engine_with_its_age() -> None:
    values = vector(*vllm("a:8000", 0.5), *vllm("b:8000", 0.25), ({"__name__": "tgi_queue_size", "instance": "c"}, 3))
    with served(three(values, vector(beat("a:8000", 7.0)))) as (server, fleet):
        facts = fleet.ask()
        assert facts.kind == FLEET
        assert [(r.target, r.kind, r.usage_ratio, r.hit_ratio, r.age_s, r.waiting) for r in facts.rows] == [
            ("a:8000", "vLLM", 0.5, 0.4, 7.0, None),
            ("b:8000", "vLLM", 0.25, 0.4, None, None),
            ("c", "TGI", None, None, None, 3),
        ]
        assert (fleet.queries, facts.notes) == (3, ())
        assert len(server.paths()) == 3


def test_ranks_and_models_of_one_target_are_rows_of_it() -> None:
    values = vector(*vllm("a", 0.5), *vllm("a", 0.7, engine="1"))
    with served(three(values)) as (_, fleet):
        assert [(r.target, r.engine) for r in fleet.ask().rows] == [("a", "0"), ("a", "1")]


def test_the_same_instance_in_two_jobs_and_clusters_is_told_apart() -> None:
    values = vector(*vllm("a", 0.1), *vllm("a", 0.2, job="x"), *vllm("a", 0.3, job="x", cluster="eu"))
    with served(three(values)) as (_, fleet):
        assert {r.target: r.usage_ratio for r in fleet.ask().rows} == {"llm/a": 0.1, "x/a": 0.2, "eu/x/a": 0.3}


def test_the_lost_are_rows_that_say_so_until_they_are_forgotten() -> None:
    both = vector(*vllm("a", 0.5), *vllm("b", 0.5))
    down = vector(({"instance": "b", "job": "llm"}, 0.0), ({"instance": "disk", "job": "node"}, 0.0))
    with served(three(both)) as (server, fleet):
        fleet.ask()
        server.answers[VALUES], server.answers[DOWN] = vector(*vllm("a", 0.5)), down
        rows = fleet.ask().rows
        assert [(r.target, r.is_up, r.usage_ratio) for r in rows] == [("a", True, 0.5), ("b", False, None)]
        assert rows[1].trouble == "Prometheus cannot scrape it (up is 0)"
        server.answers[DOWN] = vector()
        assert fleet.ask().rows[1].trouble == "Prometheus has no samples of it any more"
        server.answers[VALUES] = vector(*vllm("a", 0.5), at_s=NOW_S + FORGET_S + 1)
        assert [r.target for r in fleet.ask().rows] == ["a"]
        server.answers[VALUES] = both
        assert [r.is_up for r in fleet.ask().rows] == [True, True]


def test_counters_that_fall_go_on() -> None:
    with served(three(vector(*vllm("a", 0.5)))) as (server, fleet):
        fleet.ask()
        lower = [(labels, value / 10 if value > 1 else value) for labels, value in vllm("a", 0.5)]
        server.answers[VALUES] = vector(*lower)
        assert fleet.ask().rows[0].queries == 110.0


def test_below_a_path_with_a_token_that_is_renewed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    replies = iter([answer("", status="401 Unauthorized"), vector(*vllm("a", 0.5))])

    def guarded(connection: Any, over: Any) -> None:
        token.write_text("new\n")
        connection.sendall(next(replies))

    server = ScriptedHttp({"/prometheus" + path: reply for path, reply in (three(b"") | {VALUES: guarded}).items()})
    fleet = PrometheusFleet(f"{server.url}/prometheus/", token_file=str(token))
    assert len(fleet.ask().rows) == 1
    assert [line for r in server.requests for line in r.splitlines() if "Bearer" in line][:2] == [
        "Authorization: Bearer old",
        "Authorization: Bearer new",
    ]
    fleet.close()
    server.close()


# What goes wrong ----------------------------------------------------------------------------------------------------

REFUSED = {"status": "error", "errorType": "bad_data", "error": "too many series\x1b[31m"}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer(json.dumps(REFUSED), status="422 Unprocessable Entity"), "the query failed (422): too many series"),
        (answer("upstream timed out", status="503 Service Unavailable"), "it answers 503: upstream timed out"),
        (answer("<html>", status="502 Bad Gateway"), "it answers 502"),
        (answer("", status="404 Not Found"), "/select/0/prometheus with a VictoriaMetrics cluster"),
        (answer("", status="401 Unauthorized"), "--token-file FILE gives one"),
        (answer("", status="302 Found", headers="Location: /login\r\n"), "it redirects to /login"),
        (answer("<html>Grafana"), "an HTML page, not the Prometheus API"),
        (answer('{"status": "ok"}'), "not the Prometheus API"),
        (answer("vllm:kv_cache_usage_perc 0.5\n"), "an engine's own address is http://HOST:PORT"),
        (answer('{"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}}'), "without series"),
        (answer('{"status": "success", "data": []}'), "without series"),
        (
            answer('{"status": "success", "data": {"resultType": "vector", "result": [{"metric": 3}]}}'),
            "series that cannot be read",
        ),
        (vector(), "no metric of an inference engine that kvtop knows"),
        (vector(({"__name__": "vllm:num_requests_swapped", "instance": "a"}, 1.0)), "no metric of an inference"),
    ],
)
def test_what_is_no_answer_is_told_in_words(reply: bytes, words: str) -> None:
    with served(three(reply)) as (_, fleet), pytest.raises(FetchError) as caught:
        fleet.ask()
    assert words in str(caught.value)


def test_what_can_be_done_without_is_a_note() -> None:
    answers = three(
        vector(*vllm("a", 0.5), warnings=["store x did not answer"], isPartial=True),
        answer(json.dumps(REFUSED), status="400 Bad Request"),
        answer("", status="500 Internal Server Error"),
    )
    with served(answers) as (_, fleet):
        facts = fleet.ask()
    assert facts.rows[0].age_s is None
    assert facts.notes[:2] == ("the answer is partial: some stores did not answer", "store x did not answer")
    assert [note.split(":")[0] for note in facts.notes[2:]] == ["ages are unknown", "lost targets are unknown"]


def test_numbers_that_are_none_are_unknown() -> None:
    labels = {"instance": "a", "job": "j", "model_name": "m"}
    values = vector(
        ({"__name__": "vllm:kv_cache_usage_perc", **labels}, float("nan")),
        ({"__name__": "vllm:num_requests_running", **labels}, float("inf")),
    )
    with served(three(values)) as (_, fleet):
        (row,) = fleet.ask().rows
    assert (row.usage_ratio, row.running) == (None, None)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("prometheus+ftp://a:1", "an address is http(s)://HOST:PORT"),
        ("prometheus+http://a:1/?x=1", "nothing may follow a ?"),
        ("prometheus+http://a:0", "the port is from 1"),
    ],
)
def test_what_the_address_may_be(target: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_target(target)
    assert words in str(caught.value)


@pytest.mark.parametrize("option", [["--events", "tcp://a:1"], ["--allow-operations"]])
def test_options_of_other_targets_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attach", "prometheus+http://a:1", *option, "--headless", "--metrics-port", "0"]) == 2
    assert option[0] in capsys.readouterr().err


# One in full --------------------------------------------------------------------------------------------------------


def past_of(instance: str) -> Callable[[Any, Any], None]:
    """Answer a range query: usage 0.1, 0.2, …; the counters begin anew half-way."""
    metric = {"instance": instance, "job": "llm", "model_name": "m", "engine": "0"}
    times = [NOW_S - 60 + 15 * i for i in range(4)]
    usage = [[t, str(0.1 * (i + 1))] for i, t in enumerate(times)]
    queries = [[t, str(v)] for t, v in zip(times, (500, 600, 20, 60), strict=True)]
    result = [
        {"metric": {"__name__": "vllm:kv_cache_usage_perc", **metric}, "values": usage},
        {"metric": {"__name__": "vllm:prefix_cache_queries_total", **metric}, "values": queries},
    ]
    reply = answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    return lambda connection, over: connection.sendall(reply)


class Ranged(dict[str, Any]):
    """Answers where any range query gets the same reply."""

    def get(self, path: str, otherwise: Any = None) -> Any:
        return past_of("a") if path.startswith("/api/v1/query_range") else super().get(path, otherwise)


def test_an_opened_engine_has_its_past() -> None:
    with served(three(vector(*vllm("a", 0.5), *vllm("b", 0.9)), vector(beat("a", 3.0)))) as (server, fleet):
        attachment = Attachment(fleet, ReadOnly("a test"))
        assert attachment.poll(TIMEOUT_S).remote is not None
        server.answers = Ranged(server.answers)
        fleet.open("a")
        assert fleet.opened == "a"

        def with_past() -> RemoteFacts | None:
            facts = attachment.poll(TIMEOUT_S).remote
            return facts if facts is not None and facts.past else None

        until(lambda: with_past() is not None, TIMEOUT_S)
        view = attachment.view
        assert view.remote is not None
        assert (view.remote.kind, view.remote.address, len(view.remote.rows)) == ("vLLM", f"a by {fleet.name}", 1)
        assert view.remote.age_s >= 3.0
        why_not = {c.name: c.reason or "" for c in view.remote.capabilities}
        assert why_not["resident prefixes"].startswith("not in Prom")
        usage = view.history.get("usage")
        assert usage[:4] == pytest.approx((0.1, 0.2, 0.3, 0.4))
        assert usage[-1] == 0.5
        # 600 were asked before the restart, then 60 more, then 40 more until now.
        assert view.history.get("query_blocks")[:4] == (500, 600, 620, 660)
        assert view.remote.rows[0].queries == 700
        times = view.history.get("at_s")
        assert list(times) == sorted(times)  # type: ignore[type-var]
        fleet.open("nobody")
        assert fleet.opened is None
        view = attachment.poll(TIMEOUT_S)
        assert view.remote is not None
        assert view.remote.kind == FLEET


def test_a_past_goes_before_what_was_seen_and_not_beside_it() -> None:
    row = EngineRow("m", usage_ratio=0.5)
    facts = RemoteFacts("vLLM", None, "a by p", (row,))
    view = View("p")
    for at_s in (98.0, 99.0, 100.0):
        view = reduce(view, RemoteObservation(facts), at_s)
    past = tuple(PastRows(float(ago_s), (EngineRow("m", usage_ratio=0.1),)) for ago_s in (6, 4, 2, 1))
    view = reduce(view, RemoteObservation(replace(facts, past=past)), 101.0)
    assert view.history.get("at_s") == (95.0, 97.0, 98.0, 99.0, 100.0, 101.0)
    assert view.history.get("usage") == (0.1, 0.1, 0.5, 0.5, 0.5, 0.5)
    assert len(reduce(view, RemoteObservation(replace(facts, past=past)), 102.0).history.get("at_s")) == 7


def test_an_opened_engine_that_is_lost_says_so() -> None:
    with served(three(vector(*vllm("a", 0.5), *vllm("b", 0.9)))) as (server, fleet):
        assert len(fleet.read(Focus(), TIMEOUT_S).facts.rows) == 2
        server.answers[VALUES] = vector(*vllm("b", 0.9))
        fleet.open("a")

        def is_lost() -> bool:
            try:
                fleet.read(Focus(), TIMEOUT_S)
            except SourceError as error:
                return "no samples of it any more" in str(error)
            return False

        until(is_lost, TIMEOUT_S)


# A real one ---------------------------------------------------------------------------------------------------------

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="not installed: prometheus (Debian)")


@contextlib.contextmanager
def real_target():
    """Serve the metrics of one engine of ours; its exporter's address."""
    engine, _ = build_engine(EngineOptions(num_blocks=256, device="cpu"))
    source = InProcessSource(runner := EngineRunner(engine, speed=4.0), on_close=engine.close)
    attachment = Attachment(source, InProcessOperations(runner))
    source.start()
    exporter = start_exporter(attachment.poll, MetricsAddress("127.0.0.1", 0))
    try:
        yield f"127.0.0.1:{exporter.port}"
    finally:
        exporter.close()
        attachment.close()


@contextlib.contextmanager
def scraped_fleet(folder: Path, count: int, real: list[str]):
    """Run a Prometheus over ``count`` fake engines and the real ones; gives them and its address."""
    engines = ManyEngines(count)
    config = folder / "prometheus.yml"
    config.write_text(scrape_config(engines, real, "1s" if count < 100 else "5s"))
    try:
        with prometheus(folder, config, free_port()) as url:
            yield engines, url
    finally:
        engines.close()


def rows_of(fleet: PrometheusFleet, num: int) -> dict[str, EngineRow]:
    """Wait until that many engines were scraped; return their rows."""
    found: dict[str, EngineRow] = {}

    def has_all() -> bool:
        with contextlib.suppress(FetchError):
            found.update({row.target: row for row in fleet.ask().rows})
        return len([row for row in found.values() if row.trouble is None]) >= num

    until(has_all, TIMEOUT_S)
    return found


@needs_prometheus
@pytest.mark.timeout(120)
def test_thirty_fake_engines_and_a_real_one(tmp_path: Path) -> None:
    with real_target() as real, scraped_fleet(tmp_path, 30, [real]) as (engines, url):
        fleet = PrometheusFleet(url, every_s=0.5, step_s=1.0)
        rows = rows_of(fleet, 31)
        assert len(rows) == 31
        for number in range(30):
            row = rows[f"engine-{number:03}"]
            assert (row.waiting, row.is_up) == (number % 7, True), row
            assert row.age_s is not None
            assert row.age_s < 15
            if row.kind in ("vLLM", "SGLang", "llama.cpp", "TensorRT-LLM"):
                assert row.usage_ratio == pytest.approx(number / 100)
            if row.kind == "vLLM":
                assert (row.total_blocks, row.preemptions, row.hits) == (1000, 2 * number, number)
        ours = rows[real]
        assert (ours.kind, ours.total_blocks, ours.model) == ("kvtop", 256, "embedded")
        assert {row.kind for row in rows.values()} == {"kvtop", "vLLM", "SGLang", "llama.cpp", "TGI", "TensorRT-LLM"}
        assert fleet.queries % 3 == 0

        attachment = Attachment(fleet, ReadOnly("a test"))
        assert attachment.poll(TIMEOUT_S).error is None
        fleet.open("engine-005")

        def has_past() -> bool:
            facts = attachment.poll(TIMEOUT_S).remote
            return facts is not None and facts.kind == "vLLM" and len(facts.past) >= 1

        until(has_past, TIMEOUT_S)
        assert attachment.view.history.get("usage")[0] == pytest.approx(0.05)

        del engines.pages["engine-005"]
        until(lambda: attachment.poll(TIMEOUT_S).error is not None, TIMEOUT_S)
        assert "cannot scrape it" in (attachment.view.error or "")
        attachment.close()


@needs_prometheus
@pytest.mark.timeout(120)
def test_a_reading_of_three_hundred_engines_is_three_queries(tmp_path: Path) -> None:
    with scraped_fleet(tmp_path, 300, []) as (_, url):
        fleet = PrometheusFleet(url)
        assert len(rows_of(fleet, 300)) == 300
        before = fleet.queries
        assert len(fleet.ask().rows) == 300
        assert fleet.queries - before == 3
        fleet.close()


@needs_prometheus
@pytest.mark.timeout(120)
def test_the_whole_fleet_is_exported_beside_the_service(tmp_path: Path) -> None:
    with scraped_fleet(tmp_path, 3, []) as (_, url):
        fleet = PrometheusFleet(url)
        rows_of(fleet, 3)
        before = fleet.queries
        assert len(fleet.ask().rows) == 3
        assert fleet.queries - before == 3  # no fewer than for hundreds
        fleet.close()
        port = free_port()
        seen: list[str] = []

        def stop() -> Ending | None:
            text = get(f"http://127.0.0.1:{port}/metrics")
            if text.count("kvtop_engine_up{") < 3:
                return None
            seen.append(text)
            return Ending.INTERRUPTED

        run_exporting([f"prometheus+{url}"], AttachOptions(), address=MetricsAddress("127.0.0.1", port), stop=stop)
        assert 'target="engine-001"} 0.01' in seen[0]
