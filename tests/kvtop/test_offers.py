"""What a server lets one do is found out by looking: questions only, and no question that some server acts on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from scripted_http import ScriptedHttp, answer

from kvtop.sources.remote.capabilities import READ_ONLY, operations_of
from kvtop.sources.remote.fetch import Fetcher, FetchError, Page, Remote
from kvtop.sources.remote.offers import (
    DEVELOPMENT,
    IDLE_ONLY,
    MEMORY_SAVER,
    NO_ANSWER,
    RESET_RUNNING,
    SLEEP_0,
    SLEEP_MODE,
    SLOT_PATH,
    SLOTS,
    ask_sleep_mode,
    find_offers,
    is_before,
    release_of,
)
from kvtop.sources.remote.probe import Probe

DATA = Path(__file__).parents[1] / "data" / "remote"
#: What no server may be sent for the sake of finding out.
DEEDS = (
    "/reset_prefix_cache", "/sleep", "/wake_up", "/pause", "/resume", "/flush_cache", "/pause_generation",
    "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation",
)  # fmt: skip


class Pages:
    """Answers paths from a table; anything else is not there."""

    def __init__(self, pages: Mapping[str, object], posts: Mapping[str, int] | None = None) -> None:
        self.pages = pages
        self.posts = posts or {}
        self.asked: list[str] = []

    def get(self, path: str, *, answer_s: float | None = None) -> Page:
        assert answer_s is not None, "facts would have to wait for it"
        self.asked.append(f"GET {path}")
        found = self.pages.get(path)
        if isinstance(found, FetchError):
            raise found
        return Page(404, "", "") if found is None else Page(200, "application/json", json.dumps(found))

    def post(self, path: str, *, answer_s: float | None = None) -> Page:
        self.asked.append(f"POST {path}")
        return Page(self.posts.get(path, 404), "", "")


STATES = {"/is_sleeping": {"is_sleeping": False}, "/is_paused": {"is_paused": True}}


def sleep_mode(is_on: object) -> dict[str, object]:
    return {"/server_info?config_format=json": {"vllm_config": {"model_config": {"enable_sleep_mode": is_on}}}}


@pytest.mark.parametrize(
    ("version", "pages", "expected"),
    [
        ("0.32.0", STATES, {}),
        (None, STATES, {}),
        ("0.1.dev1+g123", STATES, {}),
        ("0.16.0", STATES, {SLEEP_0: "from vLLM 0.17 on"}),
        (
            "0.32.0",
            {},
            dict.fromkeys(
                ("reset-prefix-cache", RESET_RUNNING, "sleep", SLEEP_0, "wake", "pause-generation"), DEVELOPMENT
            )
            | {"continue-generation": DEVELOPMENT},
        ),
        (
            "0.14.0",  # these releases offer a pause without development mode
            {"/is_paused": {"is_paused": False}},
            dict.fromkeys(("reset-prefix-cache", RESET_RUNNING, "sleep", SLEEP_0, "wake"), DEVELOPMENT),
        ),
        (
            "0.10.2",
            {"/is_sleeping": {"is_sleeping": False}},
            {
                SLEEP_0: "from vLLM 0.17 on",
                RESET_RUNNING: "from vLLM 0.12 on",
                "pause-generation": "from vLLM 0.12 on",
                "continue-generation": "from vLLM 0.12 on",
            },
        ),
    ],
)
def test_vllm(version: str | None, pages: Mapping[str, object], expected: dict[str, str]) -> None:
    asked = Pages(pages)
    offers = find_offers("vLLM", version, asked, may_operate=True)
    assert {name: reason for name, reason in offers.reasons.items() if reason is not None} == expected
    assert {path for path, _ in offers.state_paths.values()} == {path for path in pages if path in STATES}
    assert all(request.startswith("GET ") for request in asked.asked)


@pytest.mark.parametrize(
    ("pages", "is_on"),
    [
        (sleep_mode(True), True),
        (sleep_mode(False), False),
        (sleep_mode("no"), None),
        ({"/server_info?config_format=json": []}, None),
        ({"/server_info?config_format=json": FetchError("no whole answer within 1 s")}, None),
        ({}, None),
    ],
)
def test_sleep_mode(pages: Mapping[str, object], is_on: bool | None) -> None:
    assert ask_sleep_mode(Pages(pages)) is is_on
    offers = find_offers("vLLM", "0.32.0", Pages(STATES), may_operate=True).with_sleep_mode(is_on)
    assert offers.reasons["sleep"] == (SLEEP_MODE if is_on is False else None)
    assert set(offers.state_paths) == {"sleeping", "paused"}
    none = find_offers("vLLM", "0.32.0", Pages({}), may_operate=True).with_sleep_mode(is_on)
    assert none.reasons["sleep"] == DEVELOPMENT


@pytest.mark.parametrize("told", [None, [], {"is_sleeping": "no"}, {"is_paused": False}])
def test_a_state_that_is_told_otherwise_is_no_development_mode(told: object) -> None:
    offers = find_offers("vLLM", "0.32.0", Pages({"/is_sleeping": told}), may_operate=True)
    assert offers.reasons["wake"] == DEVELOPMENT
    assert offers.state_paths == {}


def test_sglang() -> None:
    for told, reason in (({"enable_memory_saver": False}, MEMORY_SAVER), ({"enable_memory_saver": True}, None)):
        offers = find_offers("SGLang", "0.5.23", Pages({"/server_info": told}), may_operate=True)
        assert offers.reasons["release-memory"] == offers.reasons["resume-memory"] == reason
    offers = find_offers("SGLang", None, Pages({}), may_operate=True)
    assert [name for name, reason in offers.reasons.items() if reason] == [RESET_RUNNING]
    assert offers.reasons[RESET_RUNNING] == IDLE_ONLY


NO_ACTION = "POST /slots/0?action=none"


def test_llama_cpp_is_asked_for_an_action_that_is_none_and_only_by_who_may_act() -> None:
    pages = {"/slots": [{"id": 0}]}
    for status, reason in ((400, None), (501, SLOT_PATH)):
        asked = Pages(pages, {"/slots/0?action=none": status})
        offers = find_offers("llama.cpp", None, asked, may_operate=True)
        assert set(offers.reasons.values()) == {reason}
        assert NO_ACTION in asked.asked
    looking = Pages(pages, {"/slots/0?action=none": 501})
    assert set(find_offers("llama.cpp", None, looking, may_operate=False).reasons.values()) == {None}
    assert NO_ACTION not in looking.asked
    assert set(find_offers("llama.cpp", None, Pages({}), may_operate=True).reasons.values()) == {SLOTS}


def test_other_engines_offer_nothing() -> None:
    asked = Pages({})
    assert find_offers("TGI", "3.0", asked, may_operate=True).reasons == {}
    assert asked.asked == []


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.6.6.post1", (0, 6, 6)),
        ("0.33", (0, 33, 0)),
        ("1.0.0rc1", (1, 0, 0)),
        ("0.1.dev1+gabc", None),
        ("", None),
        (None, None),
        ("nonsense", None),
        ("99999999999999999.1", None),
    ],
)
def test_versions(version: str | None, release: tuple[int, int, int] | None) -> None:
    assert release_of(version) == release
    assert not is_before(version, 0, 1)
    assert is_before(version, 0, 32, 1) == (release in ((0, 32, 0), (0, 6, 6)))


def test_the_table_says_what_is_missing_first_and_then_that_it_is_read_only() -> None:
    offers = {"sleep": SLEEP_MODE, "wake": None}
    rows = {row.operations[0]: row.reason for row in operations_of("vLLM", offers, may_operate=False)}
    assert (rows["sleep"], rows["wake"]) == (SLEEP_MODE, READ_ONLY)
    rows = {row.operations[0]: row.reason for row in operations_of("vLLM", offers, may_operate=True)}
    assert (rows["sleep"], rows["wake"]) == (SLEEP_MODE, None)
    (row,) = operations_of("TGI", {}, may_operate=True)
    assert row.reason == "not offered by this engine"


@pytest.fixture
def server() -> Iterator[ScriptedHttp]:
    made = ScriptedHttp({})
    yield made
    made.close()


@pytest.mark.parametrize("may_operate", [False, True])
@pytest.mark.parametrize(
    ("kind", "sample"), [("vLLM", "vllm_two_models.prom"), ("SGLang", None), ("llama.cpp", None), ("TGI", None)]
)
def test_nothing_is_done_for_the_sake_of_finding_out(
    server: ScriptedHttp, kind: str, sample: str | None, may_operate: bool
) -> None:
    texts = {
        "SGLang": "sglang:num_running_reqs 1\nsglang:token_usage 0.5\n",
        "llama.cpp": "llamacpp:requests_processing 1\n",
        "TGI": "tgi_queue_size 1\ntgi_batch_current_size 1\n",
    }
    server.answers["/metrics"] = answer((DATA / sample).read_text() if sample else texts[kind])
    fetcher = Fetcher(Remote(server.url))
    try:
        found = Probe(fetcher, server.url, may_operate=may_operate)
        assert found.read().kind == found.read().kind == kind
    finally:
        fetcher.close()
    asked = {(request.split(" ")[0], request.split(" ")[1].partition("?")[0]) for request in server.requests}
    assert not [path for _, path in asked if path in DEEDS]
    assert {method for method, _ in asked} == {"GET"}


def test_what_is_slow_to_tell_is_asked_for_after_the_first_facts_and_by_who_may_act(server: ScriptedHttp) -> None:
    server.answers["/metrics"] = answer((DATA / "vllm_two_models.prom").read_text())
    server.answers["/is_sleeping"] = answer('{"is_sleeping":false}')
    path = "/server_info?config_format=json"
    for may_operate, expected in ((False, 0), (True, 5)):
        fetcher = Fetcher(Remote(server.url))
        try:
            found = Probe(fetcher, server.url, may_operate=may_operate)
            found.read()
            assert path not in server.paths()
            for _ in range(9):
                found.read()
            assert server.paths().count(path) == expected  # in vain each time, and then given up
        finally:
            fetcher.close()
    server.answers[path] = answer(json.dumps(sleep_mode(False)[path]))
    fetcher = Fetcher(Remote(server.url))
    try:
        found = Probe(fetcher, server.url, may_operate=True)
        assert found.read().refusal("sleep") is None
        assert found.read().refusal("sleep") == SLEEP_MODE
    finally:
        fetcher.close()


def test_what_was_not_answered_in_time_is_not_known_and_asked_again() -> None:
    gone = FetchError("no whole answer within 2 s")
    for kind, path, operation in (
        ("vLLM", "/is_sleeping", "wake"),
        ("vLLM", "/is_paused", "pause-generation"),
        ("llama.cpp", "/slots", "erase-slot"),
    ):
        offers = find_offers(kind, "0.32.0", Pages(STATES | {path: gone}), may_operate=True)
        assert (offers.is_sure, offers.reasons[operation]) == (False, NO_ANSWER)
    assert not find_offers("SGLang", None, Pages({"/server_info": gone}), may_operate=True).is_sure


def test_a_busy_server_is_asked_again_for_what_it_offers(server: ScriptedHttp) -> None:
    def hang(connection: socket.socket, over: threading.Event) -> None:
        over.wait(10)

    server.answers["/metrics"] = answer((DATA / "vllm_two_models.prom").read_text())
    server.answers["/is_sleeping"] = hang
    fetcher = Fetcher(Remote(server.url))
    try:
        found = Probe(fetcher, server.url, may_operate=True)
        assert found.read().refusal("wake") == NO_ANSWER
        server.answers["/is_sleeping"] = answer('{"is_sleeping":false}')
        assert found.read().refusal("wake") is None
        assert found.read().is_now("sleeping") is False
    finally:
        fetcher.close()
