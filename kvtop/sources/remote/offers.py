"""Offers: which operations a server lets one do, or why not. Found out by looking, never by doing them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from kvtop.sources.remote.fetch import FetchError, Page

#: Operations that are one more choice of a command: resetting with requests on the blocks, and sleep that only stops.
RESET_RUNNING: Final = "reset-prefix-cache running"
SLEEP_0: Final = "sleep level 0"

DEVELOPMENT: Final = "needs development mode: VLLM_SERVER_DEV_MODE=1 on the server"
SLEEP_MODE: Final = "needs --enable-sleep-mode on the server"
MEMORY_SAVER: Final = "needs --enable-memory-saver on the server"
SLOT_PATH: Final = "needs --slot-save-path on the server"
SLOTS: Final = "needs /slots, which this server does not offer: what a slot holds cannot be seen"
IDLE_ONLY: Final = "this engine flushes only while nothing is served; pause with retract first"

#: Seconds that an answer may take without which the facts are good too.
_ASIDE_S: Final = 2.0
NO_ANSWER: Final = "not known: the server has not answered that yet"

#: A request that no server acts on: llama.cpp looks at the folder for slots first, and then at the action.
_NO_ACTION: Final = "/slots/0?action=none"


class Asked(Protocol):
    """A server that is asked; ``Fetcher`` is one."""

    def get(self, path: str, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``GET path``."""

    def post(self, path: str, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``POST path``."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a server lets one do.

    Attributes:
        reasons: Operation → why it is not available; ``None`` when it is, as far as could be found out.
        state_paths: State → the path that tells whether the engine is in it, and the key of the answer.
        is_sure: Whether every question was answered, by whatever.
    """

    reasons: Mapping[str, str | None] = field(default_factory=dict)
    state_paths: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_sure: bool = True

    def with_sleep_mode(self, is_on: bool | None) -> Offers:
        """Return the same, knowing whether sleep mode is on; ``None`` is not known."""
        if is_on is not False or self.reasons.get("sleep"):
            return self
        return replace(self, reasons={**self.reasons, "sleep": SLEEP_MODE})


def release_of(version: str | None) -> tuple[int, int, int] | None:
    """Return a version's first three numbers; ``None`` for one that has none, such as a development build."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?![0-9])", version or "")
    if found is None or ".dev" in (version or ""):
        return None
    return int(found[1]), int(found[2]), int(found[3] or 0)


def is_before(version: str | None, *release: int) -> bool:
    """Return whether a version is known to be older than a release."""
    known = release_of(version)
    return known is not None and known < release


def find_offers(kind: str, version: str | None, pages: Asked, *, may_operate: bool) -> Offers:
    """Return what a server lets one do. What cannot be found out counts as offered: the server will say.

    Args:
        kind: What the server is.
        version: Its release, where it tells.
        pages: The server.
        may_operate: Whether it may be sent more than questions.
    """
    if kind == "vLLM":
        return _vllm(version, pages)
    if kind == "SGLang":
        return _sglang(pages)
    return _llama(pages, may_operate) if kind == "llama.cpp" else Offers()


def ask(pages: Asked, path: str) -> Any:
    """Return the JSON that a path answers; ``None`` when it answers anything else, or nothing in a short time."""
    page = _page(pages, path)
    return page.json() if page is not None and page.status == 200 else None


def _page(pages: Asked, path: str) -> Page | None:
    try:
        return pages.get(path, answer_s=_ASIDE_S)
    except FetchError:
        return None


def _vllm(version: str | None, pages: Asked) -> Offers:
    paths, missing = {}, {}
    for state, path in (("sleeping", "/is_sleeping"), ("paused", "/is_paused")):
        page = _page(pages, path)
        told = page.json() if page is not None and page.status == 200 else None
        if isinstance(told, dict) and isinstance(told.get(path[1:]), bool):
            paths[state] = path, path[1:]
        else:
            missing[state] = NO_ANSWER if page is None else DEVELOPMENT
    mode = missing.get("sleeping")
    old_pause = "from vLLM 0.12 on" if is_before(version, 0, 12) else None
    pause = old_pause or missing.get("paused")
    reasons = {
        "reset-prefix-cache": mode,
        RESET_RUNNING: mode or old_pause,
        "sleep": mode,
        SLEEP_0: mode or ("from vLLM 0.17 on" if is_before(version, 0, 17) else None),
        "wake": mode,
        "pause-generation": pause,
        "continue-generation": pause,
    }
    return Offers(reasons, paths, NO_ANSWER not in missing.values())


def ask_sleep_mode(pages: Asked) -> bool | None:
    """Return whether a vLLM was started for sleeping; ``None`` when that is not told.

    The server looks through its whole environment for this answer, once, and keeps it: the first try may be in vain.
    """
    told = ask(pages, "/server_info?config_format=json")
    for key in ("vllm_config", "model_config", "enable_sleep_mode"):
        told = told.get(key) if isinstance(told, dict) else None
    return told if isinstance(told, bool) else None


def _sglang(pages: Asked) -> Offers:
    page = _page(pages, "/server_info")
    info = page.json() if page is not None else None
    saver = MEMORY_SAVER if isinstance(info, dict) and info.get("enable_memory_saver") is False else None
    reasons = {
        "reset-prefix-cache": None,
        RESET_RUNNING: IDLE_ONLY,
        "pause-generation": None,
        "continue-generation": None,
        "release-memory": saver,
        "resume-memory": saver,
    }
    return Offers(reasons, is_sure=page is not None)


def _llama(pages: Asked, may_operate: bool) -> Offers:
    page = _page(pages, "/slots")
    reason = NO_ANSWER if page is None else None if isinstance(page.json(), list) else SLOTS
    if reason is None and may_operate:
        try:
            reason = SLOT_PATH if pages.post(_NO_ACTION, answer_s=_ASIDE_S).status == 501 else None
        except FetchError:
            reason = NO_ANSWER
    return Offers(dict.fromkeys(("erase-slot", "save-slot", "restore-slot"), reason), is_sure=reason != NO_ANSWER)
