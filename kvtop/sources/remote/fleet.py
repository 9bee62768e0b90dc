"""Fleet: several servers as one source: a row for each engine, and one server at a time opened in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, RemoteFacts
from kvtop.model.what_if import WhatIf
from kvtop.sources.base import Estimates, Source
from kvtop.sources.member import LocalMember


@runtime_checkable
class Openable(Protocol):
    """A source of several engines, of which one at a time can be shown in full."""

    @property
    def opened(self) -> str | None:
        """The one that is shown in full; ``None`` for the table of all."""

    def open(self, target: str | None) -> None:
        """Show one in full from the next reading on, or all of them again."""


class Fleet:
    """Reads several engines. One that is lost is a row that says so; the others go on.

    Args:
        sources: Servers over the network, and engines on this machine; their names tell them apart.
    """

    def __init__(self, sources: Sequence[Source | LocalMember]) -> None:
        self.name = f"{len(sources)} {'engines' if any(isinstance(s, LocalMember) for s in sources) else 'servers'}"
        self._sources = {source.name: source for source in sources}
        self._opened: str | None = None
        self._is_first = True

    @property
    def missing(self) -> Mapping[str, str]:
        """What is not offered by the opened one, or by the first of all, with the reason."""
        opened = self._opened
        return (self._sources[opened] if opened is not None else next(iter(self._sources.values()))).missing

    @property
    def opened(self) -> str | None:
        """The server that is shown in full; ``None`` for the table of all."""
        return self._opened

    def open(self, target: str | None) -> None:
        """Show one server in full from the next reading on, or all of them again."""
        self._opened = target if target in self._sources else None

    def read(self, focus: Focus, timeout_s: float) -> Observation | RemoteObservation:
        """Return what the opened one tells, or a row for each engine of each server.

        Raises:
            SourceError: The opened server is lost.
        """
        opened = self._opened
        if opened is not None:
            return self._sources[opened].read(focus, timeout_s)
        if self._is_first:  # start them all before waiting for the first
            for source in self._sources.values():
                self._rows(source, focus, 0.0)
        wait_s = timeout_s / len(self._sources) if self._is_first else 0.0
        self._is_first = False
        rows = [row for source in self._sources.values() for row in self._rows(source, focus, wait_s)]
        return RemoteObservation(RemoteFacts(FLEET, None, "", tuple(rows)))

    def what_if(self) -> WhatIf | None:
        """Return the opened server's estimates."""
        source: object = self._sources.get(self._opened or "")
        return source.what_if() if isinstance(source, Estimates) else None

    def close(self) -> None:
        """Stop reading all. Safe to call twice."""
        for source in self._sources.values():
            source.close()

    def _rows(self, source: Source | LocalMember, focus: Focus, timeout_s: float) -> list[EngineRow]:
        try:
            if isinstance(source, LocalMember):
                return [source.row(timeout_s)]
            seen = source.read(focus, timeout_s)
        except SourceError as error:
            return [EngineRow(target=source.name, trouble=str(error), is_up=False)]
        if not isinstance(seen, RemoteObservation):
            return []
        facts = seen.facts
        return [replace(row, target=source.name, kind=facts.kind, age_s=facts.age_s) for row in facts.rows]
