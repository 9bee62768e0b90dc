"""Serving: how one kind of server is asked for an operation, and how one sees that it was done. No sockets here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from allocator.plans import Effect, Plan
from kvtop.model.remote import RemoteFacts, total
from kvtop.serving_commands import ServingCommand
from kvtop.sources.remote.fetch import Page

#: Characters of a server's own words that are passed on.
_MAX_WORDS: Final = 160


@dataclass(frozen=True, slots=True)
class Call:
    """One request that changes a server: a path with its query, and a body that is sent as JSON."""

    path: str
    body: Mapping[str, Any] | None = None


class Serving(Protocol):
    """One kind of server. Knows no time: whoever asks and looks has the bounds."""

    def plan(self, command: ServingCommand, facts: RemoteFacts) -> Plan:
        """Return what a command would do, from what is known; a refusal where it cannot be done."""

    def call(self, command: ServingCommand, facts: RemoteFacts) -> Call:
        """Return the request for a command that ``plan`` does not refuse."""

    def refused(self, command: ServingCommand, page: Page) -> str | None:
        """Return why the server says that it has not done it; ``None`` where it does not say so."""

    def told(self, command: ServingCommand, page: Page) -> str | None:
        """Return what the server itself says of it; ``None`` when it only answers."""

    def shows(self, command: ServingCommand, facts: RemoteFacts) -> bool:
        """Return whether anything that is read would show that it was done."""

    def seen(self, command: ServingCommand, before: RemoteFacts, now: RemoteFacts) -> str | None:
        """Return what shows that it was done; ``None`` while nothing does."""

    def unseen(self, command: ServingCommand, now: RemoteFacts) -> str:
        """Return why nothing may show that it was done."""


def status_refusal(page: Page) -> str | None:
    """Return what an HTTP status other than success says, with the server's own words; ``None`` for success."""
    if 200 <= page.status < 300:
        return None
    if page.status in (401, 403):
        return f"it wants another bearer token ({page.status}); --token-file FILE gives one"
    if 300 <= page.status < 400:
        return f"it redirects ({page.status}); that is not followed"
    if page.status in (404, 405):
        return f"the server has no such operation ({page.status})"
    said = words_of(page)
    return f"it answers {page.status}" + (f": {said}" if said else "")


def words_of(page: Page) -> str:
    """Return what a server says of itself in an answer, in one short line; empty when there is nothing to read."""
    told = page.json()
    for key in ("error", "message", "detail"):
        if isinstance(told, dict) and key in told:
            told = told[key]
    text = told if isinstance(told, str) else "" if page.text.lstrip()[:1] == "<" else page.text
    first = next((row.strip() for row in text.splitlines() if row.strip()), "")
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in first)
    return line if len(line) <= _MAX_WORDS else f"{line[: _MAX_WORDS - 1]}…"


def resident_blocks(facts: RemoteFacts) -> int | None:
    """Return the blocks that cache events say are resident; ``None`` without events."""
    return None if facts.events is None else facts.events.distinct


def running(facts: RemoteFacts) -> float | None:
    """Return the requests that run on all engines behind the address."""
    return total(row.running for row in facts.rows)


def preemptions(facts: RemoteFacts) -> float | None:
    """Return preemptions so far over all engines behind the address."""
    return total(row.preemptions for row in facts.rows)


def load_effects(facts: RemoteFacts, *, disturbs: bool) -> list[Effect]:
    """Return the requests that a command finds, and whether it leaves them as they are."""
    found = (("running requests", running(facts)), ("waiting requests", total(row.waiting for row in facts.rows)))
    return [Effect(name, number, None if disturbs else number) for name, number in found]


def cleared(before: RemoteFacts, now: RemoteFacts) -> str | None:
    """Return what cache events tell of a cache that was emptied; ``None`` while they tell nothing.

    Before the first events have been taken over, what comes may be old.
    """
    if before.events is None or now.events is None or not before.events.batches:
        return None
    if before.events.state.startswith("catching up") or now.events.cleared <= before.events.cleared:
        return None
    return f"all blocks cleared, {before.events.distinct:,} → {now.events.distinct:,} resident blocks"


def known(texts: Iterable[str | None]) -> str:
    """Return the texts that there are, with semicolons between them."""
    return "; ".join(text for text in texts if text)
