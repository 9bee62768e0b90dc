"""Fleet: several servers as one source: a row for each engine, and one server at a time opened in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvtop.errors import SourceError
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, RemoteFacts
from kvtop.model.what_if import WhatIf
from kvtop.sources.base import Estimates


class RemoteReader(Protocol):
    """One server; ``RemoteSource`` is one."""

    name: str
    missing: Mapping[str, str]

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the newest facts."""

    def close(self) -> None:
        """Stop reading."""


@runtime_checkable
class Openable(Protocol):
    """A source of several engines, of which one at a time can be shown in full."""

    @property
    def opened(self) -> str | None:
        """The one that is shown in full; ``None`` for the table of all."""

    def open(self, target: str | None) -> None:
        """Show one in full from the next reading on, or all of them again."""


class Fleet:
    """Reads several servers. One that is lost is a row that says so; the others go on.

    Args:
        sources: The servers; their names tell them apart.
    """

    def __init__(self, sources: Sequence[RemoteReader]) -> None:
        self.name = f"{len(sources)} servers"
        self.missing: Mapping[str, str] = sources[0].missing
        self._sources = {source.name: source for source in sources}
        self._opened: str | None = None
        self._is_first = True

    @property
    def opened(self) -> str | None:
        """The server that is shown in full; ``None`` for the table of all."""
        return self._opened

    def open(self, target: str | None) -> None:
        """Show one server in full from the next reading on, or all of them again."""
        self._opened = target if target in self._sources else None

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the opened server's facts, or a row for each engine of each server.

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

    def _rows(self, source: RemoteReader, focus: Focus, timeout_s: float) -> list[EngineRow]:
        try:
            facts = source.read(focus, timeout_s).facts
        except SourceError as error:
            return [EngineRow(target=source.name, trouble=str(error), is_up=False)]
        return [replace(row, target=source.name, kind=facts.kind, age_s=facts.age_s) for row in facts.rows]
