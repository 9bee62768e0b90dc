"""An engine's server over HTTP: recognised, polled one at a time, and whatever is no engine told in clear words."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted_http import ScriptedHttp, answer

from kvtop.errors import SourceError, UserError
from kvtop.model.remote import EngineRow, RemoteFacts
from kvtop.sources.remote.fetch import Fetcher, FetchError, Remote
from kvtop.sources.remote.polling import MAX_PAUSE_S, Poller
from kvtop.sources.remote.probe import EventEndpoint, Probe

VLLM = (Path(__file__).parents[1] / "data" / "remote" / "vllm_two_models.prom").read_text()
LLAMA = "llamacpp:requests_processing 1\nllamacpp:prompt_tokens_total 10\n"

Serve = Callable[..., ScriptedHttp]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ScriptedHttp] = []

    def make(**answers: object) -> ScriptedHttp:
        servers.append(ScriptedHttp({f"/{path.replace('__', '/')}": a for path, a in answers.items()}))  # type: ignore[misc]
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def probe(server: ScriptedHttp, **settings: object) -> tuple[Probe, Fetcher]:
    fetcher = Fetcher(Remote(server.url), **settings)  # type: ignore[arg-type]
    return Probe(fetcher, server.url), fetcher


def read(server: ScriptedHttp, **settings: object) -> RemoteFacts:
    found, fetcher = probe(server, **settings)
    try:
        return found.read()
    finally:
        fetcher.close()


def refusal(server: ScriptedHttp, **settings: object) -> str:
    with pytest.raises(FetchError) as caught:
        read(server, **settings)
    return str(caught.value)


def reasons(facts: RemoteFacts) -> dict[str, str | None]:
    return {capability.name: capability.reason for capability in facts.capabilities}


def test_a_server_of_vllm(serve: Serve) -> None:
    server = serve(
        metrics=answer(VLLM),
        version=answer('{"version": "0.33.0"}'),
        kv_event_sources=answer(
            json.dumps(
                {
                    "0": {
                        "enable_kv_cache_events": True,
                        "publisher": "zmq",
                        "endpoint": "tcp://*:5557",
                        "replay_endpoint": "tcp://*:5560",
                        "topic": "kv-events",
                    },
                    "1": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://10.0.0.1:1"},
                    "x": 3,
                }
            )
        ),
    )
    found, fetcher = probe(server)
    facts = found.read()
    assert (facts.kind, facts.version, len(facts.rows)) == ("vLLM", "0.33.0", 3)
    assert found.endpoints == (EventEndpoint(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5560", "kv-events"),)
    table = reasons(facts)
    assert table["use of the cache"] is None
    assert table["host tier"] == "needs offloading, --kv-offloading-size"
    assert table["compact"] == "not offered by this engine"
    assert "connects instead of binding" in (table["resident prefixes"] or "")
    assert "plugin" in (table["physical block map"] or "")
    # What does not change is asked once; metrics are asked where they were found.
    asked = len(server.paths())
    found.read()
    assert server.paths()[asked:] == ["/metrics"]
    assert "text/plain; version=0.0.4" in server.requests[0]
    fetcher.close()


def test_the_page_that_is_not_emptied_by_reading_is_asked_first(serve: Serve) -> None:
    server = serve(
        prometheus__metrics=answer("trtllm_kv_cache_utilization 0.5\n"), metrics=answer('[{"gpuMemUsage": 1}]')
    )
    assert read(server).kind == "TensorRT-LLM"
    assert "/metrics" not in server.paths()


def test_slots_tell_what_newer_llama_cpp_metrics_do_not(serve: Serve) -> None:
    slots = [{"id": 0, "n_ctx": 100, "n_prompt_tokens": 60}, {"id": 1, "n_ctx": 100}]
    facts = read(serve(metrics=answer(LLAMA), slots=answer(json.dumps(slots))))
    assert (facts.rows[0].usage_ratio, facts.rows[0].total_tokens, facts.rows[0].used_tokens) == (0.3, 200, 60)
    for hostile in ("[]", "{}", "[1]", '[{"n_ctx": "many"}]', "[" * 100_000):
        row = read(serve(metrics=answer(LLAMA), slots=answer(hostile))).rows[0]
        assert (row.usage_ratio, row.used_tokens) == (None, None), hostile[:20]
    facts = read(serve(metrics=answer(LLAMA)))
    assert facts.rows[0].usage_ratio is None
    assert reasons(facts)["use of the cache"] is not None
    assert any("/slots" in note for note in facts.notes)


def endless(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"a 1\n" * 4096)


def dribbling_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b"a")


def dribbling_headers(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-A: ")
    while not over.wait(0.02):
        connection.sendall(b"a")


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait(10)


def garbage(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\x00\xff" * 20)


def breaking_off(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:")


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (endless, "goes on past"),
        (dribbling_body, "no whole answer within"),
        (dribbling_headers, "no whole answer within"),
        (silent, "no whole answer within"),
        (garbage, "does not speak HTTP"),
        (breaking_off, "broke off"),
        (answer("<html><body>Grafana</body></html>", headers="Content-Type: text/html\r\n"), "HTML page"),
        (answer('{"error": "x"}', headers="Content-Type: application/json\r\n"), "JSON, not metrics"),
        (answer(""), "an empty page"),
        (answer("who are you\n"), "not Prometheus text"),
        (answer(b"\xff\xfe\x00" * 100), "not Prometheus text"),
        (answer("node_load1 0.3\n"), "no inference engine that kvtop knows (such as node_load1)"),
        (answer("", status="302 Found", headers="Location: http://elsewhere/\r\n"), "redirects to http://elsewhere/"),
        (answer("", status="401 Unauthorized"), "--token-file"),
        (answer("", status="503 Busy"), "it answers 503"),
        (answer("", status="501 Not Implemented"), "llama.cpp needs --metrics"),
        (answer(gzip.compress(VLLM.encode(), mtime=0), headers="Content-Encoding: gzip\r\n"), "compressed"),
    ],
)
def test_what_is_no_engine_is_told_in_words(serve: Serve, behaviour: object, words: str) -> None:
    server = serve(metrics=behaviour)
    text = refusal(server, answer_s=0.4, max_body=1 << 20)
    assert words in text
    assert "\n" not in text


def test_nothing_listens_there(serve: Serve) -> None:
    server = serve()
    server.close()
    assert "nothing listens there" in refusal(server)


def test_a_redirect_is_never_followed(serve: Serve) -> None:
    other = serve(metrics=answer(VLLM))
    server = serve(metrics=answer("", status="307 Away", headers=f"Location: {other.url}/metrics\r\n"))
    assert "attach to that address instead" in refusal(server)
    assert other.requests == []


def test_an_engine_that_becomes_another_service(serve: Serve) -> None:
    server = serve(metrics=answer(VLLM))
    found, fetcher = probe(server)
    assert found.read().kind == "vLLM"
    server.answers["/metrics"] = answer("up 1\n")
    with pytest.raises(FetchError, match="no inference engine"):
        found.read()
    server.answers["/metrics"] = answer(LLAMA)
    assert found.read().kind == "llama.cpp"
    fetcher.close()


def test_a_token_is_sent_and_read_anew(serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\nrest\n")
    server = serve(metrics=answer("", status="401 Unauthorized"))
    fetcher = Fetcher(Remote(server.url, token_file=str(token)))
    found = Probe(fetcher, server.url, "/metrics")
    with pytest.raises(FetchError, match="bearer token"):
        found.read()
    assert len(server.requests) == 1
    token.write_text("second\n")
    with pytest.raises(FetchError, match="bearer token"):
        found.read()
    sent = [line for request in server.requests for line in request.split("\r\n") if line.startswith("Auth")]
    assert sent == ["Authorization: Bearer first", "Authorization: Bearer first", "Authorization: Bearer second"]
    fetcher.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_certificates(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    made = [*command.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ScriptedHttp({"/metrics": answer(VLLM)}, tls=context)

    def words(remote: Remote) -> str:
        fetcher = Fetcher(remote)
        try:
            return Probe(fetcher, remote.url, "/metrics").read().kind
        except FetchError as error:
            return str(error)
        finally:
            fetcher.close()

    assert "certificate is not trusted; --ca-file FILE or --insecure" in words(Remote(server.url))
    assert words(Remote(server.url, ca_file=str(certificate))) == "vLLM"
    assert words(Remote(server.url, insecure=True)) == "vLLM"
    assert words(Remote(server.url.replace("https:", "http:"))) != "vLLM"
    server.close()


@pytest.mark.parametrize("content", [None, "", "\n", "zwei Wörter\n", "a\x07b\n"])
def test_a_token_file_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="--token-file"):
        Fetcher(Remote("http://127.0.0.1:1", token_file=str(path)))


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--ca-file"):
        Fetcher(Remote("https://127.0.0.1:1", ca_file=str(tmp_path / "none.pem")))


FACTS = RemoteFacts("vLLM", None, "http://x", (EngineRow(usage_ratio=0.5),))


class Asked:
    """Answers with the results of a list, in turn."""

    def __init__(self, *results: RemoteFacts | Exception) -> None:
        self.results = list(results)

    def __call__(self) -> RemoteFacts:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_failures_slow_the_polling_down_and_success_brings_it_back() -> None:
    now = [100.0]
    failures = [FetchError("gone")] * 8
    poller = Poller(Asked(FACTS, *failures, FACTS, FetchError("gone again")), every_s=1.0, clock=lambda: now[0])
    assert poller.turn() == 1.0
    now[0] = 103.0
    assert poller.newest(0).age_s == 3.0
    assert [poller.turn() for _ in failures] == [2.0, 4.0, 8.0, 16.0, *[MAX_PAUSE_S] * 4]
    with pytest.raises(SourceError, match="gone; asked again in 30 s"):
        poller.newest(0)
    assert poller.turn() == 1.0
    assert poller.newest(0).rows == FACTS.rows
    assert poller.turn() == 2.0


def test_a_reason_in_a_servers_words_is_one_printable_line() -> None:
    poller = Poller(Asked(FetchError("it says \x1b[2J\nboo")))
    poller.turn()
    with pytest.raises(SourceError) as caught:
        poller.newest(0)
    assert str(caught.value).isprintable()


def test_an_internal_fault_is_told_and_ends_nothing() -> None:
    poller = Poller(Asked(ZeroDivisionError("x"), FACTS))
    assert poller.turn() == MAX_PAUSE_S
    with pytest.raises(SourceError, match="internal fault: ZeroDivisionError"):
        poller.newest(0)
    poller.turn()
    assert poller.newest(0).kind == "vLLM"


def test_the_thread_asks_one_at_a_time_and_ends_when_closed(serve: Serve) -> None:
    server = serve(metrics=answer(VLLM))
    found, fetcher = probe(server)
    inside = threading.Lock()

    def ask() -> RemoteFacts:
        assert inside.acquire(blocking=False), "two readings at once"
        try:
            return found.read()
        finally:
            inside.release()

    poller = Poller(ask, release=fetcher.close, every_s=0.001)
    with pytest.raises(SourceError, match="no answer yet"):
        poller.newest(0)
    poller.start()
    assert poller.newest(20).kind == "vLLM"
    over = threading.Event()
    while len(server.requests) < 20:
        over.wait(0.005)
    poller.close()
    with pytest.raises(SourceError, match="closed"):
        poller.newest(0)
    poller.close()
